// Markdown on the page: elements from blocks, each token in a span of its own that says where it came from.
//
// While an answer grows, only its last two blocks are made anew: a block before them no longer changes. Links go to web
// pages and mail only, in a new tab that knows nothing of this one. Pictures become links: nothing is loaded.

import { copy, button, make } from "./dom.js";
import { inlinesOf } from "./inline.js";
import { blocksOf } from "./markdown.js";

/** An answer in `box`. `show` may be called as often as the text grows. */
export class View {
  #blocks = []; // {start, node} of each block on the page
  #ends = []; // where each token ends in the text
  #shown = 0; // tokens on the page, where the text is not formatted
  tokens = [];

  constructor(box, { formatted = true } = {}) {
    this.box = box;
    this.formatted = formatted;
    box.classList.toggle("raw", !formatted);
  }

  show(text, tokens) {
    this.tokens = tokens;
    for (let i = this.#ends.length; i < tokens.length; i++)
      this.#ends.push((this.#ends.at(-1) ?? 0) + tokens[i].text.length);
    if (this.formatted) this.#format(text);
    else this.#append(text);
  }

  /** Adds text after the last token: half a character, or a text without tokens. */
  end(text) {
    if (!this.formatted) this.box.append(text.slice(this.#ends.at(-1) ?? 0));
  }

  #append(text) {
    for (; this.#shown < this.tokens.length; this.#shown++) {
      const start = this.#ends[this.#shown] - this.tokens[this.#shown].text.length;
      if (start <= text.length) this.box.append(this.#span(this.#shown, text.slice(start, this.#ends[this.#shown])));
    }
  }

  #format(text) {
    const kept = Math.max(0, this.#blocks.length - 2);
    const from = this.#blocks[kept]?.start ?? 0;
    for (const block of this.#blocks.splice(kept)) block.node.remove();
    for (const block of blocksOf(text, from)) {
      const node = this.#block(block);
      this.#blocks.push({ start: block.start, node });
      this.box.append(node);
    }
  }

  #block(block) {
    const inside = (blocks) => blocks.map((each) => this.#block(each));
    switch (block.type) {
      case "heading": // the page has a heading of its own
        return make(`h${Math.min(block.level + 2, 6)}`, {}, ...this.#inlines(block.lines));
      case "rule":
        return make("hr");
      case "quote":
        return make("blockquote", {}, ...inside(block.blocks));
      case "list":
        return make(
          block.ordered ? "ol" : "ul",
          block.ordered ? { start: block.first } : {},
          ...block.items.map((item) => this.#item(item)),
        );
      case "code":
        return this.#code(block);
      case "table":
        return this.#table(block);
      default:
        return make("p", {}, ...this.#inlines(block.lines));
    }
  }

  /** Makes an item. A lone paragraph stands in it without a margin. */
  #item(blocks) {
    const [first, ...others] = blocks;
    const head = first?.type === "paragraph" ? this.#inlines(first.lines) : first ? [this.#block(first)] : [];
    return make("li", {}, ...head, ...others.map((block) => this.#block(block)));
  }

  #code({ language, lines }) {
    const text = lines.map((line) => line.text).join("\n");
    const pieces = lines.flatMap((line, i) => [...(i ? ["\n"] : []), ...this.#text(line.text, line.at)]);
    const pre = make("pre", { tabIndex: 0 }, make("code", {}, ...pieces));
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const head = make(
      "div",
      { className: "code-head" },
      make("span", { textContent: language || "code" }),
      button("Copy", () => copy(text), { label: "Copy the code" }),
    );
    return make("div", { className: "code" }, head, pre);
  }

  #table({ aligns, head, rows }) {
    const row = (cells, tag) =>
      make("tr", {}, ...cells.map((cell, i) => make(tag, { className: aligns[i] }, ...this.#inlines([cell]))));
    const table = make(
      "table",
      {},
      make("thead", {}, row(head, "th")),
      make("tbody", {}, ...rows.map((cells) => row(cells, "td"))),
    );
    return make("div", { className: "scroll", tabIndex: 0 }, table);
  }

  #inlines(lines) {
    const root = make("span");
    const open = [root];
    for (const piece of inlinesOf(lines)) {
      if (piece.open) open.push(elementOf(piece.open));
      else if (piece.close) open.at(-2).append(open.pop());
      else if (piece.break) open.at(-1).append(make("br"));
      else open.at(-1).append(...this.#text(piece.text, piece.at));
    }
    while (open.length > 1) open.at(-2).append(open.pop());
    return [...root.childNodes];
  }

  /** Divides a text at the borders of tokens. It stood at `at` in the whole text. */
  #text(text, at) {
    const parts = [];
    for (let i = this.#tokenAt(at), from = 0; from < text.length; i++) {
      const to = i < this.#ends.length ? Math.min(this.#ends[i] - at, text.length) : text.length;
      if (to > from) parts.push(i < this.#ends.length ? this.#span(i, text.slice(from, to)) : text.slice(from, to));
      from = to;
    }
    return parts;
  }

  /** Finds the token of the character at `at`. */
  #tokenAt(at) {
    let [low, high] = [0, this.#ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#ends[middle] > at) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  #span(i, text) {
    const blank = this.formatted && !/\S/.test(text) ? " blank" : ""; // spaces that indent code would be all colour
    const span = make("span", { className: `t ${this.tokens[i].origin ?? ""}${blank}`, textContent: text });
    span.dataset.i = i;
    return span;
  }
}

function elementOf({ tag, href }) {
  return tag === "a" ? make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }) : make(tag);
}
