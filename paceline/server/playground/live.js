// What the server says of itself: its state, its model, the speed-up, and the charts of the last minute.

import { call, get, keyOf, setKey } from "./api.js";
import { barChart, lineChart } from "./charts.js";
import { offer } from "./controls.js";
import { $, make, say } from "./dom.js";
import { canaryInWords, cardLine, cardOf, groupInWords, reasonOf, speedupInWords, stateInWords } from "./words.js";

const LIVE_MS = 1000; // while charts are in view
const REST_MS = 5000; // else
const SECONDS = 60; // of a chart

const state = { model: null, points: [], polled: null, timer: null, raced: null };

/** Keeps the result of a race, for as long as the server has measured none itself. */
export const rememberRace = (times) => (state.raced = times);

export const modelName = () => state.model?.id;

export function startLive() {
  $("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value.trim());
    $("key").value = "";
    poll();
  });
  $("forget-key").addEventListener("click", () => (setKey(""), poll()));
  document.addEventListener("visibilitychange", () => document.hidden || poll());
  addEventListener("resize", () => state.polled && showCharts(state.polled.told, performance.now()));
  poll();
}

/** Asks the server how it is, now and from then on again and again. */
export async function poll() {
  clearTimeout(state.timer);
  let wait = $("live").hidden ? REST_MS : LIVE_MS;
  try {
    await call("/ready");
    state.model ??= (await get("/v1/models")).data[0];
    show(await get("/v1/speculation"), performance.now());
    showState(null);
    lock(false);
  } catch (error) {
    state.model = null;
    if (error.status === 401) lock(true);
    else showState(stateInWords(error.status ?? 0, error.body) ?? error.message);
    wait = Math.min(wait, 2000);
  }
  if (!document.hidden) state.timer = setTimeout(poll, wait);
}

function showState(text) {
  $("state").hidden = !text;
  say($("state"), text ?? "");
  if (text) say($("server"), "not connected");
}

function lock(locked) {
  $("unlock").hidden = !locked;
  $("forget-key").hidden = locked || !keyOf();
  if (!locked) return;
  showState(null);
  say($("server"), "locked");
  say($("unlock-text"), keyOf() ? "The server does not know this API key." : "This server wants an API key.");
}

function show(told, now) {
  say($("server"), cardLine(state.model));
  $("card").replaceChildren(
    ...cardOf(state.model, told).flatMap(([title, text]) => [
      make("dt", { textContent: title }),
      make("dd", { textContent: text }),
    ]),
  );
  const { number, note } = speedupInWords(told, state.raced);
  for (const id of ["hero-speedup", "badge"]) {
    say($(id), number);
    $(id).hidden = !number;
    $(id).classList.toggle("gain", parseFloat(number) >= 1);
  }
  say($("hero-note"), note);
  $("badge").title = note;
  $("measure").hidden = Boolean(number) || !told.default_drafter;
  say($("hero-model"), state.model.id);
  offer(told, state.model);
  addPoint(told, now);
  if (!$("live").hidden) showCharts(told, now);
  showReasons(told);
  showCanary(told.canary ?? told.canaries?.at(-1));
  showCounts(told);
}

/** Shows the canary that runs, or the latest one and how it ended. */
function showCanary(canary) {
  $("canary").hidden = !canary;
  if (!canary) return;
  const { phase, note, arms } = canaryInWords(canary);
  say($("canary-phase"), phase);
  say($("canary-note"), note);
  $("arms").replaceChildren(...arms.map((textContent) => make("li", { textContent })));
}

function addPoint(told, now) {
  const before = state.polled;
  if (before && now - before.at < LIVE_MS / 2) return;
  state.polled = { told, at: now };
  if (!before) return;
  const speed = Math.max(0, (1000 * (told.output_tokens - before.told.output_tokens)) / (now - before.at));
  state.points = [...state.points, { at: now, speed, speedup: told.speedup }].filter(
    (point) => now - point.at <= 1000 * SECONDS,
  );
}

function showCharts(told, now) {
  const points = state.points.map((point) => ({ ...point, ago: (now - point.at) / 1000 }));
  if (points.length) {
    const speed = points.at(-1).speed.toFixed(0);
    say($("speed-now"), `${speed} tokens/s`);
    const words = `Output tokens a second over the last minute; now ${speed}`;
    lineChart(
      $("speed"),
      points.map(({ ago, speed }) => ({ ago, value: speed })),
      { seconds: SECONDS, yTitle: "tokens per second", words },
    );
  }
  showSpeedup(
    points.filter((point) => point.speedup),
    told,
  );
  showAcceptance(told.acceptance_by_position ?? []);
}

function showSpeedup(points, told) {
  const { number, note } = speedupInWords(told);
  say($("speedup-now"), number || "–");
  $("speedup-none").hidden = points.length > 0;
  $("speedup-chart").hidden = points.length === 0;
  say($("speedup-none"), note);
  $("speedups").replaceChildren(
    ...(told.speedups ?? []).map((group) => make("li", { textContent: groupInWords(group) })),
  );
  if (!points.length) return;
  const marks = points.map(({ ago, speedup }) => ({
    ago,
    value: speedup.ratio,
    low: speedup.low,
    high: speedup.high,
  }));
  lineChart($("speedup"), marks, {
    seconds: SECONDS,
    yTitle: "times as fast as plain decoding",
    rule: 1,
    words: `Measured speed-up: ${number} ${note}`,
  });
}

function showAcceptance(shares) {
  $("acceptance-none").hidden = shares.length > 0;
  $("acceptance-chart").hidden = shares.length === 0;
  if (!shares.length) return say($("acceptance-now"), "–");
  say($("acceptance-now"), `${(100 * shares[0]).toFixed(0)} % at the first`);
  const list = shares.map((share, i) => `${i + 1}: ${(100 * share).toFixed(0)} %`).join(", ");
  const words = `Share of drafts accepted up to each position: ${list}`;
  barChart($("acceptance"), shares, { xTitle: "position in the draft", yTitle: "% of drafts", words });
}

/** Lists why answers did not draft: those that run now, and those that ended. */
function showReasons(told) {
  const lines = (counts, words) =>
    Object.entries(counts ?? {}).map(([kind, count]) =>
      make("li", {}, make("b", { textContent: `${count} ${words}: ` }), reasonOf(kind)),
    );
  const items = [...lines(told.off_now, "running now"), ...lines(told.off_reasons, "ended")];
  $("reasons").replaceChildren(
    ...(items.length ? items : [make("li", { textContent: "Every answer drafted to its end." })]),
  );
}

function showCounts(told) {
  const share = told.num_draft_tokens
    ? ` (${((100 * told.num_accepted_tokens) / told.num_draft_tokens).toFixed(0)} %)`
    : "";
  const rows = [
    ["Answers running", told.running],
    ["Answers waiting", told.waiting],
    ["Output tokens", told.output_tokens],
    ["Drafted tokens", told.num_draft_tokens],
    ["Accepted of them", `${told.num_accepted_tokens.toLocaleString("en")}${share}`],
    ["KV memory in use", `${((100 * told.pages_held) / Math.max(told.pages_total, 1)).toFixed(0)} %`],
  ];
  $("counts").replaceChildren(
    ...rows.flatMap(([title, value]) => [
      make("dt", { textContent: title }),
      make("dd", { textContent: value.toLocaleString("en") }),
    ]),
  );
}
