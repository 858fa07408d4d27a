// The page: what is shown now, the keys, the theme, and new data of a run that goes on.

const VIEWS = ["run", "chat", "tokens", "group", "timeline"];
const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const POLL_MS = 2000;

const state = { id: null, view: "run", colouring: "mask", theme: "auto", drawNumber: 0 };

// ---- drawing ----

async function draw() {
  const number = ++state.drawNumber;
  const nodes = await viewNodes(rowsById.get(state.id));
  if (number !== state.drawNumber) return; // something newer is being drawn
  const panel = byId("panel");
  panel.replaceChildren(...nodes.flat().filter(Boolean));
  panel.setAttribute("aria-labelledby", `tab-${state.view}`);
  for (const view of VIEWS) {
    const isShown = view === state.view;
    byId(`tab-${view}`).setAttribute("aria-selected", String(isShown));
    byId(`tab-${view}`).tabIndex = isShown ? 0 : -1;
  }
  saveState();
}

async function viewNodes(row) {
  if (report.rows.length === 0) return [emptyState("No trajectories yet", "They show here as the run writes them.")];
  if (state.view === "run") return runView(openStep);
  if (row === undefined) return [emptyState("Nothing selected", "Choose a trajectory from the list.")];
  if (state.view === "timeline") return timelineView(row, openFrom("chat"));
  if (state.view === "group") return groupView(row, openFrom("chat"));
  const body = await loadBody(row.id);
  return state.view === "chat" ? chatView(row, body) : tokensView(row, body, state.colouring);
}

function setView(view) {
  state.view = view;
  byId("main").scrollTop = 0;
  return draw();
}

function setColouring(colouring) {
  state.colouring = colouring;
  if (state.view !== "tokens") return setView("tokens");
  colourTokens(byId("panel"), colouring);
  saveState();
}

function select(id) {
  state.id = id;
  showSelected(id);
  byId("main").scrollIntoView({ block: "nearest" }); // on a narrow page it stands below the list
  return setView(state.view === "run" ? "chat" : state.view);
}

const openFrom = (view) => (id) => {
  state.view = view;
  return select(id);
};

function openStep(step) {
  filterStep(step);
  moveSelection(-Infinity);
}

// ---- where one is, in the address ----

function saveState() {
  const { id, view, colouring, theme } = state;
  const values = { view, colouring, theme, ...(id === null ? {} : { id }) };
  history.replaceState(null, "", `#${new URLSearchParams(values)}`);
}

function readState() {
  const values = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (VIEWS.includes(values.view)) state.view = values.view;
  if (COLOURING_NAMES.includes(values.colouring)) state.colouring = values.colouring;
  if (Object.hasOwn(THEMES, values.theme ?? "")) state.theme = values.theme;
  state.id = values.id ?? null;
}

// ---- theme and keys ----

function setTheme(theme) {
  state.theme = theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `${THEMES[theme]} Theme: ${theme}`;
}

function nextTheme() {
  const themes = Object.keys(THEMES);
  setTheme(themes[(themes.indexOf(state.theme) + 1) % themes.length]);
  saveState();
}

const KEYS = {
  j: () => moveSelection(1),
  k: () => moveSelection(-1),
  "/": () => byId("search").focus(),
  r: () => setView("run"),
  c: () => setView("chat"),
  t: () => setView("timeline"),
  g: () => setView("group"),
  "?": () => byId("help").showModal(),
  ...Object.fromEntries(COLOURING_NAMES.map((name, i) => [String(i + 1), () => setColouring(name)])),
};

function onKey(event) {
  if (event.key === "Escape" && event.target === byId("search")) byId("list").focus();
  const isTyping = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (!byId("keys-on").checked || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
}

function tabKey(event) {
  const distance = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (distance === undefined) return;
  const next = VIEWS[(VIEWS.indexOf(state.view) + distance + VIEWS.length) % VIEWS.length];
  setView(next);
  byId(`tab-${next}`).focus();
}

// ---- data ----

async function showIndex(index) {
  setIndex(index);
  document.title = `${readableLine(report.name)} · rollouts`;
  byId("name").replaceChildren(...readable(report.name));
  byId("totals").textContent = `${isLive ? "live · " : ""}${counted(report.num_trajectories, "trajectory", "trajectories")}`;
  showNotes();
  if (!rowsById.has(state.id)) state.id = report.rows.at(-1)?.id ?? null;
  await refreshList();
}

function showNotes() {
  const notes = byId("notes");
  notes.hidden = report.notes.length === 0;
  notes.replaceChildren(...report.notes.map((note) => el("li", {}, readable(note))));
}

function showProblem(message) {
  byId("problem").hidden = false;
  byId("problem").replaceChildren(...readable(message));
}

/** New trajectories join the list; what is being read stays as it is. */
async function poll() {
  try {
    const index = await fetchIndex();
    byId("problem").hidden = true;
    if (index !== null) {
      await showIndex(index);
      if (list.selectedId !== state.id) showSelected(state.id);
      if (state.view === "run" || byId("panel").childElementCount <= 1) await draw();
    }
  } catch (error) {
    showProblem(`The record can't be read just now: ${error.message}`);
  }
  setTimeout(poll, POLL_MS);
}

async function start() {
  addEventListener("error", (event) => showProblem(`The page ran into an error: ${event.message}`));
  addEventListener("unhandledrejection", (event) => showProblem(`The page ran into an error: ${event.reason}`));
  addEventListener("keydown", onKey);
  byId("theme").addEventListener("click", nextTheme);
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => setView(view));
  document.querySelector("[role=tablist]").addEventListener("keydown", tabKey);
  startList(select);
  readState();
  setTheme(state.theme);
  await showIndex(isLive ? await fetchIndex() : JSON.parse(byId("index").textContent));
  showSelected(state.id);
  await draw();
  if (isLive) setTimeout(poll, POLL_MS);
}

start();
