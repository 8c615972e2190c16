// One task at a time: an answer, or a race. It can be stopped.

import { $, say } from "./dom.js";
import { problemInWords } from "./words.js";

let running = null; // AbortController of the task

export const isRunning = () => running !== null;
export const stop = () => running?.abort();

/** Runs `work(signal)` unless something runs already. An error is shown in words and returned. */
export async function run(work) {
  if (running) return null;
  running = new AbortController();
  document.body.classList.add("running");
  complain(null);
  try {
    await work(running.signal);
    return null;
  } catch (error) {
    complain(error);
    return error;
  } finally {
    running = null;
    document.body.classList.remove("running");
    for (const listener of listeners) listener();
  }
}

const listeners = [];
/** Calls `listener` whenever a task has ended. */
export const whenDone = (listener) => listeners.push(listener);

/** Shows an error until the next task begins. Null: none. */
export function complain(error) {
  $("problem").hidden = !error;
  say($("problem-text"), error ? problemInWords(error) : "");
}
