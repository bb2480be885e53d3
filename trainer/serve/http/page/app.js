// The page at /: a chat with the served model beside a live view of its KV cache, from the public endpoints only.
//
// Whatever the server or the model says reaches the document as textContent, never as markup. Nothing is loaded from
// elsewhere, and the page works below a path prefix: all addresses are relative.

const POLL_MS = 250;
const RETRY_MS = 2000; // after a failed poll: a server that restarts need not be hammered
const HISTORY_MS = 60_000;
const GAP_MS = 3000; // samples further apart are not joined: the tab was hidden or the server away
const KEY_ITEM = "lowbit-api-key";
const KEPT = "It is kept for this tab only and forgotten when the tab closes.";

// What a block of GET /state is, besides the position of its sequence in `running`.
const FREE = -1, CACHED = -2, SHARED = -3;

const byId = (id) => document.getElementById(id);
const count = (number) => Math.round(number).toLocaleString("en");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);
const seconds = (s) => (s == null ? "–" : s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(2)} s`);
const rate = (perSecond) => (perSecond < 0.05 ? "0" : perSecond < 10 ? perSecond.toFixed(1) : count(perSecond));

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Write only what changed, so that a selection in the page survives the next poll. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// ---- the API: the key, and errors as the server words them

class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** fetch with the key; a status that is not 2xx becomes an ApiError with the server's own message. */
async function api(path, { json, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY_ITEM);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (json) headers["Content-Type"] = "application/json";
  let response;
  try {
    const body = json && JSON.stringify(json);
    response = await fetch(path, { method: json ? "POST" : "GET", headers, signal, body });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status} ${response.statusText}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch { /* a proxy's error page: the status says enough */ }
  throw new ApiError(message, response.status, response.headers.get("Retry-After"));
}

/** The JSON objects of a stream of server-sent events, up to [DONE]; an error event is thrown. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The connection closed before the answer was complete.");
    const lines = (buffer + value).split(/\r?\n/);
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield event;
    }
  }
}

function askForKey(reason) {
  byId("key-reason").textContent = reason;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", () => askForKey(`Sent with every request. ${KEPT}`));
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (key) sessionStorage.setItem(KEY_ITEM, key);
  else sessionStorage.removeItem(KEY_ITEM);
  byId("key").value = "";
  byId("key-dialog").close();
  knownModels = null;
  pollSoon(0);
});

// ---- models

let knownModels = null; // what GET /state told when the list was last read: it changes when adapters come and go
let hasTemplate = true;

async function loadModels(told) {
  const [models, tokenizer] = await Promise.all(
    ["v1/models", "tokenizer_info"].map(async (path) => (await api(path)).json()),
  );
  const select = byId("model"), chosen = select.value;
  select.replaceChildren(...models.data.map((model) => {
    const option = element("option", "", model.parent ? `${model.id} (adapter on ${model.parent})` : model.id);
    option.value = model.id;
    return option;
  }));
  if (models.data.some((model) => model.id === chosen)) select.value = chosen;
  select.disabled = false;
  hasTemplate = Boolean(tokenizer.chat_template);
  byId("no-template").hidden = hasTemplate;
  knownModels = told;
}

// ---- chat

const turns = []; // {user, answer}: what is sent as the conversation so far
let running = null; // the AbortController of the answer that is being written

function addTurn(kind, who) {
  byId("empty").hidden = true;
  const turn = element("article", `turn ${kind}`);
  turn.append(element("span", who ? "who" : "unseen", who || "You:"));
  const text = turn.appendChild(element("div", "text"));
  const figures = element("p", "figures-line");
  if (who) turn.append(figures);
  byId("log").append(turn);
  return { turn, text, figures };
}

/** Follow the answer as it grows, unless the reader has scrolled up. */
function keepAtEnd(change) {
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function requestBody(message) {
  const body = { stream: true, stream_options: { include_usage: true } };
  if (!byId("model").disabled) body.model = byId("model").value;
  const temperature = byId("temperature").value, maxTokens = byId("max-tokens").value;
  if (temperature !== "") body.temperature = Number(temperature);
  if (maxTokens !== "") body.max_tokens = Number(maxTokens);
  if (!hasTemplate) return { ...body, prompt: message };
  const said = (role, content) => ({ role, content });
  const before = turns.flatMap((turn) => [said("user", turn.user), said("assistant", turn.answer)]);
  return { ...body, messages: [...before, said("user", message)] };
}

/** "First token 31 ms · 42 tokens/s · ...": what is known so far; the server's own counts come at the end. */
function figuresLine({ sent, first, last, usage, reason }) {
  if (first === null) return "Waiting for the first token …";
  const parts = [`First token ${seconds((first - sent) / 1000)}`];
  if (usage) {
    const answered = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    if (answered > 1 && last > first) parts.push(`${rate((answered - 1) / ((last - first) / 1000))} tokens/s`);
    parts.push(plural(answered, "token"), `${count(cached)} of ${plural(usage.prompt_tokens, "prompt token")} cached`);
  }
  if (reason === "length") parts.push("cut at the token limit");
  if (reason === "stopped") parts.push("stopped by you");
  return parts.join(" · ");
}

async function answer(message, view, signal) {
  const told = { sent: performance.now(), first: null, last: null, usage: null, reason: null };
  const show = () => setText(view.figures, figuresLine(told));
  show();
  try {
    const body = requestBody(message);
    const response = await api(hasTemplate ? "v1/chat/completions" : "v1/completions", { json: body, signal });
    for await (const event of events(response)) {
      told.usage = event.usage ?? told.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      told.last = performance.now();
      told.first ??= told.last;
      told.reason = choice.finish_reason ?? told.reason;
      keepAtEnd(() => {
        view.text.append(choice.delta?.content ?? choice.text ?? "");
        show();
      });
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    told.reason = "stopped";
    told.first ??= performance.now();
  }
  show();
  if (told.reason === "stopped" && !view.text.textContent) setText(view.figures, "Stopped before the first token.");
}

function showError(error, message, views) {
  const box = element("div", "error");
  box.setAttribute("role", "alert");
  const what = { 429: "The server is full. ", 401: "The API key is missing or wrong. " }[error.status] ?? "";
  const when = error.retryAfter ? ` It says to try again in ${plural(Number(error.retryAfter), "second")}.` : "";
  box.append(element("span", "", error.status === 401 ? what : `${what}${error.message}${when}`));
  const again = box.appendChild(element("button", "quiet", "Try again"));
  again.type = "button";
  again.addEventListener("click", () => {
    if (running) return;
    for (const { turn } of views) turn.remove();
    send(message);
  });
  views[1].figures.hidden = true;
  keepAtEnd(() => views[1].turn.append(box));
  if (error.status === 401) askForKey(`The server did not accept the key, or none was given. ${KEPT}`);
}

async function send(message) {
  running = new AbortController();
  const model = byId("model").value;
  const views = [addTurn("user"), addTurn("model", model)];
  views[0].text.textContent = message;
  views[1].turn.setAttribute("aria-busy", "true"); // read aloud once, when it is complete
  byId("log").scrollTop = byId("log").scrollHeight;
  byId("send").hidden = !(byId("stop").hidden = false);
  const { signal } = running;
  try {
    await answer(message, views[1], signal);
    const text = views[1].text.textContent;
    if (text && views[1].turn.isConnected) turns.push({ user: message, answer: text });
  } catch (error) {
    const known = error instanceof ApiError ? error : new ApiError(`The answer could not be read: ${error.message}`);
    showError(known, message, views);
  } finally {
    views[1].turn.removeAttribute("aria-busy");
    const focused = document.activeElement === byId("stop");
    byId("stop").hidden = !(byId("send").hidden = false);
    if (focused) byId("message").focus();
    running = null;
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const message = byId("message").value.trim();
  if (!message || running) return;
  byId("message").value = "";
  send(message);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  turns.length = 0;
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  byId("message").focus();
});

// ---- colours: each running sequence has one, by its request's id, for as long as it lives

const NUM_HUES = 12;
const slots = new Map(); // sequence -> slot

function sequenceKey(sequence) {
  return `${sequence.request_id}:${sequence.index}`;
}

/** Enough of the request's id to tell it from others, and which of its answers this is. */
function shortName(sequence) {
  const id = sequence.request_id.replace(/^(chatcmpl|cmpl)-/, "");
  return (id.length > 10 ? `${id.slice(0, 8)}…` : id) + (sequence.index ? ` #${sequence.index + 1}` : "");
}

function hash(text) {
  let value = 2166136261; // FNV-1a
  for (const char of text) value = Math.imul(value ^ char.codePointAt(0), 16777619) >>> 0;
  return value;
}

/** Keep the slots of those that still run; newcomers get the slot of their hash, or the next one that is free. */
function assignColours(sequences) {
  const keys = sequences.map(sequenceKey), alive = new Set(keys);
  for (const key of slots.keys()) if (!alive.has(key)) slots.delete(key);
  const taken = new Set(slots.values());
  for (const key of keys) {
    if (slots.has(key)) continue;
    let slot = hash(key) % (2 * NUM_HUES);
    for (let tries = 0; taken.has(slot) && tries < 2 * NUM_HUES; tries += 1) slot = (slot + 7) % (2 * NUM_HUES);
    slots.set(key, slot);
    taken.add(slot);
  }
}

function colourOf(key) {
  const slot = slots.get(key);
  if (slot === undefined) return "var(--block-free)";
  return `oklch(var(--tone-${slot < NUM_HUES ? 1 : 2}) 0.13 ${(360 / NUM_HUES) * (slot % NUM_HUES) + 15})`;
}

// ---- the grid of KV blocks

const grid = byId("grid");
const MAX_GRID_PX = 300, MAX_CELL_PX = 28, MIN_CELL_PX = 3;
let state = null;
let cells = { size: MAX_CELL_PX, columns: 1 };
let pointed = null; // index of the block under the pointer or the keyboard's cursor
let marked = null; // sequence whose row is pointed at
let drawn = ""; // blocks and owners of the last poll: an idle server's grid is not drawn four times a second

/** The largest cells with which all blocks fit, in whole pixels so that the lines between them are even. */
function layOut(numBlocks) {
  const width = grid.clientWidth;
  let size = MAX_CELL_PX, columns;
  for (; ; size -= 1) {
    columns = Math.max(1, Math.floor(width / size));
    if (size <= MIN_CELL_PX || Math.ceil(numBlocks / columns) * size <= MAX_GRID_PX) break;
  }
  cells = { size, columns };
  const scale = window.devicePixelRatio || 1, height = Math.ceil(numBlocks / columns) * size;
  const pixels = [Math.round(width * scale), Math.round(height * scale)];
  if (grid.width === pixels[0] && grid.height === pixels[1]) return;
  [grid.width, grid.height] = pixels;
  grid.style.height = `${height}px`;
}

function ownerKey(owner) {
  return owner >= 0 && state.running[owner] ? sequenceKey(state.running[owner]) : null;
}

/** A canvas takes no var(): colours are resolved against the stylesheet once a drawing. */
function resolver() {
  const style = getComputedStyle(document.documentElement);
  const resolved = new Map();
  const value = (_, name) => style.getPropertyValue(name).trim();
  return (colour) => {
    if (!resolved.has(colour)) resolved.set(colour, colour.replace(/var\((--[\w-]+)\)/, value));
    return resolved.get(colour);
  };
}

function draw() {
  if (!state) return;
  layOut(state.blocks.length);
  const context = grid.getContext("2d"), scale = window.devicePixelRatio || 1, resolve = resolver();
  const { size, columns } = cells, gap = size > 12 ? 2 : 1, side = size - gap, round = size > 7 ? side / 5 : 0;
  const fixed = { [FREE]: "var(--block-free)", [CACHED]: "var(--block-cached)", [SHARED]: "var(--block-shared)" };
  const shown = marked ?? (pointed === null ? null : ownerKey(state.blocks[pointed]));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, grid.width, grid.height);
  state.blocks.forEach((owner, index) => {
    const key = ownerKey(owner);
    context.fillStyle = resolve(fixed[owner] ?? colourOf(key));
    context.globalAlpha = shown && key !== shown ? 0.3 : 1;
    const x = (index % columns) * size, y = Math.floor(index / columns) * size;
    if (!round) return context.fillRect(x, y, side, side);
    context.beginPath();
    context.roundRect(x, y, side, side, round);
    context.fill();
  });
  if (pointed === null) return;
  context.globalAlpha = 1;
  context.strokeStyle = resolve("var(--ink)");
  context.lineWidth = 1.5;
  context.strokeRect((pointed % columns) * size - gap / 2, Math.floor(pointed / columns) * size - gap / 2, size, size);
}

function describeBlock(index) {
  const owner = state.blocks[index], sequence = state.running[owner];
  const what = {
    [FREE]: "free",
    [CACHED]: "free, but findable: the prefix of an earlier request",
    [SHARED]: "a prefix that several sequences share",
  }[owner];
  const whose = (of) => `held by ${shortName(of)}, ${of.adapter ?? "base"}, ${plural(of.num_blocks, "block")}`;
  return `Block ${count(index)}: ${what ?? (sequence ? whose(sequence) : "in use")}`;
}

function point(index) {
  pointed = index !== null && index >= 0 && index < (state?.blocks.length ?? 0) ? index : null;
  showReadout();
  draw();
}

function showReadout() {
  const text = pointed === null ? "Pick a block to see who holds it." : describeBlock(pointed);
  setText(byId("readout"), text);
}

function blockAt(event) {
  const box = grid.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / cells.size);
  const row = Math.floor((event.clientY - box.top) / cells.size);
  return column >= 0 && column < cells.columns ? row * cells.columns + column : null;
}

grid.addEventListener("pointermove", (event) => point(blockAt(event)));
grid.addEventListener("pointerdown", (event) => point(blockAt(event)));
grid.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(null));
grid.addEventListener("blur", () => point(null));
grid.addEventListener("keydown", (event) => {
  if (!state) return;
  const last = state.blocks.length - 1, from = pointed ?? 0;
  const to = {
    ArrowLeft: from - 1, ArrowRight: pointed === null ? 0 : from + 1, Home: 0, End: last,
    ArrowUp: from - cells.columns, ArrowDown: pointed === null ? 0 : from + cells.columns,
  }[event.key];
  if (event.key === "Escape") point(null);
  if (to === undefined) return;
  event.preventDefault();
  point(Math.min(Math.max(to, 0), last));
});
new ResizeObserver(draw).observe(grid);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

function showBlocks() {
  const counts = { [FREE]: 0, [CACHED]: 0, [SHARED]: 0, owned: 0 };
  for (const owner of state.blocks) counts[owner >= 0 ? "owned" : owner] += 1;
  setText(byId("count-free"), count(counts[FREE]));
  setText(byId("count-cached"), count(counts[CACHED]));
  setText(byId("count-shared"), count(counts[SHARED]));
  setText(byId("count-owned"), count(counts.owned));
  const rest = state.num_blocks - state.blocks.length;
  setText(byId("cache-size"), `${plural(state.num_blocks, "KV block")} of ${plural(state.block_size, "token")}`);
  setText(byId("blocks-title"), rest > 0 ? `KV blocks, the first ${count(state.blocks.length)}` : "KV blocks");
  grid.setAttribute("aria-label", `${byId("blocks-title").textContent}: ${count(counts[FREE])} free, `
    + `${count(counts[CACHED])} cached, ${count(counts[SHARED])} shared, ${count(counts.owned)} of one request`);
  if (pointed !== null && pointed >= state.blocks.length) pointed = null;
  showReadout();
  const picture = [...state.blocks, ...state.running.map(sequenceKey)].join();
  if (picture !== drawn) draw();
  drawn = picture;
}

// ---- requests, a row each

const rows = new Map(); // sequence -> its row

function makeRow(key) {
  const row = element("tr"), name = row.insertCell(), model = row.insertCell(), tokens = row.insertCell();
  const parts = {
    row, model,
    swatch: name.appendChild(element("i", "swatch")),
    id: name.appendChild(element("span")),
    bar: tokens.appendChild(element("div", "bar")),
    told: tokens.appendChild(element("small")),
    blocks: row.insertCell(),
  };
  const about = name.appendChild(element("small"));
  parts.status = about.appendChild(element("span"));
  parts.adapter = about.appendChild(element("span", "narrow")); // where there is no room for a column of models
  for (const part of ["prompt", "output", "border"]) parts[part] = parts.bar.appendChild(element("i", part));
  row.addEventListener("pointerenter", () => mark(key));
  row.addEventListener("pointerleave", () => mark(null));
  return parts;
}

function mark(key) {
  marked = key;
  for (const [other, { row }] of rows) row.toggleAttribute("data-marked", other === key);
  draw();
}

/** A request's bar: the prompt up to the border, the answer behind it; filled as far as it is computed. */
function fillRow(parts, sequence) {
  const { num_prompt_tokens: prompt, num_output_tokens: output, max_tokens: limit } = sequence;
  const whole = Math.max(prompt + (limit ?? output), 1), read = Math.min(sequence.num_computed_tokens, prompt);
  const colour = colourOf(sequenceKey(sequence));
  setText(parts.id, shortName(sequence));
  parts.row.title = sequence.request_id;
  const status = sequence.status === "swapped" ? "swapped out" : sequence.status;
  setText(parts.status, status + (sequence.priority ? `, priority ${sequence.priority}` : ""));
  setText(parts.model, sequence.adapter ?? "base");
  setText(parts.adapter, `, ${sequence.adapter ?? "base"}`);
  setText(parts.blocks, count(sequence.num_blocks));
  const input = read < prompt ? `${count(read)} of ${count(prompt)}` : count(prompt);
  setText(parts.told, `${input} in, ${count(output)}${limit == null ? "" : ` of ${count(limit)}`} out`);
  parts.swatch.style.background = parts.output.style.background = colour;
  parts.prompt.style.width = `${(100 * read) / whole}%`;
  parts.output.style.left = parts.border.style.left = `${(100 * prompt) / whole}%`;
  parts.output.style.width = `${(100 * output) / whole}%`;
}

function showRequests() {
  const sequences = [...state.running, ...state.waiting], alive = new Set(sequences.map(sequenceKey));
  for (const [key, { row }] of rows) {
    if (alive.has(key)) continue;
    row.remove();
    rows.delete(key);
    if (marked === key) marked = null;
  }
  sequences.forEach((sequence, position) => {
    const key = sequenceKey(sequence);
    if (!rows.has(key)) rows.set(key, makeRow(key));
    const parts = rows.get(key), place = byId("requests").children[position];
    fillRow(parts, sequence);
    if (place !== parts.row) byId("requests").insertBefore(parts.row, place ?? null);
  });
  const hidden = state.num_waiting - state.waiting.length;
  setText(byId("queue"), `${count(state.running.length)} running, ${count(state.num_waiting)} waiting`
    + (hidden > 0 ? ` (${count(hidden)} not listed)` : ""));
  byId("idle").hidden = sequences.length > 0;
}

// ---- figures and the last minute

const samples = []; // {at, prompt, generated}

function showFigures() {
  setText(byId("ttft"), seconds(state.ttft_s));
  setText(byId("prefix"), percent(state.prefix_hit_rate));
  setText(byId("preemptions"), count(state.preemptions));
  setText(byId("drafts"), percent(state.draft_acceptance_rate));
  setText(byId("in-use"), percent(state.num_blocks ? 1 - state.num_free_blocks / state.num_blocks : null));
  const at = performance.now();
  samples.push({ at, prompt: state.prompt_tokens_per_s, generated: state.generated_tokens_per_s });
  while (samples[0].at < at - HISTORY_MS) samples.shift();
  for (const name of ["generated", "prompt"]) showRate(name, at);
}

function showRate(name, now) {
  const peak = Math.max(...samples.map((sample) => sample[name]));
  const x = (at) => (240 * (1 - (now - at) / HISTORY_MS)).toFixed(1);
  const y = (value) => (38.5 - (36 * value) / Math.max(peak, 1)).toFixed(1);
  let line = "", area = "", last = null;
  for (const sample of samples) {
    const joined = last && sample.at - last.at < GAP_MS;
    const here = `${x(sample.at)} ${y(sample[name])}`;
    line += joined ? `L${here}` : `M${here}`;
    area += joined ? `L${here}` : `${last ? `L${x(last.at)} 40Z` : ""}M${x(sample.at)} 40L${here}`;
    last = sample;
  }
  setText(byId(name), rate(last[name]));
  setText(byId(`${name}-peak`), `peak ${rate(peak)}`);
  byId(`${name}-line`).setAttribute("d", line);
  byId(`${name}-area`).setAttribute("d", `${area}L${x(last.at)} 40Z`);
}

// ---- polling: four times a second while somebody can see it

let timer = null;
let polling = false;

function pollSoon(delay) {
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(poll, delay);
}

function connection(kind, text) {
  byId("connection").dataset.state = kind;
  setText(byId("connection"), text);
}

async function poll() {
  if (polling) return;
  polling = true;
  try {
    state = await (await api("state")).json();
    const told = JSON.stringify([state.model, state.adapters]);
    if (told !== knownModels) await loadModels(told);
    byId("live").dataset.ready = "";
    assignColours(state.running);
    showFigures();
    showRequests();
    showBlocks();
    const adapters = state.adapters.length ? plural(state.adapters.length, "adapter") : "no adapters";
    connection("ok", `${state.model}, ${adapters}`);
    pollSoon(POLL_MS);
  } catch (error) {
    if (error.status === 401) {
      connection("bad", "An API key is needed");
      const tried = sessionStorage.getItem(KEY_ITEM);
      askForKey(`${tried ? "The server did not accept this key." : "This server asks for a key."} ${KEPT}`);
    } else {
      if (!(error instanceof ApiError)) console.error(error);
      connection("bad", `${error.message} Trying again …`);
      pollSoon(RETRY_MS);
    }
  } finally {
    polling = false;
  }
}

document.addEventListener("visibilitychange", () => pollSoon(0));
pollSoon(0);
