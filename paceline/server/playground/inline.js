// Marks inside of lines: emphasis, code, links and breaks, by the rules of CommonMark. Needs no page.
//
// The result is a flat list in reading order: {text, at}, {open: {tag, href}}, {close: true}, {break: true}. Tags are
// strong, em, del, code and a. They are nested properly, and at most MAX_DEPTH deep. Time is linear in the text.

const MAX_DEPTH = 12;
const SAFE = /^(?:https?:\/\/|mailto:)[^\s<>]+$/i; // links that may be followed; no other is made
const BARE = /https?:\/\/[^\s<>"'`|\\^{}]{1,2000}/y;
const TARGET = /\([ \t]*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:[ \t]+"[^"\n]*")?[ \t]*\)/y;
const PLAIN = /(?:[^\\`*_~[\]!<h\n]|h(?!ttps?:\/\/))+/y; // characters that cannot begin a mark

/** Reads the lines {text, at} of a paragraph, a heading or a cell. */
export function inlinesOf(lines) {
  const reader = new Reader(lines);
  reader.read();
  return limitDepth(reader.pieces());
}

export const isSafe = (url) => SAFE.test(url);

class Reader {
  constructor(lines) {
    this.lines = lines;
    this.text = lines.map((line) => line.text).join("\n");
    this.nodes = [];
    this.runs = []; // runs of *, _ or ~ that may still open or close
    this.brackets = [];
    this.ticks = null; // length → places of runs of ticks
  }

  read() {
    for (let i = 0; i < this.text.length;) i = this.readAt(i);
    this.pairRuns(0);
  }

  /** Reads what stands at i, and returns the place after it. */
  readAt(i) {
    const plain = this.match(PLAIN, i);
    if (plain) return this.addText(i, i + plain[0].length);
    const char = this.text[i];
    if (char === "\n") return (this.nodes.push({ break: true }), i + 1);
    if (char === "\\") return this.readEscape(i);
    if (char === "`") return this.readCode(i);
    if (char === "[") return this.openBracket(i, 1);
    if (char === "!" && this.text[i + 1] === "[") return this.openBracket(i, 2);
    if (char === "]") return this.closeBracket(i);
    if (char === "<") return this.readAutolink(i);
    if (char === "h") return this.readBareLink(i);
    if ("*_~".includes(char)) return this.readRun(i);
    return this.addText(i, i + 1);
  }

  match(pattern, i) {
    pattern.lastIndex = i;
    return pattern.exec(this.text);
  }

  addText(from, to) {
    this.nodes.push({ from, to });
    return to;
  }

  readEscape(i) {
    return /[!-/:-@[-`{-~]/.test(this.text[i + 1] ?? "") ? this.addText(i + 1, i + 2) : this.addText(i, i + 1);
  }

  readCode(i) {
    const length = this.match(/`+/y, i)[0].length;
    this.ticks ??= this.findTicks();
    const places = this.ticks.get(length);
    while (places.length && places.at(-1) <= i) places.pop(); // places are in falling order
    if (!places.length) return this.addText(i, i + length);
    const end = places.at(-1);
    const padded =
      /^[ \n].*[ \n]$/s.test(this.text.slice(i + length, end)) && /\S/.test(this.text.slice(i + length, end));
    this.nodes.push({ open: { tag: "code" } });
    this.addLines(i + length + padded, end - padded);
    this.nodes.push({ close: true });
    return end + length;
  }

  findTicks() {
    const found = new Map();
    for (const run of [...this.text.matchAll(/`+/g)].reverse()) {
      if (!found.has(run[0].length)) found.set(run[0].length, []);
      found.get(run[0].length).push(run.index);
    }
    return found;
  }

  addLines(from, to) {
    for (let at = from; at < to;) {
      const end = this.text.indexOf("\n", at);
      if (end < 0 || end >= to) return this.addText(at, to);
      this.addText(at, end);
      this.addText(end, end + 1);
      at = end + 1;
    }
  }

  openBracket(i, length) {
    this.brackets.push({ node: this.nodes.length, runs: this.runs.length });
    return this.addText(i, i + length);
  }

  closeBracket(i) {
    const bracket = this.brackets.pop();
    const target = bracket && this.match(TARGET, i + 1);
    if (!target || !isSafe(target[1])) return this.addText(i, i + 1);
    this.pairRuns(bracket.runs);
    this.nodes[bracket.node] = { open: { tag: "a", href: target[1] } };
    this.nodes.push({ close: true });
    this.brackets.length = 0; // a link holds no other, and no bracket before it may close after it
    return i + 1 + target[0].length;
  }

  readAutolink(i) {
    const link = this.match(/<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy, i);
    if (!link) return this.addText(i, i + 1);
    this.addLink(link[1], i + 1, i + 1 + link[1].length);
    return i + link[0].length;
  }

  readBareLink(i) {
    const link = /\w/.test(this.text[i - 1] ?? "") ? null : this.match(BARE, i);
    if (!link) return this.addText(i, i + 1);
    const url = withoutPunctuation(link[0]);
    if (!isSafe(url)) return this.addText(i, i + 1);
    return this.addLink(url, i, i + url.length);
  }

  addLink(href, from, to) {
    this.nodes.push({ open: { tag: "a", href } });
    this.addText(from, to);
    this.nodes.push({ close: true });
    return to;
  }

  readRun(i) {
    const [run] = this.match(/\*+|_+|~+/y, i);
    const [before, after] = [this.text[i - 1] ?? " ", this.text[i + run.length] ?? " "];
    const [leftOf, rightOf] = [classOf(before), classOf(after)];
    const left = rightOf > 0 && (rightOf > 1 || leftOf < 2); // left-flanking, as CommonMark has it
    const right = leftOf > 0 && (leftOf > 1 || rightOf < 2);
    const word = run[0] === "_"; // no emphasis inside of a word_with_underscores
    const node = { from: i, to: i + run.length, char: run[0], left: run.length, opens: [], closes: [] };
    node.canOpen = left && (!word || !right || leftOf === 1) && (run[0] !== "~" || run.length === 2);
    node.canClose = right && (!word || !left || rightOf === 1) && (run[0] !== "~" || run.length === 2);
    this.nodes.push(node);
    if (node.canOpen || node.canClose) this.runs.push(node);
    return i + run.length;
  }

  /** Pairs the runs from `bottom` on, closers with the nearest opener before them, and forgets them. */
  pairRuns(bottom) {
    const open = { "*": [], _: [], "~": [] };
    for (const run of this.runs.splice(bottom)) {
      const openers = open[run.char];
      while (run.canClose && run.left && openers.length) {
        const opener = openers.at(-1);
        const count = run.char === "~" ? 2 : Math.min(opener.left, run.left, 2);
        const tag = run.char === "~" ? "del" : count === 2 ? "strong" : "em";
        opener.opens.unshift(tag);
        run.closes.push(tag);
        [opener.left, run.left] = [opener.left - count, run.left - count];
        for (const others of Object.values(open))
          while (others.length && others.at(-1).from > opener.from) others.pop();
        if (!opener.left) openers.pop();
      }
      if (run.canOpen && run.left) openers.push(run);
    }
  }

  /** Turns nodes into pieces with places in the source. */
  pieces() {
    const pieces = [];
    const place = placer(this.lines);
    const put = (from, to) => to > from && pieces.push({ text: this.text.slice(from, to), at: place(from) });
    for (const node of this.nodes) {
      if (node.char === undefined) {
        if (node.from === undefined) pieces.push(node);
        else put(node.from, node.to);
        continue;
      }
      for (const _ of node.closes) pieces.push({ close: true });
      put(node.from, node.from + node.left);
      for (const tag of node.opens) pieces.push({ open: { tag } });
    }
    return pieces;
  }
}

/** Cuts what ends a sentence rather than the address. */
function withoutPunctuation(url) {
  let end = url.length;
  while (".,:;!?*_~)]".includes(url[end - 1])) end--;
  return url.slice(0, end);
}

// 0: white space, 1: punctuation, 2: other
const classOf = (char) => (/\s/.test(char) ? 0 : /[\p{P}\p{S}]/u.test(char) ? 1 : 2);

/** Returns a function from places in the joined lines, asked in rising order, to places in the source. */
function placer(lines) {
  let [line, start] = [0, 0];
  return (offset) => {
    while (line + 1 < lines.length && offset > start + lines[line].text.length) start += lines[line++].text.length + 1;
    return lines[line].at + offset - start;
  };
}

/** Drops marks that are nested too deeply, and links inside of links; their text stays. */
function limitDepth(pieces) {
  const open = []; // for each open mark its tag, or null if it was dropped
  return pieces.filter((piece) => {
    if (piece.close) return open.pop() !== null;
    if (!piece.open) return true;
    const dropped = open.length >= MAX_DEPTH || (piece.open.tag === "a" && open.includes("a"));
    open.push(dropped ? null : piece.open.tag);
    return !dropped;
  });
}
