// The report's data: embedded in the page, or fetched from the server that the page came from.
// A body is decoded when its trajectory is opened; the list needs the index alone.

const isLive = byId("index") === null;
const report = { rows: [], steps: [], notes: [], name: "", num_trajectories: 0, version: null };
const rowsById = new Map();
let bodyCache = new Map(); // newest last
let searchTexts = new Map();
const MAX_BODIES = 40;
const SEARCH_SLICE_MS = 12;

function setIndex(index) {
  Object.assign(report, index);
  rowsById.clear();
  report.rows.forEach((row, position) => rowsById.set(row.id, Object.assign(row, { position })));
  bodyCache = new Map();
  searchTexts = new Map();
}

/** The server's index if it is another than the one shown, else null. */
async function fetchIndex() {
  const response = await fetch(`index?version=${report.version}`);
  if (response.status === 204) return null;
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

async function loadBody(id) {
  if (!bodyCache.has(id)) {
    const cache = bodyCache;
    const body = decode(await rawBody(id));
    if (cache.size >= MAX_BODIES) cache.delete(cache.keys().next().value);
    cache.set(id, body);
    return body;
  }
  return bodyCache.get(id);
}

async function rawBody(id) {
  if (isLive) {
    const response = await fetch(`body?id=${encodeURIComponent(id)}`);
    if (!response.ok) throw new Error(`Trajectory ${id} is not in the record any more.`);
    return response.json();
  }
  const elementId = `body-${rowsById.get(id).position}`;
  if (byId(elementId) === null) await pageLoaded();
  return JSON.parse(byId(elementId).textContent);
}

/** Bodies stand behind the script: a big page may still be loading. */
function pageLoaded() {
  if (document.readyState !== "loading") return Promise.resolve();
  return new Promise((resolve) => addEventListener("DOMContentLoaded", resolve, { once: true }));
}

function decode(raw) {
  return {
    ...raw,
    prompt_ids: new Int32Array(bytes(raw.prompt_ids)),
    completion_ids: new Int32Array(bytes(raw.completion_ids)),
    completion_mask: new Uint8Array(bytes(raw.completion_mask)),
    logprobs: new Float32Array(bytes(raw.logprobs)),
    learner_logprobs: raw.learner_logprobs && new Float32Array(bytes(raw.learner_logprobs)),
  };
}

function bytes(base64) {
  const text = atob(base64);
  const values = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) values[i] = text.charCodeAt(i);
  return values.buffer;
}

// ---- search ----

/** Ids whose messages hold the text. Gives way every few milliseconds; null once `isStale()`. */
async function searchMessages(text, isStale, onProgress) {
  const wanted = text.toLowerCase();
  const found = new Set();
  let sliceStart = performance.now();
  for (const [position, row] of report.rows.entries()) {
    if (!searchTexts.has(row.id)) searchTexts.set(row.id, searchText(await rawBody(row.id)));
    if (searchTexts.get(row.id).includes(wanted)) found.add(row.id);
    if (performance.now() - sliceStart > SEARCH_SLICE_MS) {
      onProgress(position);
      await new Promise((resolve) => setTimeout(resolve));
      sliceStart = performance.now();
    }
    if (isStale()) return null;
  }
  return found;
}

function searchText(raw) {
  const parts = [...raw.prompt, ...raw.completion].flatMap((message) => [
    message.content,
    message.reasoning,
    message.name,
    ...message.calls.flatMap((call) => [call.name, call.arguments]),
  ]);
  return parts.filter((part) => part !== null).join("\n").toLowerCase();
}

// ---- what belongs together ----

const GROUP_KEY = ["session", "mode", "step", "rollout", "group"]; // may stand on several ranks
const BATCH_KEY = ["session", "mode", "step", "rollout", "rank"]; // has one clock
const isSame = (key, a, b) => key.every((name) => a[name] === b[name]);

function batchOf(row) {
  return report.rows.filter((other) => isSame(BATCH_KEY, row, other));
}

function groupOf(row) {
  return report.rows
    .filter((other) => isSame(GROUP_KEY, row, other))
    .sort((a, b) => a.generation - b.generation);
}

function batchName(row) {
  const parts = [`Step ${row.step}`, row.mode];
  if (row.rollout > 0) parts.push(`rollout ${row.rollout}`);
  if (row.session > 1) parts.push(`session ${row.session}`);
  return readableLine(parts.join(", "));
}

/** Where a trajectory stands in its batch: "group 3, sample 2". */
function placeName(row) {
  const rank = row.rank > 0 ? `rank ${row.rank}, ` : "";
  return `${rank}group ${row.group}, sample ${row.generation}`;
}
