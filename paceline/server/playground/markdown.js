// Markdown as data: blocks of a text, and where each of their characters stood in it. Needs no page.
//
//   # heading    - list    1. list    > quote    ``` code    | table |    ---    paragraph
//
// Blocks are {type, start, …}; `start` is where the block begins in the text. Text inside of a block is a list of
// lines {text, at}: text[0] stood at `at`, and the rest of the line follows it. `inline.js` reads the marks inside of
// lines. HTML is text like any other. Time is linear in the text; nesting ends at MAX_DEPTH.

const MAX_DEPTH = 8; // quotes and lists inside of each other
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|(?:\*[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE_RULE = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;

/** Lists the blocks of a text from `from` on, which must be the start of a block. */
export function blocksOf(text, from = 0) {
  return readBlocks(linesOf(text, from), 0);
}

function linesOf(text, from) {
  const lines = [];
  for (let at = from; at <= text.length;) {
    const end = text.indexOf("\n", at) < 0 ? text.length : text.indexOf("\n", at);
    lines.push({ text: text.slice(at, end).replace(/\r$/, ""), at });
    at = end + 1;
  }
  return lines;
}

const isBlank = (line) => !/\S/.test(line.text);
const cut = (line, count) => ({ text: line.text.slice(count), at: line.at + count });
const indentOf = (line) => line.text.match(/^ */)[0].length;

function readBlocks(lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) {
      i++;
      continue;
    }
    const [block, next] = readBlock(lines, i, depth);
    blocks.push({ start: lines[i].at, ...block });
    i = next;
  }
  return blocks;
}

/** Reads the block that begins at line i: [block, line after it]. */
function readBlock(lines, i, depth) {
  const { text } = lines[i];
  if (isFence(text)) return readFence(lines, i);
  if (HEADING.test(text)) return [readHeading(lines[i]), i + 1];
  if (RULE.test(text)) return [{ type: "rule" }, i + 1];
  if (QUOTE.test(text) && depth < MAX_DEPTH) return readQuote(lines, i, depth);
  if (ITEM.test(text) && depth < MAX_DEPTH) return readList(lines, i, depth);
  if (isTable(lines, i)) return readTable(lines, i);
  return readParagraph(lines, i);
}

function isFence(text) {
  const mark = text.match(FENCE);
  return Boolean(mark) && !text.slice(mark[0].length).includes("`");
}

function readFence(lines, i) {
  const [whole, mark] = lines[i].text.match(FENCE);
  const [language] = lines[i].text.slice(whole.length).trim().split(/\s/);
  const indent = indentOf(lines[i]);
  const code = [];
  for (i++; i < lines.length; i++) {
    const ending = lines[i].text.match(/^ {0,3}(`{3,}|~{3,})[ \t]*$/);
    if (ending && ending[1][0] === mark[0] && ending[1].length >= mark.length)
      return [{ type: "code", language, lines: code }, i + 1];
    code.push(cut(lines[i], Math.min(indent, indentOf(lines[i]))));
  }
  return [{ type: "code", language, lines: code, open: true }, i];
}

function readHeading(line) {
  const [mark, hashes] = line.text.match(HEADING);
  const { text, at } = cut(line, mark.length);
  return { type: "heading", level: hashes.length, lines: [{ text: withoutHashes(text.trimEnd()), at }] };
}

function withoutHashes(text) {
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

function readQuote(lines, i, depth) {
  const inside = [];
  for (; i < lines.length && !isBlank(lines[i]); i++) {
    const mark = lines[i].text.match(QUOTE);
    if (!mark && interrupts(lines, i)) break;
    inside.push(mark ? cut(lines[i], mark[0].length) : lines[i]);
  }
  return [{ type: "quote", blocks: readBlocks(inside, depth + 1) }, i];
}

function readList(lines, i, depth) {
  const ordered = /\d/.test(lines[i].text.match(ITEM)[2]);
  const list = { type: "list", ordered, first: ordered ? parseInt(lines[i].text, 10) : 1, items: [] };
  while (i < lines.length && isItem(lines[i], ordered)) {
    const [item, next] = readItem(lines, i);
    list.items.push(readBlocks(item, depth + 1));
    i = next;
    let after = i;
    while (after < lines.length && isBlank(lines[after])) after++;
    if (isItem(lines[after], ordered)) i = after;
  }
  return [list, i];
}

function isItem(line, ordered) {
  const mark = line && !RULE.test(line.text) && line.text.match(ITEM);
  return Boolean(mark) && /\d/.test(mark[2]) === ordered;
}

/** Collects the lines of an item without mark and indent: indented ones, and the rest of a paragraph. */
function readItem(lines, i) {
  const width = lines[i].text.match(ITEM)[0].length;
  const inside = [cut(lines[i], width)];
  let gap = []; // blank lines: part of the item if an indented line follows
  for (i++; i < lines.length; i++) {
    if (isBlank(lines[i])) {
      gap.push(lines[i]);
      continue;
    }
    const indent = indentOf(lines[i]);
    if (indent < 2 && (gap.length || interrupts(lines, i))) break;
    inside.push(...gap, cut(lines[i], Math.min(indent, width)));
    gap = [];
  }
  return [inside, i - gap.length];
}

function isTable(lines, i) {
  if (!lines[i].text.includes("|") || i + 1 >= lines.length || !TABLE_RULE.test(lines[i + 1].text.trim())) return false;
  return cellsOf(lines[i]).length === cellsOf(lines[i + 1]).length;
}

function readTable(lines, i) {
  const head = cellsOf(lines[i]);
  const aligns = cellsOf(lines[i + 1]).map(
    ({ text }) => `${text[0] === ":" ? "l" : ""}${text.at(-1) === ":" ? "r" : ""}`,
  );
  const rows = [];
  for (i += 2; i < lines.length && !isBlank(lines[i]) && lines[i].text.includes("|"); i++) {
    const cells = cellsOf(lines[i]);
    rows.push(head.map((_, column) => cells[column] ?? { text: "", at: lines[i].at }));
  }
  return [
    { type: "table", aligns: aligns.map((align) => ({ r: "right", lr: "center" })[align] ?? "left"), head, rows },
    i,
  ];
}

/** Divides a line at its bars, without the outer ones and without the spaces around a cell. */
function cellsOf(line) {
  const body = line.text
    .trimEnd()
    .replace(/^([ \t]*)\|/, "$1 ")
    .replace(/([^\\])\|$/, "$1");
  const cells = [];
  for (let at = 0; at <= body.length;) {
    let end = at;
    while (end < body.length && !(body[end] === "|" && body[end - 1] !== "\\")) end++;
    const text = body.slice(at, end);
    cells.push({ text: text.trim(), at: line.at + at + (text.length - text.trimStart().length) });
    at = end + 1;
  }
  return cells;
}

function readParagraph(lines, i) {
  const inside = [];
  do inside.push(lines[i++]);
  while (i < lines.length && !isBlank(lines[i]) && !interrupts(lines, i));
  return [{ type: "paragraph", lines: inside }, i];
}

/** True where a line ends the paragraph before it. A number does so only if a list begins with it. */
function interrupts(lines, i) {
  const { text } = lines[i];
  if (isFence(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text)) return true;
  return /^ {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]+\S/.test(text) || isTable(lines, i);
}
