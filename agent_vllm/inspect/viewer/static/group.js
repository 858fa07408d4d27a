// The samples of one prompt side by side: the spread that the advantages come from.

async function groupView(row, onOpen) {
  const rows = groupOf(row);
  const title = el("h2", {}, `${batchName(row)} · group ${row.group}`);
  const bodies = await Promise.all(rows.map((other) => loadBody(other.id)));
  return [
    title,
    el("p", { class: "lead" }, groupText(rows)),
    textBlock(lastContent(bodies[0].prompt, "user", "prompt"), "prose question"),
    el("ol", { class: "samples" }, rows.map((other, i) =>
      sampleCard(other, lastContent(bodies[i].completion, "assistant"), other.id === row.id, onOpen))),
  ];
}

function lastContent(messages, ...roles) {
  return messages.findLast((message) => roles.includes(message.role))?.content ?? "";
}

function groupText(rows) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const number = counted(rows.length, "sample");
  if (rewards.length === 0) return `${number}, no rewards.`;
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  if (least === most) return `${number}, all with reward ${figure(least, 4)}: nothing to tell them apart by, so no push.`;
  return `${number}, reward ${figure(least, 4)} to ${figure(most, 4)}, ${figure(mean(rewards), 4)} on average.`;
}

function sampleCard(row, answer, isSelected, onOpen) {
  return el(
    "li",
    { class: "sample", "aria-current": isSelected && "true" },
    el("h3", {}, el("button", { type: "button", onclick: () => onOpen(row.id) }, `Sample ${row.generation}`), isSelected && el("span", { class: "muted" }, " selected")),
    el("dl", { class: "facts" }, fact("Reward", figure(row.reward, 4)), fact("Advantage", row.advantage === null ? NOT_KNOWN : signed(row.advantage))),
    advantageBar(row.advantage),
    el("div", { class: "answer" }, textBlock(answer || "(no answer)")),
    el("p", { class: "row-facts" }, stopBadge(row.stop_reason), el("span", {}, rowFacts(row))),
  );
}

/** From the middle to the right for a push up, to the left for a push down; full at 2. */
function advantageBar(advantage) {
  const share = Math.min(Math.abs(advantage ?? 0) / 2, 1) / 2;
  const bar = placed(el("span", { class: advantage < 0 ? "down" : "up" }), advantage < 0 ? 0.5 - share : 0.5, share);
  return el("div", { class: "advantage-bar", "aria-hidden": "true" }, bar);
}
