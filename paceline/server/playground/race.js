// The race: the same prompt and seed, plain and speculative, each with a clock.

import { Answer, firstDifference, requestOf } from "./answer.js";
import { call, chunksOf } from "./api.js";
import { controls } from "./controls.js";
import { $, onceAFrame, say } from "./dom.js";
import { RACE_PROMPT } from "./examples.js";
import { View } from "./render.js";
import { isRunning, run } from "./running.js";
import { remember } from "./tips.js";

const SEED = "1"; // unless the controls have one: the race is repeatable
const LANES = ["plain", "fast"];

export function startRace({ model, onMeasured }) {
  $("race-prompt").value = RACE_PROMPT;
  $("start").addEventListener("submit", (event) => {
    event.preventDefault();
    const prompt = $("race-prompt").value.trim();
    if (!prompt || isRunning()) return;
    const chosen = controls();
    chosen.seed ||= SEED;
    chosen.logprobs = false; // they cost time
    if (chosen.drafter === "off") chosen.drafter = "";
    run(async (signal) => {
      const times = await race([{ role: "user", content: prompt }], chosen, model(), signal);
      if (times) onMeasured(times);
    });
  });
}

/** Runs the race. Returns how many times as fast speculation was; undefined if the texts differ or it was stopped. */
async function race(messages, chosen, model, signal) {
  clear();
  const bodies = LANES.map((lane) => requestOf(messages, chosen, { model, plain: lane === "plain" }));
  await readPrompt(bodies[0], signal);
  const lanes = LANES.map((name, i) => () => lane(name, bodies[i], signal, chosen.formatted));
  const [plain, fast] = $("together").checked
    ? await Promise.all(lanes.map((start) => start()))
    : [await lanes[0](), await lanes[1]()];
  const { text, className, times } = verdictOf(plain, fast, excuseOf(chosen));
  declare(text, className, plain.seconds, fast.seconds);
  for (const name of LANES) requestAnimationFrame(() => ($(`${name}-text`).scrollTop = 0)); // to read and compare
  return times;
}

/** Has the server read the prompt before the race, so that it costs neither of the two. */
async function readPrompt(body, signal) {
  say($("verdict"), "Reading the prompt …");
  const { stream, stream_options, paceline, ...fields } = body;
  await (await call("/v1/chat/completions", { signal, body: { ...fields, max_tokens: 1 } })).json();
  say($("verdict"), "");
}

function clear() {
  $("verdict").className = "";
  for (const name of LANES) {
    $(`${name}-text`).replaceChildren();
    say($(`${name}-speed`), "");
    say($(`${name}-clock`), "0.00 s");
    bar(name, 0);
  }
}

const bar = (name, share) => ($(`${name}-bar`).style.width = `${(100 * share).toFixed(1)}%`);

async function lane(name, body, signal, formatted) {
  const box = $(`${name}-text`);
  const view = remember(new View(box, { formatted }));
  const answer = new Answer(performance.now());
  const tick = () => say($(`${name}-clock`), `${((performance.now() - answer.began) / 1000).toFixed(2)} s`);
  const show = onceAFrame(() => {
    view.show(answer.text, answer.tokens);
    box.scrollTop = box.scrollHeight;
    say(
      $(`${name}-speed`),
      `${answer.tokens.length} tokens · ${answer.speed.toFixed(0)} tokens/s · ${answer.steps} steps`,
    );
  });
  const timer = setInterval(tick, 50);
  try {
    for await (const chunk of chunksOf("/v1/chat/completions", body, signal)) {
      if (answer.add(chunk, performance.now()).length) show();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.finish = "stopped";
  } finally {
    clearInterval(timer);
    tick();
  }
  return { answer, seconds: (performance.now() - answer.began) / 1000 };
}

/** Says why the texts may differ. Empty: they may not. */
export function excuseOf({ rule, temperature }) {
  if (["threshold", "typical", "confidence"].includes(rule)) return `the rule ${rule} is lossy`;
  return rule === "coupled" || temperature === "0" ? "" : `the rule ${rule} keeps the distribution, not the text`;
}

/** Says who won. The texts are compared character by character. */
export function verdictOf(plain, fast, excuse) {
  if ([plain, fast].some(({ answer }) => answer.finish === "stopped"))
    return { text: "Stopped before the end.", className: "" };
  const at = firstDifference(plain.answer.text, fast.answer.text);
  if (at < 0) {
    const cut = fast.answer.finish === "length" ? ", both cut at max tokens" : "";
    const times = plain.seconds / fast.seconds;
    const { length } = fast.answer.text;
    return {
      text: `Identical texts, ${length} characters${cut}: speculation was ${times.toFixed(2)} × as fast.`,
      className: "same",
      times,
    };
  }
  const excerpt = ({ answer }) => `“${answer.text.slice(at, at + 20)}”`;
  const why = excuse ? ` (${excuse})` : "";
  return {
    text: `The texts differ from character ${at + 1} on: ${excerpt(plain)} and ${excerpt(fast)}${why}.`,
    className: excuse ? "" : "different",
  };
}

function declare(text, className, plainSeconds, fastSeconds) {
  $("verdict").className = className;
  say($("verdict"), text);
  const longest = Math.max(plainSeconds, fastSeconds);
  bar("plain", plainSeconds / longest);
  bar("fast", fastSeconds / longest);
}
