// Elements and text. Everything of a record goes in as text, and no character of it stays unseen.

const byId = (id) => document.getElementById(id);

/** An element; attributes named on… are listeners, children are elements or strings. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter((child) => child != null && child !== false));
  return element;
}

// ---- text ----

const UNSEEN_NAMES = {
  0x00ad: "SHY", 0x061c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM",
  0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF",
  0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI",
  0x2069: "PDI", 0xfeff: "BOM", 0x1b: "ESC", 0x0d: "CR", 0x00: "NUL",
};
// Controls, formats (bidi marks, joiners), lone surrogates, separators, fillers that look like nothing.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0]/gu;
// In running text joiners and line ends do what they are there for.
const UNSEEN_IN_TEXT = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0]/gu;

function unseenName(character) {
  const code = character.codePointAt(0);
  return UNSEEN_NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A token's text on one line: spaces as ·, line ends as ↵, unseen characters by name. */
function visible(text) {
  if (text === "") return "‹empty›";
  return text
    .replace(/ /g, "·")
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(UNSEEN, (character) => `‹${unseenName(character)}›`);
}

/** Running text as nodes; unseen characters by name in a frame. */
function readable(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(UNSEEN_IN_TEXT)) {
    nodes.push(text.slice(end, match.index), el("span", { class: "unseen-char" }, unseenName(match[0])));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

/** The same as one string, for attributes and one-line places. */
function readableLine(text) {
  return text.replace(UNSEEN_IN_TEXT, (character) => `‹${unseenName(character)}›`).replace(/\s+/g, " ");
}

// ---- figures ----

const NOT_KNOWN = "–";
const grouped = new Intl.NumberFormat("en");

/** Six significant digits at most; a true minus sign. */
function figure(value, digits = 6) {
  if (value == null || Number.isNaN(value)) return NOT_KNOWN;
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function signed(value, digits = 3) {
  return (value > 0 ? "+" : "") + figure(value, digits);
}

const seconds = (value) => `${value.toFixed(value < 10 ? 2 : 1)} s`;

function counted(number, noun, plural = `${noun}s`) {
  return `${grouped.format(number)} ${number === 1 ? noun : plural}`;
}

/** snake_case from a record, as words. */
const words = (name) => readableLine(name).replaceAll("_", " ");

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function emptyState(title, text) {
  return el("div", { class: "empty" }, el("h2", {}, title), el("p", {}, text));
}
