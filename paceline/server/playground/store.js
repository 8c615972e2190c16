// Conversations in this browser's localStorage, one entry each, so that two tabs do not overwrite each other's.
//
// The history is bounded: the oldest conversations go first. What cannot be read is left out of the list, and is the
// first to go when space is needed. A browser that stores nothing still has conversations, until the page is closed.

import { readConversation } from "./tree.js";

export const PREFIX = "paceline.chat.";
const MAX_CONVERSATIONS = 50;
const MAX_CHARACTERS = 4_000_000; // of all entries together; browsers allow about 5 million

export class Store {
  #storage;
  #memory = new Map(); // id → text, where the browser stores nothing
  constructor(storage) {
    this.#storage = storage;
  }

  /** Lists the conversations, the newest first. */
  list() {
    return this.#entries()
      .map(({ text }) => readConversation(text))
      .filter((conversation) => conversation !== null)
      .sort((one, other) => other.updated - one.updated);
  }

  /** Stores a conversation. Returns false if the browser did not: it is then kept until the page is closed. */
  save(conversation) {
    const text = JSON.stringify(conversation);
    if (this.#storage === null) return (this.#memory.set(conversation.id, text), false);
    this.#makeRoom(conversation.id, text.length);
    for (;;) {
      try {
        this.#storage.setItem(PREFIX + conversation.id, text);
        this.#memory.delete(conversation.id);
        return true;
      } catch {
        if (!this.#dropOldest(conversation.id)) break;
      }
    }
    this.#memory.set(conversation.id, text);
    return false;
  }

  remove(id) {
    this.#memory.delete(id);
    this.#try(() => this.#storage.removeItem(PREFIX + id));
  }

  #makeRoom(id, characters) {
    const others = this.#entries().filter((entry) => entry.id !== id);
    let total = others.reduce((sum, entry) => sum + entry.text.length, characters);
    for (let left = others.length; left >= MAX_CONVERSATIONS || (left && total > MAX_CHARACTERS); left--) {
      total -= this.#dropOldest(id);
    }
  }

  /** Removes what is oldest beside `id`, and returns its length. */
  #dropOldest(id) {
    const age = (entry) => readConversation(entry.text)?.updated ?? 0;
    const others = this.#entries().filter((entry) => entry.id !== id);
    if (!others.length) return 0;
    const oldest = others.reduce((one, other) => (age(other) < age(one) ? other : one));
    this.remove(oldest.id);
    return oldest.text.length;
  }

  #entries() {
    const entries = new Map(this.#memory);
    this.#try(() => {
      for (let i = 0; i < this.#storage.length; i++) {
        const key = this.#storage.key(i);
        if (key.startsWith(PREFIX)) entries.set(key.slice(PREFIX.length), this.#storage.getItem(key));
      }
    });
    return [...entries].map(([id, text]) => ({ id, text }));
  }

  #try(work) {
    try {
      work();
    } catch {
      // the browser stores nothing for this page
    }
  }
}
