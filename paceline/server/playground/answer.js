// Requests and answers as data: what is asked, and what the chunks of an answer say of its tokens. Needs no page.

/** Makes the body of a request from the controls, as texts. An empty control is left to the server. */
export function requestOf(messages, controls, { model, plain = false } = {}) {
  const number = (name) => (controls[name] === "" || controls[name] == null ? {} : { [name]: Number(controls[name]) });
  const stops = (controls["stop-texts"] ?? "").split("\n").filter((line) => line !== "");
  const system = (controls.system ?? "").trim();
  return {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    ...number("temperature"),
    ...number("top_p"),
    ...number("seed"),
    ...number("max_tokens"),
    ...(stops.length ? { stop: stops } : {}),
    ...(controls.logprobs ? { logprobs: true } : {}),
    speculation: plain || controls.drafter === "off" ? { enabled: false } : speculationOf(controls, number),
    paceline: { events: true },
  };
}

function speculationOf(controls, number) {
  return {
    enabled: true,
    rule: controls.rule,
    ...(controls.drafter && { drafter: controls.drafter }),
    ...number("max_draft"),
  };
}

/** Makes the request that goes on after `prompt`, token ids: a completion with the fields of a chat. */
export function continuationOf(chat, prompt) {
  const { messages, logprobs, ...fields } = chat;
  return { ...fields, prompt, ...(logprobs ? { logprobs: 0 } : {}) };
}

/** Lists the tokens of a chunk: text, origin, drafter, round, time of arrival and probability. */
export function tokensOf(chunk, at) {
  const choice = chunk.choices?.[0];
  const told = chunk.paceline;
  if (!told) return textOf(choice) ? [{ text: textOf(choice), origin: null, at }] : [];
  const scores = choice?.logprobs?.token_logprobs ?? choice?.logprobs?.content?.map((score) => score.logprob) ?? [];
  return told.token_texts.map((text, i) => ({
    text,
    origin: told.origins[i],
    drafter: told.drafter,
    round: told.round,
    at,
    ...(scores[i] != null && { probability: Math.exp(scores[i]) }),
  }));
}

const textOf = (choice) => choice?.delta?.content ?? choice?.text ?? "";

/** An answer in the making. `began` is the time of the request, in milliseconds. */
export class Answer {
  text = "";
  tokens = [];
  stats = null;
  usage = null;
  finish = null; // stop, length, or stopped: by the user
  constructor(began = 0) {
    this.began = began;
  }
  add(chunk, at) {
    const tokens = tokensOf(chunk, at);
    for (const token of tokens) token.since = at - this.began;
    this.tokens.push(...tokens);
    this.text += textOf(chunk.choices?.[0]);
    this.stats = chunk.speculation ?? this.stats;
    this.usage = chunk.usage ?? this.usage;
    this.finish = chunk.choices?.[0]?.finish_reason ?? this.finish;
    return tokens;
  }
  get count() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }
  /** Tokens a second after the first arrival. */
  get speed() {
    const later = this.tokens.filter((token) => token.at > this.tokens[0].at);
    return later.length ? (1000 * later.length) / (later.at(-1).at - this.tokens[0].at) : 0;
  }
  /** Steps of the engine so far. */
  get steps() {
    return roundsOf(this.tokens).length;
  }
}

/** Finds the first character in which two texts differ. -1: they are identical. */
export function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i] !== other[i]) return i;
  return -1;
}

/** Groups tokens by step: when it began and ended, in milliseconds after the request, and the origins of its tokens. */
export function roundsOf(tokens) {
  const rounds = [];
  for (const token of tokens) {
    const last = rounds.at(-1);
    if (last && last.round === token.round && last.to === token.since) last.origins.push(token.origin);
    else rounds.push({ round: token.round, from: last?.to ?? 0, to: token.since, origins: [token.origin] });
  }
  return rounds;
}

const CODES = { accepted: "a", bonus: "b", plain: "p" };
const ORIGINS = { a: "accepted", b: "bonus", p: "plain" };

/** Packs tokens for the history: characters, origin, step, milliseconds, probability in thousandths. */
export function packTokens(tokens) {
  return tokens.map((token) => [
    token.text.length,
    CODES[token.origin] ?? "",
    token.round ?? 0,
    Math.round(token.since ?? 0),
    token.probability === undefined ? -1 : Math.round(1000 * token.probability),
  ]);
}

/** Unpacks tokens of the history. Returns none if they do not fit the text. */
export function unpackTokens(packed, text, drafter) {
  let at = 0;
  const tokens = [];
  for (const [length, code, round, since, share] of packed ?? []) {
    const known = share >= 0 ? { probability: share / 1000 } : {};
    tokens.push({ text: text.slice(at, at + length), origin: ORIGINS[code] ?? null, drafter, round, since, ...known });
    at += length;
  }
  return Number.isInteger(at) ? tokens : [];
}
