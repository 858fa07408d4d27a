// One trajectory as a conversation: calls beside their results, thoughts folded.

const STATUS = { ok: "✓ ok", failed: "✕ failed", invalid: "▲ invalid" };
const knownStatus = (status) => (Object.hasOwn(STATUS, status ?? "") ? status : "");

function chatView(row, body) {
  return [
    trajectoryHeader(row),
    row.error && el("p", { class: "problem" }, el("b", {}, "The engine failed: "), readable(row.error)),
    el("h3", { class: "part" }, "Prompt"),
    exchanges(body.prompt, [], []),
    datasetRow(Object.entries(body.row)),
    el("h3", { class: "part" }, "Rollout"),
    body.completion.length
      ? exchanges(body.completion, body.turn_outputs, body.tool_results)
      : el("p", { class: "muted" }, "The model was never asked."),
    el("p", { class: "ending" }, stopBadge(row.stop_reason), ` after ${counted(row.num_turns, "turn")}`),
  ];
}

function datasetRow(columns) {
  const facts = columns.map(([name, value]) => fact(readableLine(name), value === null ? NOT_KNOWN : textBlock(value)));
  return facts.length > 0 && folded("Dataset row", el("dl", { class: "fields-table" }, facts));
}

function trajectoryHeader(row) {
  return el(
    "header",
    { class: "trajectory" },
    el("h2", {}, `${batchName(row)} · ${placeName(row)}`),
    el("dl", { class: "facts" }, trajectoryFacts(row).map(([name, value]) => fact(name, value))),
    el("details", { class: "more" }, el("summary", {}, "All fields"), fieldTable(row)),
  );
}

function fact(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

function trajectoryFacts(row) {
  const numBad = row.num_failed + row.num_invalid;
  return [
    ["Reward", figure(row.reward, 4)],
    ["Advantage", row.advantage === null ? NOT_KNOWN : signed(row.advantage)],
    ["Ended as", stopBadge(row.stop_reason)],
    ["Calls", row.num_calls ? `${row.num_calls}, ${numBad ? `${numBad} bad` : "all ok"}` : "none"],
    ["Tokens sampled", `${grouped.format(row.num_sampled_tokens)} of ${grouped.format(row.num_completion_tokens)}`],
    ["Trained", row.trained ? "yes" : "no"],
  ];
}

function fieldTable(row) {
  const fields = {
    id: row.id,
    ...Object.fromEntries(Object.entries(row.rewards).map(([name, value]) => [`reward ${name}`, figure(value)])),
    seed: row.seed,
    temperature: row.temperature === null ? null : figure(row.temperature),
    thinking: row.thinking === null ? null : row.thinking ? "on" : "off",
    tools: row.tools.join(", ") || null,
    "policy versions": [...new Set(row.policy_versions)].join(", ") || null,
    "prompt tokens": grouped.format(row.num_prompt_tokens),
    time: row.time === null ? null : new Date(1000 * row.time).toLocaleString(),
  };
  const known = Object.entries(fields).filter(([, value]) => value !== null);
  return el("dl", { class: "fields-table" }, known.map(([name, value]) => fact(readableLine(name), el("bdi", {}, readable(String(value))))));
}

// ---- messages ----

/** Messages in order; the results that follow a turn stand beside its calls. */
function exchanges(messages, turnOutputs, toolResults) {
  const elements = [];
  const statuses = [...toolResults];
  let turn = 0;
  for (let i = 0; i < messages.length; ) {
    const message = messages[i++];
    const results = [];
    while (i < messages.length && messages[i].role === "tool") {
      results.push({ ...messages[i++], recorded: statuses.shift() });
    }
    if (message.role === "tool") results.unshift({ ...message, recorded: statuses.shift() });
    const isLast = i === messages.length;
    const unseen = isLast ? statuses.map((recorded) => ({ ...recorded, recorded, isUnseen: true })) : [];
    const isTurn = message.role === "assistant";
    const output = isTurn ? turnOutputs[turn++] : undefined;
    const title = isTurn && turnOutputs.length ? `, turn ${turn}` : "";
    elements.push(messageCard(message, [...results, ...unseen], output, title));
  }
  return el("div", { class: "messages" }, elements);
}

function messageCard(message, results, output, title) {
  const role = message.role ?? "no role";
  return el(
    "article",
    { class: `message role-${/^(user|assistant|system|tool)$/.test(role) ? role : "other"}` },
    el("h4", {}, readable(role), title),
    message.reasoning && folded("Reasoning", textBlock(message.reasoning)),
    message.role !== "tool" && contentOf(message),
    results.length + message.calls.length > 0 && callTable(message.calls, results),
    output && folded("Raw output", textBlock(output)),
  );
}

function contentOf(message) {
  if (!message.content) return message.calls.length ? null : el("p", { class: "muted" }, "(empty)");
  if (message.role === "system") return folded("System prompt", textBlock(message.content));
  return textBlock(message.content);
}

function folded(title, content) {
  return el("details", { class: "fold" }, el("summary", {}, title), content);
}

function textBlock(text, kind = "prose") {
  return el("div", { class: `text ${kind}`, dir: "auto" }, readable(text));
}

// ---- calls and results ----

function callTable(calls, results) {
  return el("div", { class: "calls" }, paired(calls, results).map(([call, result]) => callPair(call, result)));
}

/** Calls with their results, in order; a result whose call could not be read has none. */
function paired(calls, results) {
  const waiting = [...calls];
  const pairs = results.map((result, i) => {
    const numLeft = results.length - i;
    const isNext = waiting.length > 0 && (waiting[0].name === result.name || waiting.length >= numLeft);
    return [isNext ? waiting.shift() : null, result];
  });
  return [...pairs, ...waiting.map((call) => [call, null])];
}

function callPair(call, result) {
  return el(
    "div",
    { class: "pair" },
    el(
      "section",
      { class: "call", "aria-label": "Call" },
      el("h5", {}, call ? [el("span", { class: "muted" }, "call "), el("bdi", {}, readable(call.name ?? "no name"))] : "call that could not be read"),
      call ? textBlock(call.arguments ?? "no arguments", "code") : el("p", { class: "muted" }, "See the text of the turn."),
    ),
    result ? resultSection(result) : el("section", { class: "result", "aria-label": "Result" }, el("h5", {}, "no result"), el("p", { class: "muted" }, "It was not run.")),
  );
}

function resultSection(result) {
  const status = result.recorded?.status;
  const whole = result.recorded?.content; // where the model saw another text
  return el(
    "section",
    { class: `result ${knownStatus(status)}`, "aria-label": "Result" },
    el("h5", {}, el("span", { class: "muted" }, "result "), status && el("span", { class: `badge ${knownStatus(status)}` }, knownStatus(status) ? STATUS[status] : readable(status))),
    result.isUnseen && el("p", { class: "muted" }, "Not shown to the model: no room was left."),
    textBlock(result.content ?? "", "code"),
    whole && !result.isUnseen && folded("Before it was cut to fit", textBlock(whole, "code")),
  );
}
