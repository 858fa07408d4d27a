// A batch on the clock: when each trajectory waited for the model, and when for its tools.

const TIMELINE_ORDERS = { "by end": (a, b) => endOf(b) - endOf(a), "by group": (a, b) => a.group - b.group || a.generation - b.generation };
let timelineOrder = "by end";

const endOf = (row) => Math.max(0, ...row.spans.map(([, , , end]) => end));

function timelineView(row, onOpen) {
  const rows = batchOf(row).filter((other) => other.spans.length);
  const title = el("h2", {}, `${batchName(row)} · timeline`);
  if (rows.length === 0) return [title, emptyState("No times here", "The record holds no spans of this batch.")];
  const last = rows.reduce((a, b) => (endOf(b) > endOf(a) ? b : a));
  const end = endOf(last) || 1;
  return [
    title,
    el("p", { class: "lead" }, criticalText(rows, last)),
    timelineTools(row, onOpen),
    el(
      "div", { class: "timeline", role: "group", "aria-label": "Trajectories over time" },
      axis(end),
      [...rows].sort(TIMELINE_ORDERS[timelineOrder]).map((other) => timelineRow(other, end, other === last, other.id === row.id, onOpen)),
    ),
    el("p", { id: "span-readout", class: "readout" }, "Point at a row or go there with Tab to read its times."),
  ];
}

/** What bounds the batch, and by how much. */
function criticalText(rows, last) {
  const others = rows.filter((row) => row !== last).map(endOf);
  const lead = others.length ? ` The next one ended ${seconds(endOf(last) - Math.max(...others))} earlier.` : "";
  return `${counted(rows.length, "trajectory", "trajectories")} in ${seconds(endOf(last))}. ◆ ${placeName(last)} ended last and bounds the batch: ` +
    `${seconds(total(last, "model"))} in the model, ${seconds(total(last, "tool"))} in tools.${lead}`;
}

/** Seconds in spans of a kind; calls side by side count once. */
function total(row, kind) {
  let sum = 0;
  let covered = 0;
  for (const [, , start, end] of row.spans.filter((span) => span[0] === kind).sort((a, b) => a[2] - b[2])) {
    sum += Math.max(0, end - Math.max(start, covered));
    covered = Math.max(covered, end);
  }
  return sum;
}

function timelineTools(row, onOpen) {
  const redraw = (event) => {
    timelineOrder = event.target.value;
    byId("panel").replaceChildren(...timelineView(row, onOpen));
    byId("timeline-order").focus();
  };
  const select = el("select", { id: "timeline-order", onchange: redraw });
  setOptions(select, Object.keys(TIMELINE_ORDERS));
  select.value = timelineOrder;
  return el(
    "div", { class: "tools" },
    el("label", { class: "field" }, el("span", {}, "Order"), select),
    el("ul", { class: "legend" },
      el("li", {}, el("span", { class: "swatch span-model" }), " model"),
      el("li", {}, el("span", { class: "swatch span-tool" }), " tool, hatched"),
      el("li", {}, "◆ ends last")),
  );
}

function axis(end) {
  const ticks = niceTicks(0, end, 6).filter((tick) => tick <= end);
  return el("div", { class: "axis", "aria-hidden": "true" }, el("div", { class: "track" }, ticks.map((tick) => placed(el("span", {}, `${figure(tick)} s`), tick / end))));
}

function placed(element, left, width = null) {
  element.style.left = `${100 * left}%`;
  if (width !== null) element.style.width = `${100 * width}%`;
  return element;
}

function timelineRow(row, end, isLast, isSelected, onOpen) {
  const bars = row.spans.map(([kind, , start, spanEnd]) => placed(el("span", { class: `bar span-${kind === "model" ? "model" : "tool"}` }), start / end, (spanEnd - start) / end));
  const show = () => byId("span-readout").replaceChildren(el("b", {}, `${placeName(row)}: `), el("bdi", {}, readableLine(spanText(row))));
  const label = `${placeName(row)}, ends at ${seconds(endOf(row))}, model ${seconds(total(row, "model"))}, tools ${seconds(total(row, "tool"))}${isLast ? ", bounds the batch" : ""}`;
  return el(
    "button",
    { type: "button", class: `line ${isLast ? "is-critical" : ""}`, "aria-label": label, "aria-current": isSelected && "true", onclick: () => onOpen(row.id), onfocus: show, onpointerenter: show },
    el("span", { class: "line-name" }, isLast ? "◆ " : "", placeName(row)),
    el("span", { class: "track" }, bars),
    el("span", { class: "line-end" }, seconds(endOf(row))),
  );
}

function spanText(row) {
  return row.spans.map(([, name, start, end]) => `${name} ${start.toFixed(2)}–${end.toFixed(2)} s`).join(" · ");
}
