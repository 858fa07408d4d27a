// One trajectory as tokens, coloured; colour and underline show its level.

// Of a level: class, name, and what belongs to it; the first that fits is taken.
const UNKNOWN_LEVEL = { name: "none", label: "no figure", fits: () => true };
const COLOURINGS = {
  mask: {
    title: "Mask",
    about: "The model sampled what has mask 1, and only that is ever trained.",
    levels: [
      { name: "sampled", label: "sampled, mask 1", fits: (token) => token.isSampled },
      { name: "observed", label: "written by template or tool, mask 0", fits: (token) => token.mask === 0 },
      { name: "none", label: "prompt", fits: () => true },
    ],
  },
  logprob: {
    title: "Logprob",
    about: "How likely the engine found each token that it sampled.",
    levels: [
      ...[["l0", 0.9], ["l1", 0.5], ["l2", 0.2], ["l3", 0.05]].map(([name, least]) => ({
        name, label: `p ≥ ${least}`, fits: (token) => token.isSampled && Math.exp(token.logprob) >= least,
      })),
      { name: "l4", label: "p < 0.05", fits: (token) => token.isSampled },
      { ...UNKNOWN_LEVEL, label: "not sampled" },
    ],
  },
  gap: {
    title: "Gap",
    about: "Learner's logprob less the engine's. Both should agree on tokens of the current policy.",
    levels: [
      ...[["g0", 0.001], ["g1", 0.01], ["g2", 0.1], ["g3", 0.5]].map(([name, most]) => ({
        name, label: `up to ${most}`, fits: (token) => Math.abs(token.gap) <= most,
      })),
      { name: "g4", label: "more than 0.5", fits: (token) => Math.abs(token.gap) > 0.5 },
      { ...UNKNOWN_LEVEL, label: "not sampled, or no learner's logprob" },
    ],
  },
  advantage: {
    title: "Advantage",
    about: "Positive: the update makes the sampled tokens more likely. Negative: less.",
    levels: [
      ...[["a2", "+1 or more", (a) => a >= 1], ["a1", "0 to +1", (a) => a > 0], ["a0", "0: no push", (a) => a === 0],
        ["b1", "−1 to 0", (a) => a > -1], ["b2", "−1 or less", (a) => a <= -1]].map(([name, label, fits]) => ({
        name, label, fits: (token) => token.isSampled && token.advantage !== null && fits(token.advantage),
      })),
      { ...UNKNOWN_LEVEL, label: "not sampled, or no advantage" },
    ],
  },
};
const COLOURING_NAMES = Object.keys(COLOURINGS);
const MIN_CHUNK = 200; // tokens; a chunk outside the view costs no layout
const MAX_CHUNK = 600;

const tokenState = { tokens: [], elements: [], positions: new Map(), entry: null };

function tokensView(row, body, colouring) {
  tokenState.tokens = tokensOf(row, body);
  tokenState.elements = tokenElements(tokenState.tokens);
  tokenState.positions = new Map(tokenState.elements.map((element, position) => [element, position]));
  const panel = el("aside", { id: "token-details", class: "details", "aria-label": "The token", "aria-live": "polite" });
  const area = el(
    "div",
    {
      id: "tokens", class: "tokens", role: "group", dir: "ltr", "aria-label": "Tokens; arrow keys move",
      onpointerover: (event) => showToken(event.target), onfocusin: (event) => showToken(event.target),
      onclick: (event) => tokenState.positions.has(event.target) && focusToken(event.target), onkeydown: tokenKey,
    },
    segmentsOf(row).map(segmentElement),
  );
  const view = el(
    "div", { class: "tokens-view" },
    el("div", { class: "tokens-head" }, colouringButtons(), el("div", { id: "legend" })),
    area,
    panel,
  );
  panel.append(...tokenHint());
  tokenState.entry = tokenState.elements[0] ?? null;
  if (tokenState.entry) tokenState.entry.tabIndex = 0;
  colourTokens(view, colouring);
  return [trajectoryHeader(row), view];
}

// ---- tokens and their segments ----

function tokensOf(row, body) {
  const numPrompt = body.prompt_ids.length;
  const token = (id, position, mask, logprob, learner) => ({
    id, position, mask, logprob, learner, gap: learner - logprob,
    text: body.token_texts[id], isSampled: mask === 1, advantage: row.advantage,
  });
  const prompt = Array.from(body.prompt_ids, (id, i) => token(id, i, null, NaN, NaN));
  const completion = Array.from(body.completion_ids, (id, i) => {
    const mask = body.completion_mask[i];
    const figures = mask === 1 ? [body.logprobs[i], body.learner_logprobs?.[i] ?? NaN] : [NaN, NaN];
    return token(id, numPrompt + i, mask, ...figures);
  });
  return [...prompt, ...completion];
}

/** Runs of one origin: prompt, a sampled turn, what was written after it. */
function segmentsOf(row) {
  const segments = [];
  for (const token of tokenState.tokens) {
    const last = segments.at(-1);
    if (last && last.mask === token.mask) last.end = token.position + 1;
    else segments.push({ mask: token.mask, start: token.position, end: token.position + 1 });
  }
  const sampled = segments.filter((segment) => segment.mask === 1);
  const isKnown = sampled.length === row.policy_versions.length;
  sampled.forEach((segment, turn) => Object.assign(segment, { turn: turn + 1, version: isKnown ? row.policy_versions[turn] : null }));
  return segments;
}

function segmentTitle(segment) {
  const number = counted(segment.end - segment.start, "token");
  if (segment.mask === null) return `Prompt · ${number}`;
  if (segment.mask === 0) return `Written by template and tools · ${number}`;
  const version = segment.version === null ? "" : ` · policy version ${segment.version}`;
  return `Turn ${segment.turn}, sampled · ${number}${version}`;
}

function segmentElement(segment) {
  const elements = [];
  let chunk = [];
  for (let i = segment.start; i < segment.end; i++) {
    chunk.push(tokenState.elements[i]);
    const endsLine = tokenState.tokens[i].text?.endsWith("\n");
    const isFull = (endsLine && chunk.length >= MIN_CHUNK) || chunk.length >= MAX_CHUNK;
    if (!isFull && i + 1 < segment.end) continue;
    chunk.at(-1).textContent = chunk.at(-1).textContent.trimEnd(); // the chunk ends the line itself
    elements.push(el("div", { class: "chunk" }, chunk));
    chunk = [];
  }
  return el("section", { class: `segment ${segment.mask === 1 ? "is-sampled" : ""}` }, el("h3", {}, segmentTitle(segment)), elements);
}

function tokenElements(tokens) {
  const texts = new Map(); // by id: a trajectory has far fewer ids than tokens
  return tokens.map((token) => {
    if (!texts.has(token.id)) texts.set(token.id, tokenText(token));
    const element = document.createElement("span");
    element.textContent = texts.get(token.id);
    return element;
  });
}

/** As it is shown: a line end is marked and also ends the line. */
function tokenText(token) {
  if (token.text === undefined) return `#${token.id}`;
  const shown = visible(token.text);
  return token.text.includes("\n") ? shown.replace(/↵/g, "↵\n") : shown;
}

// ---- colours ----

function colouringButtons() {
  return el(
    "div", { class: "choice", role: "group", "aria-label": "Colour tokens by" },
    COLOURING_NAMES.map((name, i) =>
      el("button", { type: "button", "data-colouring": name, onclick: () => setColouring(name) }, COLOURINGS[name].title, " ", el("kbd", {}, i + 1))),
  );
}

function levelOf(colouring, token) {
  return COLOURINGS[colouring].levels.find((level) => level.fits(token));
}

function colourTokens(view, colouring) {
  const numbers = new Map(COLOURINGS[colouring].levels.map((level) => [level, 0]));
  for (const [i, token] of tokenState.tokens.entries()) {
    const level = levelOf(colouring, token);
    tokenState.elements[i].className = `token level-${level.name}`;
    numbers.set(level, numbers.get(level) + 1);
  }
  for (const button of view.querySelectorAll("[data-colouring]")) {
    button.setAttribute("aria-pressed", String(button.dataset.colouring === colouring));
  }
  view.querySelector("#legend").replaceChildren(...legend(colouring, numbers));
}

function legend(colouring, numbers) {
  return [
    el("p", {}, COLOURINGS[colouring].about),
    el("ul", { class: "legend" }, [...numbers].map(([level, number]) =>
      el("li", {}, el("span", { class: `token level-${level.name}`, "aria-hidden": "true" }, "abc"), ` ${level.label} `, el("b", {}, grouped.format(number))))),
  ];
}

// ---- one token ----

function tokenHint() {
  return [el("h3", {}, "A token"), el("p", { class: "muted" }, "Point at one, or go there with Tab and the arrow keys.")];
}

function showToken(element) {
  if (!tokenState.positions.has(element)) return;
  const token = tokenState.tokens[tokenState.positions.get(element)];
  for (const other of document.querySelectorAll(".token.is-shown")) other.classList.remove("is-shown");
  element.classList.add("is-shown");
  byId("token-details").replaceChildren(
    el("h3", {}, el("bdi", { class: "token-title" }, token.text === undefined ? `#${token.id}` : visible(token.text))),
    el("dl", {}, tokenFacts(token).map(([name, value]) => fact(name, value))),
  );
}

function tokenFacts(token) {
  const facts = [
    ["id", String(token.id)],
    ["text", el("code", {}, token.text === undefined ? "not recorded" : JSON.stringify(token.text).replace(UNSEEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`))],
    ["position", `${grouped.format(token.position + 1)} of ${grouped.format(tokenState.tokens.length)}`],
    ["mask", token.mask === null ? "prompt" : token.mask === 1 ? "1, sampled" : "0, written"],
  ];
  if (!token.isSampled) return facts;
  return [
    ...facts,
    ["logprob", figure(token.logprob)],
    ["probability", figure(Math.exp(token.logprob), 4)],
    ["learner's logprob", figure(token.learner)],
    ["gap", Number.isNaN(token.gap) ? NOT_KNOWN : signed(token.gap, 3)],
    ["ratio", figure(Math.exp(token.gap), 4)],
    ["advantage", token.advantage === null ? NOT_KNOWN : signed(token.advantage)],
  ];
}

function tokenKey(event) {
  const from = tokenState.positions.get(event.target);
  if (from === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  const last = tokenState.tokens.length - 1;
  const targets = {
    ArrowLeft: () => from - 1, ArrowRight: () => from + 1, Home: () => 0, End: () => last,
    ArrowUp: () => lineAway(from, -1), ArrowDown: () => lineAway(from, 1),
  };
  if (!Object.hasOwn(targets, event.key)) return;
  event.preventDefault();
  focusToken(tokenState.elements[Math.min(Math.max(targets[event.key](), 0), last)]);
}

/** Tab comes back to where one was. */
function focusToken(element) {
  tokenState.entry.removeAttribute("tabindex");
  element.tabIndex = 0;
  element.focus();
  tokenState.entry = element;
}

/** The token above or below: the first on the next line that reaches this one's column. */
function lineAway(from, direction) {
  const start = tokenState.elements[from].getBoundingClientRect();
  let found = from;
  let line = null;
  for (let i = from + direction; i >= 0 && i < tokenState.elements.length; i += direction) {
    const box = tokenState.elements[i].getBoundingClientRect();
    if (Math.abs(box.top - start.top) < 2) continue;
    if (line !== null && Math.abs(box.top - line) > 2) break;
    line = box.top;
    found = i;
    if (direction > 0 ? box.right > start.left : box.left <= start.left) break;
  }
  return found;
}
