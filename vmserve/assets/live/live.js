// The live page: asks for /v1/kv/live twice a second and shows it. Nothing is loaded from elsewhere.

import { chatWith, seeRequests, startChat } from "./chat.js";
import { at, bytes, count, percent, seconds, show } from "./text.js";

const EVERY_MS = 500;
const LONGEST_WAIT_MS = 15000;
const HISTORY = 240;
const LEAST_SPAN = 60; // samples that a line has room for at least
const RATE_SECONDS = 3;
const SHARED = 16;
const MAPPED = 32;
const USES = {
  virtual: "in slots of live requests",
  paged: "in block tables of live requests",
  both: "of live requests in both views",
  cached: "of ended requests, kept for prompts that begin alike; given up when room is needed",
  parked: "left mapped in a slot without a request, for the next one; given up when room is needed",
  spare: "mapped ahead of a live request's growth",
  waiting: "given up, but a running step may still read it",
  held: "being mapped or unmapped at this moment",
  free: "memory that nobody uses",
  absent: "no memory behind it yet: taken when needed",
};
const RARE = ["both", "waiting", "held", "shared"];
const SHARED_USE = "referenced more than once; marked with a dot";
const WORDS = {
  slot: "a range of addresses as long as the context, in which a request's pages lie in order",
  "virtual, paged": "the two views of the pool: attention reads a request through its slot, or through a block table",
  "map calls": "system calls that put pages into slots: made ahead while steps compute, or waited for by a step",
  kind: "layers that keep the same positions of a request, all or those of a sliding window; each has pages of its own",
  preempted: "a request gave its pages up for others, and is computed again or swapped back",
};

const stored = {
  get key() { return sessionStorage.getItem("vmserve-key"); },
  set key(value) {
    if (value === null) sessionStorage.removeItem("vmserve-key");
    else sessionStorage.setItem("vmserve-key", value);
  },
};

const state = {
  data: null, history: [], failures: 0, timer: 0, asking: false, paused: false,
  cursor: -1, only: null, grid: null, model: null,
};

// -- asking ----------------------------------------------------------------------------------

async function ask() {
  if (state.asking) return;
  state.asking = true;
  try {
    const headers = stored.key ? { authorization: `Bearer ${stored.key}` } : {};
    const stop = AbortSignal.timeout(LONGEST_WAIT_MS);
    const query = state.model === null ? "" : `?model=${encodeURIComponent(state.model)}`;
    const response = await fetch(`v1/kv/live${query}`, { headers, cache: "no-store", signal: stop });
    if (response.status === 401) return askForKey(stored.key ? "This key is not accepted." : "");
    const body = await response.json();
    if (!response.ok) throw new Error(body.error ? body.error.message : `HTTP ${response.status}`);
    state.failures = 0;
    take(body);
  } catch (error) {
    state.failures += 1;
    say("away", `${error.name === "TypeError" ? "no answer from the server" : error.message}`);
  } finally {
    state.asking = false;
    schedule();
  }
}

function schedule() {
  clearTimeout(state.timer);
  if (state.paused || document.hidden || !at("key-form").hidden) return;
  const wait = Math.min(LONGEST_WAIT_MS, EVERY_MS * 2 ** Math.min(state.failures, 6));
  state.timer = setTimeout(ask, wait);
}

function say(kind, text) {
  at("state").className = kind;
  if (at("state").textContent !== text) show("state", text);
}

function askForKey(told) {
  stored.key = null;
  at("key-form").hidden = false;
  document.querySelector("main").hidden = true;
  show("key-told", told);
  say("", "waiting for a key");
  at("key").focus();
}

// -- showing ---------------------------------------------------------------------------------

function take(data) {
  state.data = data;
  const { stats } = data;
  state.history.push({
    at: performance.now() / 1000,
    tokens: stats.generation_tokens_total || 0,
    running: stats.num_requests_running || 0,
    usage: stats.kv_cache_usage_perc || 0,
  });
  if (state.history.length > HISTORY) state.history.shift();
  document.querySelector("main").hidden = false;
  say("live", data.draining ? "shutting down" : "live");
  show("model", `${data.model} · ${data.version} · up ${seconds(data.uptime_seconds)}`);
  showModels(data);
  showEngines(data.engines ?? []);
  showTiles(data);
  showCounters(data);
  drawMap();
  showLegend(data.pool);
  showKinds(data.kinds ?? []);
  showSlots(data.pool.slots);
  showRequests(data);
  seeRequests(data.requests);
  showFigures(stats);
}

function rates() {
  const { history } = state;
  return history.map((now, i) => {
    let first = i;
    while (first > 0 && now.at - history[first].at < RATE_SECONDS) first -= 1;
    const span = now.at - history[first].at;
    return span > 0 ? Math.max(0, now.tokens - history[first].tokens) / span : 0;
  });
}

/** A row for each of several models; a click on a name shows that one. */
function showModels({ models = [], kv_pool: pool, model }) {
  at("models-box").hidden = !models.length;
  if (pool) show("models-note", `${bytes(pool.free_bytes)} of ${bytes(pool.size_bytes)} lent to none`);
  const body = at("models").tBodies[0];
  resize(body, models.length, () => {
    const row = document.createElement("tr");
    for (let i = 0; i < 7; i += 1) row.append(document.createElement("td"));
    const button = document.createElement("button");
    button.type = "button";
    button.addEventListener("click", () => choose(button.textContent));
    row.firstChild.append(button);
    return row;
  });
  models.forEach((each, i) => {
    const memory = each.memory;
    const [name, ...cells] = body.children[i].children;
    name.firstChild.textContent = each.name;
    name.firstChild.setAttribute("aria-pressed", String(each.name === model));
    const texts = [
      each.state, `${count(each.num_active)} of ${count(each.num_requests)}`, count(each.num_waiting),
      memory ? `${bytes(memory.used_bytes)}, ${bytes(memory.granted_bytes)}` : "–",
      memory ? `${bytes(memory.floor_bytes)}, ${bytes(memory.cap_bytes)}` : "–", each.weight ?? "–",
    ];
    texts.forEach((text, j) => { cells[j].textContent = text; });
    cells[0].title = each.failure;
  });
}

/** A row for each of a model's engines, with the ranks of groups. */
function showEngines(engines) {
  at("engines-box").hidden = !engines.length;
  const head = at("ranks-head");
  head.hidden = engines.every((each) => each.num_ranks === 1);
  const body = at("engines").tBodies[0];
  resize(body, engines.length, () => {
    const row = document.createElement("tr");
    for (let i = 0; i < 8; i += 1) row.append(document.createElement("td"));
    return row;
  });
  engines.forEach((each, i) => {
    const asked = each.prefix_cache_queries_total;
    const texts = [
      each.id, each.state, `${each.num_live_ranks} of ${each.num_ranks}`,
      count(each.num_requests_running), count(each.num_requests_waiting),
      percent(each.kv_cache_usage_perc), asked ? percent(each.prefix_cache_hits_total / asked) : "–",
      count(each.engine_restarts_total),
    ];
    const cells = body.children[i].children;
    texts.forEach((text, j) => { cells[j].textContent = text; });
    cells[2].hidden = head.hidden;
  });
}

function choose(name) {
  state.model = name;
  state.history = [];
  chatWith(name);
  ask();
}

function showTiles({ stats, latency }) {
  const speed = rates();
  show("rate", count(speed[speed.length - 1]));
  show("running", count(stats.num_requests_running || 0));
  show("waiting", count(stats.num_requests_waiting || 0));
  const share = stats.kv_cache_usage_perc || 0;
  const limit = (stats.limit_pages || 0) * (stats.page_bytes || 0);
  show("usage", percent(share));
  show("usage-bytes", limit ? `${bytes(share * limit)} of ${bytes(limit)}` : "");
  show("ttft", seconds(latency.ttft_p50));
  show("ttft-p95", seconds(latency.ttft_p95));
  show("ttft-p99", seconds(latency.ttft_p99));
  show("itl", seconds(latency.itl_p50));
  show("itl-p95", seconds(latency.itl_p95));
  show("itl-p99", seconds(latency.itl_p99));
  const asked = stats.prefix_cache_queries_total || 0;
  const hits = stats.prefix_cache_hits_total || 0;
  show("hits", asked ? percent(hits / asked) : "–");
  show("hit-tokens", `${count(hits)} of ${count(asked)}`);
  showDrafts(stats);
  showPersistence(stats);
  drawLine("rate-line", speed);
  drawLine("running-line", state.history.map((sample) => sample.running));
  drawLine("usage-line", state.history.map((sample) => sample.usage), 1);
}

function showDrafts(stats) {
  const drafted = stats.spec_decode_num_draft_tokens_total || 0;
  const accepted = stats.spec_decode_num_accepted_tokens_total || 0;
  const generated = stats.generation_tokens_total || 0;
  at("drafts").hidden = !drafted;
  if (!drafted) return;
  show("drafts-accepted", percent(accepted / drafted));
  show("drafts-step", (generated / Math.max(1, generated - accepted)).toFixed(2));
}

/** What --kv-persist keeps; without it all is 0. */
const persists = (stats) =>
  Object.entries(stats).some(([name, value]) => name.startsWith("persist_") && value);

function showPersistence(stats) {
  at("persist").hidden = !persists(stats);
  show("persist-bytes", bytes(stats.persist_bytes || 0));
  show("persist-written", bytes(stats.persist_written_bytes_total || 0));
  show("persist-read", bytes(stats.persist_read_bytes_total || 0));
  const hidden = stats.persist_hidden_seconds_total || 0;
  const reading = hidden + (stats.persist_wait_seconds_total || 0);
  show("persist-hidden", reading ? percent(hidden / reading) : "–");
}

function drawLine(id, values, top = 0) {
  const svg = at(id);
  const span = Math.max(LEAST_SPAN, values.length) - 1;
  svg.setAttribute("viewBox", `0 0 ${span} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  while (svg.children.length < 2) {
    svg.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  }
  const most = Math.max(top, ...values) || 1;
  const from = span + 1 - values.length;
  const points = values.map((value, i) => `${from + i},${(98 - (96 * value) / most).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  svg.children[0].setAttribute("d", line && `${line}V100H${from}Z`);
  svg.children[1].setAttribute("d", line);
}

/** Each: what it counts, its number, and whether it tells of trouble ("bad") or of effort. */
function countersOf({ stats, num_rejected: rejected, num_failed: failed }) {
  const ahead = stats.hidden_calls_total || 0;
  const awaited = stats.unhidden_calls_total || 0;
  return [
    ["rejected", rejected, "bad", "Requests answered with 429, as the queue was full"],
    ["failed", failed, "bad", "Requests answered with 5xx, or with such an error in a stream"],
    ["engine restarts", stats.engine_restarts_total, "bad", "How often the engine died or hung, and was started again"],
    ["left or aborted", stats.requests_aborted_total, "", "Requests whose client went away, or that were stopped"],
    ["preempted", stats.num_preemptions_total, "effort", WORDS.preempted],
    ["swapped out now", stats.num_sequences_swapped, "effort", "Sequences whose pages are in the swap space"],
    ["map calls made ahead", ahead, "", WORDS["map calls"]],
    ["map calls waited for", awaited, "", "Map calls that a step had to wait for"],
    ...(persists(stats) ? persistCountersOf(stats) : []),
  ].filter(([, number]) => number !== undefined);
}

function persistCountersOf(stats) {
  const lost = (stats.persist_missed_blocks_total || 0) + (stats.persist_refused_blocks_total || 0);
  return [
    ["blocks hit on disk", stats.persist_restored_blocks_total, "", "Blocks of prefixes that were read from --kv-persist instead of computed"],
    ["files evicted", stats.persist_evicted_blocks_total, "", "Blocks that left the directory for newer ones, as --kv-persist-bytes asks"],
    ["blocks not kept", lost, "effort", "Blocks that left memory before they were written, or that the system refused to write"],
    ["files broken", stats.persist_broken_blocks_total, "bad", "Files whose checksum was wrong: they were removed, and computed again"],
  ];
}

function showCounters(data) {
  const list = at("counters");
  const counters = countersOf(data);
  resize(list, counters.length, () => {
    const item = document.createElement("li");
    item.append(document.createElement("b"), document.createElement("span"));
    return item;
  });
  counters.forEach(([name, number, kind, meaning], i) => {
    const item = list.children[i];
    item.title = meaning;
    item.className = number ? kind : "";
    item.firstChild.textContent = count(number);
    item.lastChild.textContent = ` ${name}`;
  });
}

// -- the map ---------------------------------------------------------------------------------

const codeAt = (cell) => state.data.pool.cells.charCodeAt(cell) - 48;
const useOf = (code) => state.data.pool.uses[code & 15];

function layOut(width, num) {
  const height = Math.max(240, Math.min(420, width * 0.36));
  const size = Math.max(3, Math.min(20, Math.floor(Math.sqrt((width * height) / Math.max(1, num)))));
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.ceil(num / columns), gap: size > 4 ? 1 : 0 };
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--page-${name}`).trim();
  return Object.fromEntries([...Object.keys(USES), "mark"].map((name) => [name, colour(name)]));
}

function drawMap() {
  const canvas = at("map");
  const { pool } = state.data;
  const num = pool.cells.length;
  const width = canvas.clientWidth;
  const grid = layOut(width, num);
  state.grid = grid;
  const scale = window.devicePixelRatio || 1;
  const height = grid.rows * grid.size;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  const colours = palette();
  const side = grid.size - grid.gap;
  for (let cell = 0; cell < num; cell += 1) {
    const code = codeAt(cell);
    const use = useOf(code);
    const x = (cell % grid.columns) * grid.size;
    const y = Math.floor(cell / grid.columns) * grid.size;
    paint.globalAlpha = state.only && !matches(code, state.only) ? 0.12 : 1;
    paint.fillStyle = colours[use];
    paint.fillRect(x, y, side, side);
    if (code & SHARED && side >= 3) {
      const dot = Math.max(1, Math.floor(side / 3));
      const inset = (side - dot) / 2;
      paint.fillStyle = colours.mark;
      paint.fillRect(x + inset, y + inset, dot, dot);
    }
    if (cell === state.cursor) {
      paint.globalAlpha = 1;
      paint.strokeStyle = getComputedStyle(document.body).color;
      paint.lineWidth = 2;
      paint.strokeRect(x - 1, y - 1, side + 2, side + 2);
    }
  }
  paint.globalAlpha = 1;
  const { stats } = state.data;
  const each = pool.pages_per_cell > 1 ? `, ${count(pool.pages_per_cell)} in each cell` : "";
  const size = stats.page_bytes ? ` of ${bytes(stats.page_bytes)}` : "";
  show("map-note", `${count(pool.num_pages)} pages${size}${each}`);
  const told = Object.keys(USES).filter((use) => pool.counts[use]);
  canvas.setAttribute("aria-label",
    `Map of the pool: ${told.map((use) => `${pool.counts[use]} ${use}`).join(", ")}`);
  describeCell();
}

const matches = (code, only) => (only === "shared" ? (code & SHARED) !== 0 : useOf(code) === only);

function describeCell() {
  const { pool } = state.data;
  if (state.cursor < 0 || state.cursor >= pool.cells.length) return;
  const first = state.cursor * pool.pages_per_cell;
  const last = Math.min(first + pool.pages_per_cell, pool.num_pages) - 1;
  const code = codeAt(state.cursor);
  const use = useOf(code);
  const marks = [
    code & SHARED ? "shared" : "",
    code & MAPPED && !["virtual", "parked", "spare"].includes(use) ? "mapped in a slot" : "",
  ].filter(Boolean);
  const name = first === last ? `Page ${count(first)}` : `Pages ${count(first)} to ${count(last)}, mostly`;
  const text = `${name}: ${[use, ...marks].join(", ")} (${USES[use]})`;
  if (at("map-cell").textContent !== text) show("map-cell", text);
}

function moveCursor(cell) {
  if (!state.data) return;
  state.cursor = Math.max(0, Math.min(state.data.pool.cells.length - 1, cell));
  drawMap();
}

function showLegend(pool) {
  const list = at("legend");
  for (const use of [...Object.keys(USES), "shared"]) {
    let item = list.querySelector(`[data-use="${use}"]`);
    if (!item) {
      item = legendItem(use);
      list.append(item);
    }
    const number = use === "shared" ? pool.num_shared : pool.counts[use] || 0;
    item.querySelector("b").textContent = count(number);
    item.hidden = !number && RARE.includes(use);
  }
}

/** Of a model whose layers differ: each kind of layers has pages of its own. */
function showKinds(kinds) {
  const list = at("kinds");
  list.hidden = !kinds.length;
  resize(list, kinds.length, () => {
    const item = document.createElement("li");
    item.append(document.createElement("b"), document.createElement("span"));
    return item;
  });
  kinds.forEach((kind, i) => {
    const [name, text] = list.children[i].children;
    const sizes = ["used", "cached", "free"].map((use) => {
      const pages = kind[`${use}_pages`];
      return `${count(pages)} ${use} (${bytes(pages * kind.page_bytes)})`;
    });
    name.textContent = `${kind.name}: `;
    text.textContent = `pages of ${bytes(kind.page_bytes)}; ${sizes.join(", ")}`;
  });
}

function legendItem(use) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  const swatch = document.createElement("i");
  item.dataset.use = use;
  button.type = "button";
  button.title = use === "shared" ? SHARED_USE : USES[use];
  button.setAttribute("aria-pressed", "false");
  if (use !== "shared") swatch.style.background = `var(--page-${use})`;
  button.append(swatch, ` ${use} `, document.createElement("b"));
  button.addEventListener("click", () => {
    state.only = state.only === use ? null : use;
    for (const other of at("legend").querySelectorAll("li")) {
      other.firstChild.setAttribute("aria-pressed", String(other.dataset.use === state.only));
    }
    drawMap();
  });
  item.append(button);
  return item;
}

function explainWords() {
  const meanings = { ...USES, shared: SHARED_USE, ...WORDS };
  for (const [word, meaning] of Object.entries(meanings)) {
    const pair = document.createElement("div");
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = word;
    text.textContent = meaning;
    pair.append(term, text);
    document.querySelector("#words dl").append(pair);
  }
}

// -- slots, requests, figures ----------------------------------------------------------------

function resize(parent, num, make) {
  while (parent.children.length > num) parent.lastChild.remove();
  while (parent.children.length < num) parent.append(make());
}

function showSlots(slots) {
  const shown = slots.map(([mapped, used], slot) => ({ slot, mapped, used })).filter((s) => s.mapped);
  const used = shown.filter((slot) => slot.used).length;
  const unit = shown.length ? "; pages in use of those mapped" : "";
  show("slots-note",
    `${used} in use, ${shown.length - used} parked, ${slots.length - shown.length} empty${unit}`);
  resize(at("slots"), shown.length, () => {
    const box = document.createElement("div");
    box.className = "slot";
    box.append(document.createElement("span"), document.createElement("progress"));
    return box;
  });
  shown.forEach(({ slot, mapped, used: own }, i) => {
    const [text, bar] = at("slots").children[i].children;
    text.textContent = `${slot}: ${own}/${mapped}`;
    bar.max = mapped;
    bar.value = own;
    bar.setAttribute("aria-label", `slot ${slot}: ${own} of ${mapped} mapped pages in use`);
  });
}

const REASONS = {
  forced: "by option", default: "nothing speaks against it", slots: "no slot is free",
  converted: "converted on demand", forks: "cheaper forks", maps: "fewer map calls",
  prefix: "less of the prefix is copied", kernels: "faster kernels",
  memory: "less waste while memory is short", batch: "as the rest of the batch",
};

function predictedOf({ costs }) {
  if (!("virtual" in costs && "paged" in costs)) return "";
  return `predicted: ${seconds(costs.virtual)} virtual, ${seconds(costs.paged)} paged`;
}

function showRequests({ requests, num_requests: total, num_others: others }) {
  const more = total - requests.length - others;
  const notes = [`${count(total)}`];
  if (others) notes.push(`${count(others)} of other keys`);
  if (more > 0) notes.push(`${count(more)} more not listed`);
  show("requests-note", notes.join(", "));
  const body = document.querySelector("#requests tbody");
  resize(body, requests.length, () => {
    const row = document.createElement("tr");
    for (let i = 0; i < 9; i += 1) row.append(document.createElement("td"));
    row.children[2].append(document.createElement("b"), document.createElement("span"));
    return row;
  });
  requests.forEach((request, i) => {
    const cached = request.num_cached_tokens ? ` (${count(request.num_cached_tokens)} cached)` : "";
    const sequences = request.num_branches;
    const most = count(request.max_tokens * sequences);
    const several = sequences > 1 ? ` in ${sequences} sequences` : "";
    const texts = [
      request.request_id,
      request.num_preemptions ? `${request.state}, preempted ${request.num_preemptions}×` : request.state,
      null,
      `${count(request.num_prompt_tokens)}${cached}`,
      `${count(request.num_output_tokens)} of ${most}${several}`,
      request.slots.join(" ") || "–",
      seconds(request.age_seconds),
      seconds(request.ttft_seconds),
      seconds(request.itl_seconds),
    ];
    const cells = body.children[i].children;
    texts.forEach((text, j) => {
      if (text !== null && cells[j].textContent !== text) cells[j].textContent = text;
    });
    const [regime, why] = cells[2].children;
    regime.className = request.regime;
    regime.textContent = request.regime || "not chosen yet";
    why.textContent = request.regime ? ` ${REASONS[request.reason] || request.reason}` : "";
    cells[2].title = predictedOf(request);
    cells[0].title = request.request_id;
  });
}

function showFigures(stats) {
  const list = at("figures");
  if (!list.parentElement.open) return;
  const names = Object.keys(stats);
  resize(list, names.length, () => {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    return pair;
  });
  names.forEach((name, i) => {
    const [term, value] = list.children[i].children;
    term.textContent = name;
    value.textContent = String(stats[name]);
    value.dataset.figure = name;
  });
}

// -- what people do --------------------------------------------------------------------------

at("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  at("pause").setAttribute("aria-pressed", String(state.paused));
  show("pause", state.paused ? "Resume" : "Pause");
  if (state.paused) say("", "paused");
  else ask();
  schedule();
});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  stored.key = at("key").value;
  at("key").value = "";
  at("key-form").hidden = true;
  ask();
});

at("map").addEventListener("keydown", (event) => {
  if (!state.grid) return;
  const steps = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -state.grid.columns, ArrowDown: state.grid.columns,
    Home: -state.cursor, End: Infinity,
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  moveCursor(Math.max(0, state.cursor) + steps[event.key]);
});

at("map").addEventListener("pointermove", (event) => {
  if (!state.grid) return;
  const { size, columns } = state.grid;
  const column = Math.min(columns - 1, Math.floor(event.offsetX / size));
  moveCursor(Math.floor(event.offsetY / size) * columns + column);
});

at("figures").parentElement.addEventListener("toggle", () => {
  if (state.data) showFigures(state.data.stats);
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(state.timer);
  else if (!state.paused && at("key-form").hidden) ask();
});

window.addEventListener("resize", () => { if (state.data) drawMap(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (state.data) drawMap();
});

explainWords();
startChat({ key: () => stored.key, refused: askForKey, asked: ask });
if (document.documentElement.dataset.key === "required" && !stored.key) askForKey("");
else ask();
