// A conversation as a tree of messages: an edited question or a second answer is a branch beside the first. Needs no
// page.
//
//   {version, id, title, named, created, updated, leaf, nodes: [{id, parent, role, content, …}]}
//
// `leaf` is the last message of the branch in view; `parent` of a first message is null. A parent stands before its
// children in `nodes`.

export const VERSION = 1;
const TITLE_CHARACTERS = 60;

export function newConversation(now) {
  const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { version: VERSION, id, title: "New chat", named: false, created: now, updated: now, leaf: null, nodes: [] };
}

const find = (conversation, id) => conversation.nodes.find((node) => node.id === id);

/** Lists the messages from the first one to `leaf`. */
export function pathOf(conversation, leaf = conversation.leaf) {
  const path = [];
  for (let node = find(conversation, leaf); node; node = find(conversation, node.parent)) path.unshift(node);
  return path;
}

/** Adds a message under `parent` and brings it into view. */
export function addMessage(conversation, parent, message) {
  const id = 1 + Math.max(0, ...conversation.nodes.map((node) => node.id));
  const node = { ...message, id, parent };
  conversation.nodes.push(node);
  conversation.leaf = id;
  if (!conversation.named && message.role === "user" && parent === null) conversation.title = titleOf(message.content);
  return node;
}

export function titleOf(text) {
  const line = text.split("\n").find((each) => each.trim()) ?? "";
  const words = line.replace(/[`*#>]/g, "").trim();
  const short = words.slice(0, TITLE_CHARACTERS);
  return short.length < words.length ? `${short.trimEnd()}…` : short || "New chat";
}

/** Removes a message that has no children. */
export function removeMessage(conversation, id) {
  const node = find(conversation, id);
  conversation.nodes = conversation.nodes.filter((each) => each.id !== id);
  const others = conversation.nodes.filter((each) => each.parent === node.parent);
  if (conversation.leaf !== id) return;
  if (others.length) chooseBranch(conversation, others.at(-1).id);
  else conversation.leaf = node.parent;
}

/** Lists the branches that a message is one of, itself included. */
export const branchesOf = (conversation, node) => conversation.nodes.filter((each) => each.parent === node.parent);

/** Brings a message into view, and below it the newest branch. */
export function chooseBranch(conversation, id) {
  conversation.leaf = id;
  for (let child; (child = conversation.nodes.findLast((node) => node.parent === conversation.leaf));)
    conversation.leaf = child.id;
}

/** Reads a stored conversation. Null if it is none: another version, or broken. */
export function readConversation(text) {
  try {
    const read = JSON.parse(text);
    const sound = read.version === VERSION && typeof read.id === "string" && typeof read.title === "string";
    if (!sound || !Number.isFinite(read.updated) || !areNodes(read.nodes)) return null;
    if (read.leaf !== null && !find(read, read.leaf)) read.leaf = read.nodes.at(-1)?.id ?? null;
    return read;
  } catch {
    return null;
  }
}

// Fields that a message may have, and their types.
const FIELDS = {
  model: "string",
  finish: "string",
  count: "number",
  speed: "number",
  seconds: "number",
  asked: "object",
  stats: "object",
};
const STATS = {
  tokens_per_step: "number",
  num_draft_tokens: "number",
  num_accepted_tokens: "number",
  off_reason: "string",
  speedup: "object",
  speedup_note: "string",
};

const fits = (record, types) =>
  Object.entries(types).every(([name, type]) => record?.[name] == null || typeof record[name] === type);

function areNodes(nodes) {
  const known = new Set([null]);
  return (
    Array.isArray(nodes) &&
    nodes.every((node) => {
      const sound = Number.isInteger(node.id) && !known.has(node.id) && known.has(node.parent);
      known.add(node.id);
      return sound && isMessage(node);
    })
  );
}

function isMessage({ role, content, tokens = [], ...node }) {
  if (!["user", "assistant"].includes(role) || typeof content !== "string") return false;
  const speedup = node.stats?.speedup;
  if (speedup && !["ratio", "low", "high"].every((name) => typeof speedup[name] === "number")) return false;
  return fits(node, FIELDS) && fits(node.stats, STATS) && Array.isArray(tokens) && tokens.every(Array.isArray);
}

/** Writes the branch in view as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const node of pathOf(conversation)) {
    const title = node.role === "user" ? "You" : (node.model ?? "Model");
    parts.push(`## ${title}`, node.content.trim());
    if (node.finish === "length") parts.push("*(cut at max tokens)*");
  }
  return `${parts.join("\n\n")}\n`;
}

/** Makes a file name of a title. */
export const fileName = (title) =>
  title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 40) || "chat";
