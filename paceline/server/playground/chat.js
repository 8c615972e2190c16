// The chat: a conversation in view, questions and answers, and their branches.

import { Answer, continuationOf, packTokens, requestOf, unpackTokens } from "./answer.js";
import { call, chunksOf } from "./api.js";
import { controls } from "./controls.js";
import { $, make, onceAFrame, say, toast } from "./dom.js";
import { answerOf, emptyAnswer, questionOf } from "./message.js";
import { View } from "./render.js";
import { isRunning, run, stop } from "./running.js";
import { Store } from "./store.js";
import { remember } from "./tips.js";
import { addMessage, branchesOf, chooseBranch, newConversation, pathOf, removeMessage } from "./tree.js";
import { endInWords, summaryOf } from "./words.js";

export const store = new Store(browserStorage());
const state = { conversation: newConversation(Date.now()), model: () => undefined, onSave: () => {} };

/** Finds the browser's storage. Null where it keeps nothing for this page. */
function browserStorage() {
  try {
    return localStorage;
  } catch {
    return null;
  }
}

export const current = () => state.conversation;

/** Brings a conversation into view. An answer that is still written stops, and is kept as far as it came. */
export function open(conversation) {
  stop();
  state.conversation = conversation;
  render();
  if (matchMedia("(min-width: 45rem)").matches) $("prompt").focus(); // on a phone it would bring up the keyboard
}

export const openNew = () => open(newConversation(Date.now()));

export function save(conversation) {
  conversation.updated = Date.now();
  if (!store.save(conversation)) toast("The browser does not store the history: it is lost when the page is closed.");
  state.onSave();
}

/** Shows the conversation anew: its end, or with `stay` the part that is read now. */
export function render({ stay = false } = {}) {
  const [box, follow] = [$("scroll"), !stay || isAtEnd()];
  const at = box.scrollTop;
  const path = pathOf(state.conversation);
  $("hero").hidden = path.length > 0;
  $("log").replaceChildren(...path.map(elementOf));
  box.scrollTop = !follow ? at : path.length ? box.scrollHeight : 0;
}

function elementOf(node) {
  const branches = branchesOf(state.conversation, node);
  const at = branches.findIndex((each) => each.id === node.id);
  const turn = (by) => {
    if (isRunning()) return;
    chooseBranch(state.conversation, branches[at + by].id);
    save(state.conversation);
    render();
  };
  const branch = { at, of: branches.length, turn };
  if (node.role === "user") return questionOf(node, branch, { onEdit: (text) => ask(text, node.parent) });
  const again = () => answerTo(state.conversation, node.parent);
  return answerOf(node, branch, {
    formatted: controls().formatted,
    onAgain: again,
    onContinue: () => goOn(state.conversation, node),
  });
}

/** Asks `text` after the message `parent`: by default at the end of the branch in view. */
export async function ask(text, parent = state.conversation.leaf) {
  if (!text || isRunning()) return;
  const conversation = state.conversation;
  const before = conversation.leaf;
  const question = addMessage(conversation, parent, { role: "user", content: text });
  render();
  await answerTo(conversation, question.id);
  if (conversation.leaf !== question.id) return;
  removeMessage(conversation, question.id); // what got no answer is no part of the conversation: it can be asked again
  conversation.leaf = before;
  if (conversation !== state.conversation) return;
  $("prompt").value ||= text;
  grow();
  render();
}

/** Writes an answer to a question, beside those that it has. */
function answerTo(conversation, question) {
  return run(async (signal) => {
    const messages = pathOf(conversation, question).map(({ role, content }) => ({ role, content }));
    const body = requestOf(messages, controls(), { model: state.model() });
    conversation.leaf = question;
    render();
    const answer = new Answer(performance.now());
    await writeInto(newBox(), answer, "/v1/chat/completions", body, signal, () => {
      if (answer.tokens.length) addMessage(conversation, question, recordOf(answer, body));
      else chooseBranch(conversation, question); // another answer, if there is one
      finish(conversation);
    });
  });
}

/** Writes more of an answer that was cut. */
function goOn(conversation, node) {
  return run(async (signal) => {
    const messages = pathOf(conversation, node.parent).map(({ role, content }) => ({ role, content }));
    const chat = requestOf(messages, controls(), { model: state.model() });
    const ids = async (asked) => (await (await call("/tokenize", { signal, body: asked })).json()).tokens;
    const prompt = [
      ...(await ids({ messages: chat.messages })),
      ...(await ids({ prompt: node.content, add_special_tokens: false })),
    ];
    const answer = new Answer(performance.now());
    const box = document.querySelector(`.message[data-id="${node.id}"] .answer`);
    box.replaceChildren();
    const before = { text: node.content, tokens: unpackTokens(node.tokens, node.content, node.stats?.drafter) };
    const body = continuationOf(chat, prompt);
    await writeInto(
      box,
      answer,
      "/v1/completions",
      body,
      signal,
      () => (extend(node, before, answer, chat), finish(conversation)),
      before,
    );
  });
}

function extend(node, before, answer, body) {
  if (!answer.tokens.length) return;
  const last = before.tokens.at(-1);
  for (const token of answer.tokens) {
    token.round += last?.round ?? 0;
    token.since += last?.since ?? 0;
  }
  const more = recordOf(answer, body);
  Object.assign(node, more, {
    content: before.text + answer.text,
    tokens: packTokens([...before.tokens, ...answer.tokens]),
    count: (node.count ?? 0) + more.count,
  });
}

function newBox() {
  const box = emptyAnswer();
  const article = make("article", { className: "message assistant" }, box);
  $("log").append(article);
  $("scroll").scrollTop = $("scroll").scrollHeight;
  return box;
}

/** Streams an answer into `box`. `onEnd` runs also if it is stopped or fails after its first tokens. */
async function writeInto(box, answer, path, body, signal, onEnd, before = { text: "", tokens: [] }) {
  const view = remember(new View(box, { formatted: controls().formatted }));
  const show = onceAFrame(() => {
    if (!box.isConnected) return;
    const follow = isAtEnd();
    view.show(before.text + answer.text, [...before.tokens, ...answer.tokens]);
    say($("meter"), meterOf(answer));
    if (follow) $("scroll").scrollTop = $("scroll").scrollHeight;
  });
  box.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of chunksOf(path, body, signal)) {
      if (answer.add(chunk, performance.now()).length) show();
    }
  } catch (error) {
    answer.finish = "stopped";
    if (error.name !== "AbortError") throw error;
  } finally {
    say($("meter"), "");
    onEnd();
  }
}

function meterOf(answer) {
  const [tokens, speed] = [answer.tokens.length, answer.speed.toFixed(0)];
  return `${tokens} tokens · ${speed} tokens/s · ${(tokens / answer.steps).toFixed(2)} tokens per step`;
}

/** Makes the history's entry of an answer: what was asked, what came, and how. */
function recordOf(answer, body) {
  const { messages, stream, stream_options, paceline, logprobs, model, ...asked } = body;
  const { num_accepted_tokens_per_pos, ...stats } = answer.stats ?? {};
  const system = messages[0]?.role === "system" ? { system: messages[0].content } : {};
  return {
    role: "assistant",
    content: answer.text,
    model,
    asked: { ...asked, ...system },
    finish: answer.finish,
    stats: answer.stats ? stats : null,
    count: answer.count,
    speed: answer.speed,
    seconds: (answer.tokens.at(-1)?.since ?? 0) / 1000,
    tokens: packTokens(answer.tokens),
  };
}

/** Stores a conversation whose last message is an answer, and shows it. */
function finish(conversation) {
  const last = pathOf(conversation).at(-1);
  if (last?.role === "assistant") save(conversation);
  if (conversation !== state.conversation) return;
  render({ stay: true });
  if (last?.role === "assistant")
    say($("said"), `${last.content}\n${endInWords(last)} ${summaryOf({ ...last, tokens: last.count }).join(", ")}`);
}

/** True while the end of the log is in view: it then follows the text. */
function isAtEnd() {
  const box = $("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 120;
}

export function startChat({ model, onSave }) {
  Object.assign(state, { model, onSave });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (!text || isRunning()) return;
    $("prompt").value = "";
    grow();
    ask(text);
  });
  $("prompt").addEventListener("input", grow);
  const [latest] = store.list();
  if (latest) state.conversation = latest;
  render();
}

/** Makes the box as high as its text, up to a limit of the style. */
function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}
