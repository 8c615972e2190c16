// Calls of the server's public API: JSON, and streams of server-sent events. The key stays in this tab's session.

const KEY = "paceline.key";

export const keyOf = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** A refusal of the server, in its own words. `status` 0: there was no answer at all. */
export class Refusal extends Error {
  constructor(message, status, body = null) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

export async function call(path, { signal, body } = {}) {
  const key = keyOf();
  const headers = {
    ...(key && { authorization: `Bearer ${key}` }),
    ...(body && { "content-type": "application/json" }),
  };
  const asked = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  const response = await fetch(path, asked).catch((error) => {
    throw error.name === "AbortError" ? error : new Refusal("the server cannot be reached", 0);
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refusal(told?.error?.message ?? `${response.status} ${response.statusText}`, response.status, told);
}

export const get = async (path) => (await call(path)).json();

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
export async function* chunksOf(path, body, signal) {
  const response = await call(path, { signal, body });
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let complete = false;
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    for (const data of parser.push(read.value)) {
      const chunk = data === "[DONE]" ? null : JSON.parse(data);
      if (chunk?.error) throw new Refusal(chunk.error.message, 500);
      if (chunk) yield chunk;
      else complete = true;
    }
  }
  if (!complete) throw new Refusal("the answer broke off: the connection to the server was lost", 0);
}
