// The run over its steps: rewards, and what ended the trajectories.

const CHART = { width: 760, height: 250, left: 46, right: 96, top: 14, bottom: 30 };
const SPARK = { width: 420, height: 34 };
let chartReward = "";

function runView(onStep) {
  const modes = [...new Set(report.steps.map((step) => step.mode))];
  return [
    el("h2", {}, "Run"),
    el("p", { class: "lead" }, runText()),
    rewardSection(modes, onStep),
    modes.map((mode) => stopSection(mode)),
    stepTable(onStep),
  ];
}

function runText() {
  const numSteps = new Set(report.steps.map((step) => step.step)).size;
  return `${counted(report.num_trajectories, "trajectory", "trajectories")} over ${counted(numSteps, "step")}.`;
}

function rewardName(name) {
  return name === "" ? "Sum of all rewards" : readableLine(name);
}

// ---- rewards ----

function rewardSection(modes, onStep) {
  const names = [...new Set(report.steps.flatMap((step) => Object.keys(step.rewards)))].sort();
  if (names.length === 0) return el("p", { class: "muted" }, "The record holds no rewards.");
  if (!names.includes(chartReward)) chartReward = names[0];
  const choices = names.length > 2 ? names : [names.at(-1)]; // of one function its sum is the same
  const redraw = (event) => {
    chartReward = event.target.value;
    byId("panel").replaceChildren(...runView(onStep).flat());
    byId("chart-reward").focus();
  };
  const select = el("select", { id: "chart-reward", onchange: redraw }, choices.map((name) => el("option", { value: name }, rewardName(name))));
  select.value = choices.includes(chartReward) ? chartReward : choices[0];
  return el(
    "section", { class: "chart" },
    el("div", { class: "tools" }, el("h3", {}, "Reward, mean and one standard deviation"), choices.length > 1 && el("label", { class: "field" }, el("span", {}, "Of"), select)),
    rewardChart(modes, select.value, onStep),
    el("p", { id: "chart-readout", class: "readout", role: "status" }, "Point at the chart, or go there with Tab and the arrow keys; Enter shows the step's trajectories."),
  );
}

function rewardChart(modes, name, onStep) {
  const points = report.steps.filter((step) => step.rewards[name]).map((step) => ({ ...step, ...step.rewards[name] }));
  const xs = points.map((point) => point.step);
  const x = scale(Math.min(...xs), Math.max(...xs), CHART.left, CHART.width - CHART.right);
  const low = Math.min(0, ...points.map((point) => point.mean - point.std));
  const high = Math.max(...points.map((point) => point.mean + point.std));
  const ticks = niceTicks(low, high, 4);
  const y = scale(ticks[0], ticks.at(-1), CHART.height - CHART.bottom, CHART.top);
  const guide = svg("line", { class: "guide", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden" });
  const chart = svg(
    "svg",
    { class: "plot", viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", tabindex: "0", "aria-label": chartLabel(modes, points) },
    ticks.map((tick) => [
      svg("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: CHART.left - 8, y: y(tick) + 4, "text-anchor": "end" }, figure(tick, 3)),
    ]),
    niceTicks(Math.min(...xs), Math.max(...xs), 6).filter((tick) => tick <= Math.max(...xs) && Number.isInteger(tick)).map((tick) =>
      svg("text", { x: x(tick), y: CHART.height - 8, "text-anchor": "middle" }, tick)),
    modes.map((mode, i) => series(points.filter((point) => point.mode === mode), x, y, i, mode)),
    guide,
  );
  readWithPointerAndKeys(chart, guide, points, x, onStep);
  return chart;
}

function chartLabel(modes, points) {
  return modes.map((mode) => {
    const own = points.filter((point) => point.mode === mode);
    return own.length ? `${words(mode)}: mean reward ${figure(own[0].mean, 3)} at step ${own[0].step}, ${figure(own.at(-1).mean, 3)} at step ${own.at(-1).step}` : `${words(mode)}: no rewards`;
  }).join("; ");
}

/** A line with its band and its name at the end; the second mode is dashed, with squares. */
function series(points, x, y, number, mode) {
  if (points.length === 0) return [];
  const path = (values) => values.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  const upper = points.map((p) => [x(p.step), y(p.mean + p.std)]);
  const lower = points.map((p) => [x(p.step), y(p.mean - p.std)]).reverse();
  const end = points.at(-1);
  const markers = points.length === 1 || number > 0 ? points : [end];
  return [
    svg("path", { class: `band series-${number % 2}`, d: `${path([...upper, ...lower])}Z` }),
    svg("path", { class: `mean series-${number % 2}`, d: path(points.map((p) => [x(p.step), y(p.mean)])) }),
    markers.map((p) => svg("rect", { class: `marker series-${number % 2}`, x: x(p.step) - 3, y: y(p.mean) - 3, width: 6, height: 6, rx: number ? 0 : 3 })),
    svg("text", { class: "series-name", x: x(end.step) + 9, y: y(end.mean) + 4 + number * 2 }, `${words(mode)} ${figure(end.mean, 3)}`),
  ];
}

function readWithPointerAndKeys(chart, guide, points, x, onStep) {
  let position = points.length - 1;
  const show = (next) => {
    position = Math.min(Math.max(next, 0), points.length - 1);
    const point = points[position];
    guide.setAttribute("x1", x(point.step));
    guide.setAttribute("x2", x(point.step));
    guide.setAttribute("visibility", "visible");
    byId("chart-readout").textContent =
      `Step ${point.step}, ${words(point.mode)}: ${figure(point.mean, 4)} ± ${figure(point.std, 3)} over ${counted(point.num, "trajectory", "trajectories")}`;
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * CHART.width;
    const distances = points.map((point) => Math.abs(x(point.step) - at));
    show(distances.indexOf(Math.min(...distances)));
  });
  chart.addEventListener("click", () => onStep(points[position].step));
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") onStep(points[position].step);
    else if (Object.hasOwn(moves, event.key)) show(position + moves[event.key]);
    else return;
    event.preventDefault();
  });
}

// ---- stop reasons ----

/** A small curve for each reason: its share of a step's trajectories. */
function stopSection(mode) {
  const steps = report.steps.filter((step) => step.mode === mode);
  const totals = new Map();
  for (const step of steps) {
    for (const [reason, number] of Object.entries(step.stop_reasons)) totals.set(reason, (totals.get(reason) ?? 0) + number);
  }
  const all = [...totals.values()].reduce((sum, number) => sum + number, 0);
  const reasons = [...totals].sort((a, b) => b[1] - a[1]);
  return el(
    "section", { class: "chart" },
    el("h3", {}, `What ended the trajectories, ${words(mode)}`),
    el("p", { class: "muted" }, "Share of each step, 0 to 100 %."),
    el("ul", { class: "sparks" }, reasons.map(([reason, number]) =>
      el("li", {}, stopBadge(reason), spark(steps, reason), el("span", { class: "spark-total" }, `${figure((100 * number) / all, 3)} %`, el("span", { class: "muted" }, ` · ${grouped.format(number)}`))))),
  );
}

function spark(steps, reason) {
  const { width, height } = SPARK;
  const bar = width / steps.length;
  const barHeight = (step) => {
    const number = step.stop_reasons[reason] ?? 0;
    return number === 0 ? 0 : Math.max((height * number) / step.num, 2); // one of many is still seen
  };
  return svg(
    "svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { class: "grid", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }),
    steps.map((step, i) => svg("rect", { x: i * bar + bar * 0.1, width: bar * 0.8, y: height - barHeight(step), height: barHeight(step) })),
  );
}

// ---- the same as a table ----

function stepTable(onStep) {
  const head = ["Step", "Mode", "Trajectories", "Reward", "Spread", "Ended as"].map((name) => el("th", { scope: "col" }, name));
  const rows = () => report.steps.map((step) => el(
    "tr", {},
    el("td", {}, el("button", { type: "button", class: "quiet", onclick: () => onStep(step.step), "aria-label": `Show step ${step.step}` }, step.step)),
    [words(step.mode), step.num, figure(step.rewards[""]?.mean, 4), figure(step.rewards[""]?.std, 3), stopText(step)].map((value) => el("td", {}, value)),
  ));
  const body = el("tbody");
  const fill = () => body.childElementCount || body.append(...rows());
  return el("details", { class: "fold", ontoggle: fill }, el("summary", {}, "The figures as a table"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), body)));
}

function stopText(step) {
  return Object.entries(step.stop_reasons).map(([reason, number]) => `${words(reason)} ${number}`).join(", ");
}

// ---- scales ----

function scale(from, to, start, end) {
  const width = to - from || 1;
  return (value) => start + ((to === from ? 0.5 : (value - from) / width)) * (end - start);
}

/** Round values from below `low` to above `high`, about `number` of them. */
function niceTicks(low, high, number) {
  const raw = (high - low || 1) / number;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= raw);
  const first = Math.floor(low / step);
  const last = Math.max(Math.ceil(high / step), first + 1);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
