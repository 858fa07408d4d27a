// The list: filters, order, and as many rows as can be seen.

const ORDERS = {
  "newest first": (a, b) => b.position - a.position,
  "oldest first": (a, b) => a.position - b.position,
  "reward, highest first": by((row) => -row.reward),
  "reward, lowest first": by((row) => row.reward ?? Infinity),
  "advantage, largest first": by((row) => -Math.abs(row.advantage ?? 0)),
  "turns, most first": by((row) => -row.num_turns),
  "failed calls, most first": by((row) => -(row.num_failed + row.num_invalid)),
  "tokens, most first": by((row) => -row.num_completion_tokens),
};
const CALLS = {
  any: () => true,
  "some failed or invalid": (row) => row.num_failed + row.num_invalid > 0,
  "some failed": (row) => row.num_failed > 0,
  "some invalid": (row) => row.num_invalid > 0,
  "all ok": (row) => row.num_calls > 0 && row.num_failed + row.num_invalid === 0,
  "no calls": (row) => row.num_calls === 0,
};
const NUM_ROWS_AROUND = 6; // rendered above and below what can be seen
const SEARCH_DELAY_MS = 150;

const list = { shown: [], found: null, selectedId: null, onSelect: () => {}, searchNumber: 0 };

function by(key) {
  return (a, b) => key(a) - key(b) || a.position - b.position;
}

function startList(onSelect) {
  list.onSelect = onSelect;
  const form = byId("filters");
  setOptions(form.elements.order, Object.keys(ORDERS));
  setOptions(form.elements.calls, Object.keys(CALLS));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => event.target === byId("search") || applyFilters());
  form.addEventListener("reset", () => setTimeout(() => search(0)));
  byId("search").addEventListener("input", () => search(SEARCH_DELAY_MS));
  byId("list").addEventListener("scroll", renderRows, { passive: true });
  byId("list").addEventListener("keydown", listKey);
  new ResizeObserver(renderRows).observe(byId("list"));
}

/** New data: the choices follow it, the filters and the place stay. */
function refreshList() {
  const { mode, stop_reason } = byId("filters").elements;
  setOptions(mode, ["any", ...distinct("mode")]);
  setOptions(stop_reason, ["any", ...distinct("stop_reason")]);
  return search(0, byId("list").scrollTop);
}

function distinct(name) {
  return [...new Set(report.rows.map((row) => row[name]))].sort();
}

function setOptions(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, words(name))));
  if (names.includes(chosen)) select.value = chosen;
}

// ---- filters ----

async function search(delayMs, scrollTop = 0) {
  const number = ++list.searchNumber;
  const isStale = () => number !== list.searchNumber;
  const text = byId("search").value;
  await new Promise((resolve) => setTimeout(resolve, delayMs));
  if (isStale()) return;
  const progress = (position) => {
    byId("counts").textContent = `Searching, ${position} of ${report.rows.length} …`;
  };
  const found = text === "" ? null : await searchMessages(text, isStale, progress);
  if (isStale()) return;
  list.found = found;
  applyFilters(scrollTop);
}

function applyFilters(scrollTop = 0) {
  const values = Object.fromEntries(new FormData(byId("filters")));
  const passes = (row) =>
    (list.found === null || list.found.has(row.id)) &&
    (values.mode === "any" || row.mode === values.mode) &&
    (values.stop_reason === "any" || row.stop_reason === values.stop_reason) &&
    CALLS[values.calls](row) &&
    inRange(row.step, values.step_from, values.step_to) &&
    inRange(row.reward, values.reward_from, values.reward_to) &&
    inRange(row.num_turns, values.turns_from, values.turns_to);
  list.shown = report.rows.filter(passes).sort(ORDERS[values.order]);
  const total = counted(report.rows.length, "trajectory", "trajectories");
  const isAll = list.shown.length === report.rows.length;
  byId("counts").textContent = isAll ? total : `${grouped.format(list.shown.length)} of ${total}`;
  showNumFilters(values);
  renderRows();
  byId("list").scrollTop = scrollTop;
}

function inRange(value, from, to) {
  if (from === "" && to === "") return true;
  return value !== null && (from === "" || value >= Number(from)) && (to === "" || value <= Number(to));
}

function showNumFilters(values) {
  const { text, order, ...filters } = values;
  const number = Object.values(filters).filter((value) => value !== "" && value !== "any").length;
  byId("num-filters").textContent = number ? `(${number} set)` : "";
}

function filterStep(step) {
  const { step_from, step_to } = byId("filters").elements;
  step_from.value = step_to.value = step;
  applyFilters();
}

// ---- rows ----

function rowHeight() {
  return 5.75 * parseFloat(getComputedStyle(document.documentElement).fontSize);
}

function renderRows() {
  const view = byId("list");
  const height = rowHeight();
  const first = Math.max(0, Math.floor(view.scrollTop / height) - NUM_ROWS_AROUND);
  const last = Math.ceil((view.scrollTop + view.clientHeight) / height) + NUM_ROWS_AROUND;
  const rows = byId("list-rows");
  rows.style.height = `${list.shown.length * height}px`;
  rows.replaceChildren(
    ...list.shown.slice(first, last).map((row, offset) => listRow(row, first + offset, height)),
  );
  const selected = byId("selected-row");
  if (selected) view.setAttribute("aria-activedescendant", selected.id);
  else view.removeAttribute("aria-activedescendant");
}

function listRow(row, position, height) {
  const isSelected = row.id === list.selectedId;
  const element = el(
    "div",
    {
      class: "row",
      role: "option",
      id: isSelected ? "selected-row" : `row-${position}`,
      "aria-selected": String(isSelected),
      "aria-setsize": list.shown.length,
      "aria-posinset": position + 1,
      onclick: () => list.onSelect(row.id),
    },
    el("span", { class: "row-place" }, `${batchName(row)} · ${placeName(row)}`),
    el("span", { class: "row-reward" }, figure(row.reward, 3), el("span", { class: "unseen" }, " reward")),
    el("bdi", { class: "row-question" }, readableLine(row.question) || NOT_KNOWN),
    el("span", { class: "row-facts" }, stopBadge(row.stop_reason), el("span", {}, rowFacts(row))),
  );
  element.style.top = `${position * height}px`;
  element.style.height = `${height}px`;
  return element;
}

function rowFacts(row) {
  const parts = [counted(row.num_turns, "turn")];
  const numBad = row.num_failed + row.num_invalid;
  if (row.num_calls) parts.push(counted(row.num_calls, "call") + (numBad ? ` (${numBad} bad)` : ""));
  return parts.join(" · ");
}

function stopBadge(reason) {
  const isGood = reason === "answered" || reason === "environment_done";
  return el("span", { class: `badge ${isGood ? "ok" : "invalid"}` }, `${isGood ? "✓" : "▲"} ${words(reason)}`);
}

// ---- selection ----

function showSelected(id) {
  list.selectedId = id;
  const position = list.shown.findIndex((row) => row.id === id);
  const view = byId("list");
  const height = rowHeight();
  if (position >= 0) {
    const top = position * height;
    view.scrollTop = Math.min(top, Math.max(view.scrollTop, top + height - view.clientHeight));
  }
  renderRows();
}

/** Select the row `distance` further down the list as it is filtered now. */
function moveSelection(distance) {
  if (list.shown.length === 0) return;
  const position = list.shown.findIndex((row) => row.id === list.selectedId);
  const start = position < 0 ? (distance > 0 ? -1 : 0) : position;
  const next = Math.min(Math.max(start + distance, 0), list.shown.length - 1);
  list.onSelect(list.shown[next].id);
}

function listKey(event) {
  const page = Math.max(1, Math.floor(byId("list").clientHeight / rowHeight()) - 1);
  const distances = {
    ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity,
  };
  if (event.key === "Enter") byId("panel").focus();
  else if (event.key in distances && !event.ctrlKey && !event.metaKey) moveSelection(distances[event.key]);
  else return;
  event.preventDefault();
}
