// Facts of the server as sentences. Needs no page.

/** Why a sequence does not draft: a sentence for every kind of reason that the server knows. */
export const REASONS = {
  "off by request": "The request switched speculation off.",
  "no drafter": "The server was started without a drafter.",
  "no prediction": "The drafter “prediction” was asked for, but the request has no prediction.",
  "drafter is out": "The drafter failed and is out of use.",
  "too many sequences": "Many answers run at once: a full batch gains more from plain steps.",
  "context too long": "The conversation is longer than the drafter may read.",
  "plain is faster": "The governor measured plain steps and drafts, and plain steps made more tokens a second.",
  "would not pay": "The governor expects too few right guesses to pay for the draft.",
  "low acceptance": "Too few guesses were right lately, so drafting pauses for a while.",
  "no room in the step": "The step was full of other answers’ tokens.",
  "no free page": "No page of KV memory was free for a draft.",
  "turn of another drafter": "Another drafter had its turn in this step.",
  "grammar": "The answer has a grammar whose masks take long, or cannot be known for a whole draft.",
  "drafter is behind": "The drafter had not read all of the text yet.",
  "no hidden states": "The drafter needs hidden states of the model that were no longer kept.",
  "measured slower": "Speculation was measured to be slower than plain decoding here, so it rests for a while.",
};

export const reasonOf = (kind) => REASONS[kind] ?? `${kind[0].toUpperCase()}${kind.slice(1)}.`;

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Writes a large number in words: 134.5 million. */
export function inWords(number) {
  for (const [size, name] of [
    [1e12, "trillion"],
    [1e9, "billion"],
    [1e6, "million"],
  ]) {
    if (number >= size)
      return `${(number / size).toPrecision(number / size >= 100 ? 4 : 3).replace(/\.?0+$/, "")} ${name}`;
  }
  return number.toLocaleString("en");
}

export const bytesInWords = (bytes) =>
  bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(0)} MB`;

/** Describes the model, as pairs of a title and a sentence. A fact that the server does not tell is left out. */
export function cardOf(model, speculation) {
  const meta = model.meta ?? {};
  const drafters = Object.entries(meta.drafters ?? {});
  const rows = [["Name", model.id]];
  if (meta.n_params) rows.push(["Parameters", inWords(meta.n_params)]);
  if (meta.bits_per_weight) {
    rows.push([
      "Weights",
      `${meta.bits_per_weight.toFixed(1)} bits each on average, ${bytesInWords(meta.size)} in memory`,
    ]);
  }
  if (model.max_model_len) rows.push(["Context", `${model.max_model_len.toLocaleString("en")} tokens`]);
  if (meta.device) rows.push(["Runs on", `${meta.device_name}: ${meta.kernels}`]);
  for (const [name, how] of drafters) {
    const out = speculation?.drafters?.[name];
    rows.push([
      name === speculation?.default_drafter ? "Drafter" : "Also drafts",
      `${name}: ${out ? `out of use: ${out}` : how}`,
    ]);
  }
  if (speculation && !drafters.length) rows.push(["Drafter", speculation.default_drafter ?? "none: plain decoding"]);
  if (speculation)
    rows.push([
      "Exact",
      speculation.bitwise ? "to the bit, whatever else is in the batch" : "up to rounding of near-ties",
    ]);
  return rows;
}

/** Describes the model in one line. */
export function cardLine(model) {
  const meta = model.meta ?? {};
  const parts = [model.id];
  if (meta.n_params) parts.push(`${inWords(meta.n_params)} parameters`);
  if (meta.bits_per_weight) parts.push(`${meta.bits_per_weight.toFixed(1)} bits`);
  if (model.max_model_len) parts.push(`${model.max_model_len.toLocaleString("en")} tokens of context`);
  if (meta.device) parts.push(`on ${meta.device_name}`);
  return parts.join(" · ");
}

/** Says how the server is, from what /ready answered. Null: it is ready. */
export function stateInWords(status, body) {
  if (status === 200) return null;
  if (status === 0) return "The server does not answer. This page tries again every few seconds.";
  const doing = [body?.doing, Number.isFinite(body?.percent) && `${body.percent} %`].filter(Boolean).join(", ");
  const said = {
    starting: `The model is loading${doing && `: ${doing}`}. The page goes on by itself.`,
    draining: "The server is shutting down: it finishes running answers and takes no new ones.",
    dead: "The engine stopped after an error. Its log says why; restart the server.",
  };
  return said[body?.status] ?? `The server is not ready (${status}).`;
}

/** Turns a refusal into advice. */
export function problemInWords(error) {
  const advice = {
    401: "Enter an API key.",
    429: "The server is busy: try again in a moment.",
    404: "Reload the page.",
  };
  const said = error.message
    .replace(/^[a-z]+(?=[ ,])/, (word) => word[0].toUpperCase() + word.slice(1))
    .replace(/[.]?$/, ".");
  return advice[error.status] ? `${said} ${advice[error.status]}` : said;
}

/** Describes an answer that has ended, as short pieces. `message` is an entry of the history. */
export function summaryOf({ stats, tokens, seconds, speed }) {
  const pieces = [plural(tokens, "token")];
  if (speed) pieces.push(`${speed.toFixed(0)} tokens/s`);
  if (seconds) pieces.push(`${seconds.toFixed(1)} s`);
  if (stats?.tokens_per_step) pieces.push(`${stats.tokens_per_step.toFixed(2)} tokens per step`);
  if (stats?.num_draft_tokens) {
    const share = (100 * stats.num_accepted_tokens) / stats.num_draft_tokens;
    pieces.push(`${share.toFixed(0)} % of ${plural(stats.num_draft_tokens, "drafted token")} accepted`);
  }
  if (stats?.speedup) pieces.push(`${range(stats.speedup)} as fast as plain`);
  return pieces;
}

/** Says how an answer ended where that is not the usual end. */
export function endInWords({ finish, asked, stats, count }) {
  if (finish === "length")
    return asked?.max_tokens && count >= asked.max_tokens
      ? `Cut at max tokens (${asked.max_tokens}).`
      : "Cut: the context is full.";
  if (finish === "stopped") return "Stopped.";
  return stats?.lossless === false
    ? `The rule ${stats.rule} is lossy: the model alone may have written another text.`
    : "";
}

/** Describes one token, a fact a line. */
export function describe(token) {
  const by = token.origin === "accepted" && token.drafter ? ` from ${token.drafter}` : "";
  const lines = [`${JSON.stringify(token.text)} ${token.origin ?? ""}${by}`.trim()];
  if (token.probability !== undefined) lines.push(`probability ${(100 * token.probability).toFixed(1)} %`);
  if (token.round) lines.push(`step ${token.round}`);
  if (token.since) lines.push(`${token.since.toFixed(0)} ms after the request`);
  return lines.join("\n");
}

/** Reads the measured speed-up: the number with a note, or a note alone. `raced` stands in while there is none. */
export function speedupInWords(speculation, raced = null) {
  if (speculation?.speedup) {
    const { ratio, low, high } = speculation.speedup;
    const interval = `95 % interval ${low.toFixed(2)} to ${high.toFixed(2)}`;
    return {
      number: `${ratio.toFixed(2)} ×`,
      note: `as fast as plain decoding, measured now: ${drawn(speculation)} of the steps run plain (${interval}).`,
    };
  }
  if (raced) return { number: `${raced.toFixed(2)} ×`, note: "as fast as plain decoding in your last race." };
  if (speculation && !speculation.default_drafter)
    return { number: "", note: "This server has no drafter: it decodes plainly." };
  return { number: "", note: `Live speed-up over plain decoding: ${speculation?.speedup_note ?? "measuring"}.` };
}

const drawn = ({ drawn_share: share }) => `${(100 * (share ?? 0)).toFixed(1)} %`;

/** Describes what was measured with one drafter, batch size and kind of requests, a line. */
export function groupInWords({ drafter, batch, kind, speedup, runs, tokens_per_step: tokens, acceptance, off }) {
  const pieces = [`${drafter}, ${batch} at once, ${kind}: ${speedup ? range(speedup) : `measuring (${plural(runs, "run")} so far)`}`];
  if (tokens) pieces.push(`${tokens.toFixed(2)} tokens per step`);
  if (acceptance) pieces.push(`${(100 * acceptance).toFixed(0)} % accepted`);
  if (off) pieces.push(off);
  return pieces.join(" · ");
}

/** A canary: its phase, what was measured, and a line for each arm. */
export function canaryInWords(canary) {
  const { drafter, control, phase, reason, share, pairs, ratio_low: low, ratio_high: high } = canary;
  const speed = pairs ? `${low.toFixed(2)} to ${high.toFixed(2)} times as fast, over ${plural(pairs, "pair")} of requests` : "";
  const note = [`${drafter} instead of ${control}, for ${(100 * share).toFixed(1)} % of the requests`, speed, reason];
  const arms = Object.entries(canary.arms).map(([arm, sums]) => {
    const pieces = [`${arm} (${arm === "canary" ? drafter : control}): ${plural(sums.requests, "request")}`];
    if (sums.tokens_per_second) pieces.push(`${sums.tokens_per_second.toFixed(0)} tokens/s`);
    if (sums.drafted) pieces.push(`${((100 * sums.accepted) / sums.drafted).toFixed(0)} % accepted`);
    return pieces.join(" · ");
  });
  return { phase, note: note.filter(Boolean).join(" · "), arms };
}

/** A measured speed-up with its interval. */
export const range = ({ ratio, low, high }) => `${ratio.toFixed(2)} × (${low.toFixed(2)} to ${high.toFixed(2)})`;
