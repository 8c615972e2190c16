// The playground: chat, race and live charts over the server's public API. No framework, no build step, no other server.
// Exported functions do not need the page, and are tested outside of a browser.

const POLL_MS = 1000; // while charts are in view
const REST_MS = 15000; // else
const HISTORY = 60; // points of a chart

// ── Streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Reads server-sent events from text that is cut anywhere: push(text) gives the data of the events it completes. */
export class EventParser {
  #rest = "";
  push(text) {
    const events = (this.#rest + text.replaceAll("\r", "")).split("\n\n");
    this.#rest = events.pop();
    return events.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}

/** Yields the chunks of a streamed answer. Throws the server's message if it refuses, or fails half-way. */
async function* chunksOf(body, { key, signal }) {
  const response = await call("/v1/chat/completions", { key, signal, body });
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let complete = false;
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    for (const data of parser.push(read.value)) {
      const chunk = data === "[DONE]" ? null : JSON.parse(data);
      if (chunk?.error) throw new Error(chunk.error.message);
      if (chunk) yield chunk;
      else complete = true;
    }
  }
  if (!complete) throw new Error("the answer broke off");
}

async function call(path, { key, signal, body } = {}) {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `${path}: ${response.status} ${response.statusText}`);
}

// ── Requests ────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Makes the body of a request from the controls, as texts. An empty control is left to the server. */
export function requestOf(messages, controls, { model, plain = false } = {}) {
  const number = (name) => (controls[name] === "" || controls[name] == null ? {} : { [name]: Number(controls[name]) });
  return {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...number("temperature"),
    ...number("seed"),
    ...number("max_tokens"),
    ...(controls.logprobs ? { logprobs: true } : {}),
    speculation: plain || controls.drafter === "off" ? { enabled: false } : speculationOf(controls, number),
    paceline: { events: true },
  };
}

function speculationOf(controls, number) {
  return { enabled: true, rule: controls.rule, ...(controls.drafter && { drafter: controls.drafter }), ...number("max_draft") };
}

/** Lists the tokens of a chunk: text, origin, probability, round, and time of arrival. */
export function tokensOf(chunk, at) {
  const choice = chunk.choices?.[0];
  const told = chunk.paceline;
  const scores = choice?.logprobs?.content ?? [];
  if (!told) return choice?.delta?.content ? [{ text: choice.delta.content, origin: null, at }] : [];
  return told.token_texts.map((text, i) => ({
    text,
    origin: told.origins[i],
    drafter: told.drafter,
    round: told.round,
    at,
    ...(scores[i] && { probability: Math.exp(scores[i].logprob) }),
  }));
}

/** An answer in the making. */
export class Answer {
  text = "";
  tokens = [];
  stats = null;
  usage = null;
  stopped = false;
  add(chunk, at) {
    const tokens = tokensOf(chunk, at);
    this.tokens.push(...tokens);
    this.text += chunk.choices?.[0]?.delta?.content ?? "";
    this.stats = chunk.speculation ?? this.stats;
    this.usage = chunk.usage ?? this.usage;
    return tokens;
  }
  /** Text that no token shows: half a character at the very end. */
  get rest() {
    const shown = this.tokens.map((token) => token.text).join("");
    return this.text.startsWith(shown) ? this.text.slice(shown.length) : "";
  }
  get count() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }
  /** Tokens a second after the first arrival. */
  get speed() {
    const later = this.tokens.filter((token) => token.at > this.tokens[0].at);
    return later.length ? (1000 * later.length) / (later.at(-1).at - this.tokens[0].at) : 0;
  }
}

/** Finds the first character in which two texts differ. -1: they are identical. */
export function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i] !== other[i]) return i;
  return -1;
}

/** Makes the columns of the timeline: one a round, from the end of the round before it to its own end. */
export function roundsOf(tokens, began) {
  const rounds = [];
  for (const token of tokens) {
    const last = rounds.at(-1);
    if (last && last.round === token.round && last.to === token.at) last.origins.push(token.origin);
    else rounds.push({ round: token.round, from: last?.to ?? began, to: token.at, origins: [token.origin] });
  }
  return rounds;
}

export function describe(token, drafter) {
  const by = token.origin === "accepted" && drafter ? ` from ${drafter}` : "";
  const lines = [`${JSON.stringify(token.text)} ${token.origin ?? ""}${by}`.trim()];
  if (token.probability !== undefined) lines.push(`probability ${(100 * token.probability).toFixed(1)} %`);
  if (token.round !== undefined) lines.push(`step ${token.round}`);
  if (token.since !== undefined) lines.push(`${token.since.toFixed(0)} ms after the request`);
  return lines.join("\n");
}

/** Reads /v1/speculation into one form. Unknown values are null, so that a chart can say that it has nothing. */
export function stateOf(told) {
  const drafters = told.drafters ?? {};
  const named = Array.isArray(drafters) ? drafters.map((one) => one.name ?? one) : Object.keys(drafters);
  return {
    drafters: named,
    outputTokens: told.output_tokens ?? null,
    acceptance: told.acceptance_by_position ?? null,
    speedup: told.speedup ?? null,
    reasons: told.off_reasons ?? {},
    rules: told.rules ?? null,
    longest: told.max_draft ?? null,
    remarks: [told.default_drafter ? `drafter ${told.default_drafter}` : "no drafter", ...(told.bitwise ? ["bitwise"] : [])],
  };
}

// ── The page ────────────────────────────────────────────────────────────────────────────────────────────────────────

const $ = (id) => document.getElementById(id);
const page = { model: undefined, messages: [], running: null, shown: new WeakMap(), speeds: [], speedups: [], polled: null, drawing: null };

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, title) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (title) element.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: title }));
  return element;
}

function complain(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error ? error.message : "";
}

function controls() {
  const names = ["drafter", "max_draft", "rule", "temperature", "seed", "max_tokens"];
  return { ...Object.fromEntries(names.map((name) => [name, $(name).value])), logprobs: $("logprobs").checked };
}

/** Runs one answer into `box`, token by token. Tokens that came before a stop stay. */
async function answerInto(box, body, { signal, began, onToken = () => {} }) {
  const answer = new Answer();
  box.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of chunksOf(body, { key: $("key").value, signal })) {
      const tokens = answer.add(chunk, performance.now());
      for (const token of tokens) token.since = token.at - began;
      box.append(...tokens.map((token) => spanOf(token, answer)));
      if (tokens.length) onToken(answer);
    }
    box.append(answer.rest);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.stopped = true;
  } finally {
    box.setAttribute("aria-busy", "false");
  }
  return answer;
}

function spanOf(token, answer) {
  const span = make("span", { className: `t ${token.origin ?? ""}`, textContent: token.text });
  page.shown.set(span, { token, answer });
  return span;
}

// ── Chat ────────────────────────────────────────────────────────────────────────────────────────────────────────────

async function ask(event) {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || page.running) return;
  $("prompt").value = "";
  const question = make("p", { className: "user", textContent: text });
  const box = make("div", { className: "answer", tabIndex: 0 });
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Answer");
  $("log").append(question, box);
  await whileRunning($("send"), $("stop"), (signal) => converse(text, box, signal).catch((error) => {
    question.remove(); // what got no answer is no part of the conversation: it can be asked again
    box.remove();
    $("prompt").value ||= text;
    throw error;
  }));
}

async function converse(text, box, signal) {
  const began = performance.now();
  const asked = [...page.messages, { role: "user", content: text }];
  const body = requestOf(asked, controls(), { model: page.model });
  const answer = await answerInto(box, body, { signal, began, onToken: (answer) => onceAFrame(() => drawTimeline(answer, began)) });
  if (box.isConnected) page.messages = [...asked, { role: "assistant", content: answer.text }];
  $("said").textContent = summary(answer);
}

function summary(answer) {
  const stats = answer.stats;
  const parts = [`${answer.count} tokens`, `${answer.speed.toFixed(0)} tokens/s`];
  if (stats?.num_draft_tokens) parts.push(`${stats.num_accepted_tokens} of ${stats.num_draft_tokens} drafted tokens accepted`);
  if (answer.stopped) parts.push("stopped");
  if (stats?.off_reason) parts.push(`not drafting: ${stats.off_reason}`);
  return parts.join(" · ");
}

/** Runs one task at a time; `stop` ends it early. */
async function whileRunning(start, stop, work) {
  const abort = new AbortController();
  page.running = abort;
  [start.disabled, stop.disabled] = [true, false];
  complain(null);
  try {
    await work(abort.signal);
  } catch (error) {
    complain(error);
  } finally {
    page.running = null;
    [start.disabled, stop.disabled] = [false, true];
  }
}

function forget() {
  page.running?.abort();
  page.messages = [];
  $("log").replaceChildren();
  $("said").textContent = "";
  $("prompt").focus();
}

// ── Tokens: hover, and arrow keys ───────────────────────────────────────────────────────────────────────────────────

function showTip(span) {
  const { token, answer } = page.shown.get(span);
  const box = span.getBoundingClientRect();
  const tip = $("tip");
  tip.textContent = describe(token, token.drafter);
  tip.hidden = false;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight + 8 < innerHeight ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function hideTip() {
  $("tip").hidden = true;
  for (const span of document.querySelectorAll(".t.at")) span.classList.remove("at");
}

function hover(event) {
  if (page.shown.has(event.target)) showTip(event.target);
  else $("tip").hidden = true;
}

/** Moves from token to token by arrow keys. The tip shows the facts of a token, and is read out. */
function walk(event) {
  const box = event.target.closest?.(".answer");
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!box || !step || !box.childElementCount) return;
  event.preventDefault();
  const spans = [...box.children];
  const at = spans.findIndex((span) => span.classList.contains("at"));
  const next = spans[Math.max(0, Math.min(spans.length - 1, at + step))];
  hideTip();
  next.classList.add("at");
  showTip(next);
  box.setAttribute("aria-describedby", "tip");
}

// ── Race ────────────────────────────────────────────────────────────────────────────────────────────────────────────

async function race(event) {
  event.preventDefault();
  const prompt = $("race-prompt").value.trim();
  if (!prompt || page.running) return;
  $("verdict").textContent = $("verdict").className = "";
  const chosen = controls();
  chosen.seed ||= String(Math.floor(Math.random() * 2 ** 31)); // the same for both
  chosen.logprobs = false; // they cost time
  if (chosen.drafter === "off") chosen.drafter = "";
  await whileRunning($("go"), $("halt"), (signal) => runRace([{ role: "user", content: prompt }], chosen, signal));
}

async function runRace(messages, chosen, signal) {
  const runners = [
    () => runner("plain", requestOf(messages, chosen, { model: page.model, plain: true }), signal),
    () => runner("fast", requestOf(messages, chosen, { model: page.model }), signal),
  ];
  for (const name of ["plain", "fast"]) $(`${name}-text`).replaceChildren();
  const results = $("turns").checked ? [await runners[0](), await runners[1]()] : await Promise.all(runners.map((run) => run()));
  declare(...results, excuseOf(chosen));
}

async function runner(name, body, signal) {
  const began = performance.now();
  const tick = () => ($(`${name}-clock`).textContent = `${((performance.now() - began) / 1000).toFixed(2)} s`);
  const timer = setInterval(tick, 50);
  const box = $(`${name}-text`);
  const onToken = (answer) => {
    box.scrollTop = box.scrollHeight;
    $(`${name}-speed`).textContent = `${answer.tokens.length} tokens · ${answer.speed.toFixed(0)}/s`;
  };
  try {
    const answer = await answerInto(box, body, { signal, began, onToken });
    return { answer, seconds: (performance.now() - began) / 1000 };
  } finally {
    clearInterval(timer);
    tick();
  }
}

// Says why the texts may differ. Empty: they may not.
function excuseOf({ rule, temperature }) {
  if (["threshold", "typical"].includes(rule)) return ` (the rule ${rule} is lossy)`;
  return rule === "coupled" || temperature === "0" ? "" : ` (the rule ${rule} keeps the distribution, not the text)`;
}

function declare(plain, fast, excuse) {
  const at = firstDifference(plain.answer.text, fast.answer.text);
  const verdict = $("verdict");
  if (plain.answer.stopped || fast.answer.stopped) return (verdict.textContent = "stopped");
  verdict.className = at < 0 ? "same" : excuse ? "" : "different";
  const excerpt = (runner) => `“${runner.answer.text.slice(at, at + 20)}”`;
  verdict.textContent =
    at < 0
      ? `identical · ${(plain.seconds / fast.seconds).toFixed(2)} × as fast`
      : `different from character ${at + 1} on: ${excerpt(plain)} / ${excerpt(fast)}${excuse}`;
}

// ── Drawings ────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Draws once for many wishes: the latest one. */
function onceAFrame(drawing) {
  if (!page.drawing) requestAnimationFrame(drawLatest);
  page.drawing = drawing;
}

function drawLatest() {
  const latest = page.drawing;
  page.drawing = null;
  latest();
}

function drawTimeline(answer, began) {
  const rounds = roundsOf(answer.tokens, began);
  const [width, height] = [600, 130];
  const span = rounds.at(-1).to - began || 1;
  const most = Math.max(4, ...rounds.map((round) => round.origins.length));
  const cells = rounds.flatMap((round) => {
    const x = ((round.from - began) / span) * width;
    const wide = Math.max(((round.to - round.from) / span) * width - 1, 0.5);
    const title = `step ${round.round}: ${round.origins.length} tokens in ${(round.to - round.from).toFixed(0)} ms`;
    const tall = height / most;
    return round.origins.map((origin, i) =>
      draw("rect", { class: origin ?? "plain", x, width: wide, y: height - (i + 1) * tall, height: tall - 1 }, title));
  });
  $("timeline").replaceChildren(...cells);
  $("timeline").setAttribute("aria-label", `${answer.tokens.length} tokens in ${rounds.length} steps, ${(span / 1000).toFixed(2)} seconds`);
}

function lineChart(svg, points, { bands = [], rule = null } = {}) {
  const most = 1.1 * Math.max(...points.filter((point) => point !== null), ...bands.flat(), rule ?? 0, 1e-9);
  const x = (i) => (600 * i) / (HISTORY - 1);
  const y = (value) => 120 - (115 * value) / most;
  const edge = bands.map(([low], i) => `${x(i)},${y(low)}`).concat(bands.map(([, high], i) => `${x(i)},${y(high)}`).reverse());
  const parts = bands.length ? [draw("polygon", { class: "band", points: edge.join(" ") })] : [];
  if (rule !== null) parts.push(draw("line", { class: "rule", x1: 0, x2: 600, y1: y(rule), y2: y(rule) }));
  parts.push(draw("polyline", { class: "line", points: points.map((value, i) => `${x(i)},${y(value)}`).join(" ") }));
  svg.replaceChildren(...parts);
}

function barChart(svg, shares) {
  const wide = 600 / Math.max(shares.length, 8);
  svg.replaceChildren(...shares.map((share, i) =>
    draw("rect", { class: "accepted", x: i * wide + 2, width: wide - 4, y: 120 - 118 * share, height: 118 * share },
      `position ${i + 1}: ${(100 * share).toFixed(0)} %`)));
}

// ── Live ────────────────────────────────────────────────────────────────────────────────────────────────────────────

function keep(list, point) {
  list.push(point);
  if (list.length > HISTORY) list.shift();
}

function label(id, text) {
  $(`${id}-now`).textContent = text;
  $(id).setAttribute("aria-label", `${$(id).closest("figure").querySelector("figcaption").textContent}`);
}

function showSpeed(state, now) {
  const before = page.polled;
  if (state.outputTokens === null || now - before?.at < POLL_MS / 2) return;
  page.polled = { tokens: state.outputTokens, at: now };
  if (!before) return;
  const speed = Math.max(0, (1000 * (state.outputTokens - before.tokens)) / (now - before.at));
  keep(page.speeds, speed);
  lineChart($("speed"), page.speeds);
  label("speed", speed.toFixed(0));
}

function showState(state, now) {
  showSpeed(state, now);
  if (state.acceptance?.length) {
    barChart($("acceptance"), state.acceptance);
    label("acceptance", `${(100 * state.acceptance[0]).toFixed(0)} % at the first`);
  }
  if (state.speedup) {
    const { speedup, low, high } = state.speedup;
    keep(page.speedups, state.speedup);
    lineChart($("speedup"), page.speedups.map((one) => one.speedup), { bands: page.speedups.map((one) => [one.low, one.high]), rule: 1 });
    label("speedup", `${speedup.toFixed(2)} × (${low.toFixed(2)} to ${high.toFixed(2)})`);
  } else label("speedup", "too few answers to say");
  $("reasons").replaceChildren(...Object.entries(state.reasons).map(([reason, count]) => make("li", { textContent: `${count} × ${reason}` })));
  offer(state);
}

/** Limits the controls to what the server allows. */
function offer({ drafters, rules, longest, remarks }) {
  const known = new Set([...$("drafter").options].map((option) => option.value));
  $("drafter").append(...drafters.filter((name) => !known.has(name)).map((name) => make("option", { value: name, textContent: name })));
  for (const option of $("rule").options) option.disabled = rules !== null && !rules.includes(option.value);
  if (longest !== null) $("max_draft").max = longest;
  say([page.model, ...remarks].join(" · "));
}

function say(text) {
  if ($("server").textContent !== text) $("server").textContent = text; // not read out again and again
}

async function poll() {
  const key = $("key").value;
  try {
    page.model ??= (await (await call("/v1/models", { key })).json()).data[0].id;
    showState(stateOf(await (await call("/v1/speculation", { key })).json()), performance.now());
  } catch (error) {
    page.model = undefined;
    say(error.message);
  }
  clearTimeout(page.timer);
  page.timer = setTimeout(poll, $("live").hidden || document.hidden ? REST_MS : POLL_MS);
}

// ── Tabs, theme, keys ───────────────────────────────────────────────────────────────────────────────────────────────

function select(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  poll();
}

function turnTabs(event) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const at = tabs.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  const tab = tabs[(to + tabs.length) % tabs.length];
  select(tab);
  tab.focus();
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", dark);
}

function sendOnEnter(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

function start() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(system.matches);
  system.addEventListener("change", () => setTheme(system.matches));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => select(tab));
  document.querySelector("[role=tablist]").addEventListener("keydown", turnTabs);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("ask").addEventListener("submit", ask);
  $("start").addEventListener("submit", race);
  $("reset").addEventListener("click", forget);
  $("key").addEventListener("change", poll);
  for (const id of ["stop", "halt"]) $(id).addEventListener("click", () => page.running?.abort());
  for (const id of ["prompt", "race-prompt"]) $(id).addEventListener("keydown", sendOnEnter);
  document.addEventListener("keydown", (event) => event.key === "Escape" && (hideTip(), page.running?.abort()));
  document.addEventListener("keydown", walk);
  document.addEventListener("pointerover", hover);
  document.addEventListener("focusout", hideTip);
  poll();
}

if (typeof document !== "undefined") start();
