// One message on the page: its text, what may be done with it, and how it came about.

import { roundsOf, unpackTokens } from "./answer.js";
import { stepChart } from "./charts.js";
import { button, copy, make } from "./dom.js";
import { View } from "./render.js";
import { remember } from "./tips.js";
import { endInWords, summaryOf } from "./words.js";

/** Makes the frame of a message. `branch` is {at, of, turn}: which of how many, and a way to the next. */
function frame(node, branch, children) {
  const who = node.role === "user" ? "You" : (node.model ?? "Answer");
  const article = make("article", { className: `message ${node.role}` }, ...children);
  article.setAttribute("aria-label", who);
  article.dataset.id = node.id;
  if (branch.of > 1) article.querySelector(".actions").prepend(switchOf(branch));
  return article;
}

function switchOf({ at, of, turn }) {
  const back = button("‹", () => turn(-1), { label: "Version before" });
  const on = button("›", () => turn(1), { label: "Version after" });
  [back.disabled, on.disabled] = [at === 0, at === of - 1];
  return make("span", { className: "branch" }, back, make("span", { textContent: `${at + 1}/${of}` }), on);
}

const actionsOf = (...buttons) => make("div", { className: "actions" }, ...buttons);

/** A question. `onEdit` gets the new text. */
export function questionOf(node, branch, { onEdit }) {
  const text = make("div", { className: "bubble", textContent: node.content });
  const edit = button("Edit", () =>
    text.replaceWith(editorOf(node.content, onEdit, (editor) => editor.replaceWith(text))),
  );
  return frame(node, branch, [
    text,
    actionsOf(
      button("Copy", () => copy(node.content)),
      edit,
    ),
  ]);
}

function editorOf(content, onEdit, onCancel) {
  const field = make("textarea", { value: content, rows: Math.min(12, content.split("\n").length + 1) });
  field.setAttribute("aria-label", "Edit the message");
  const editor = make("form", { className: "editor" }, field);
  const cancel = button("Cancel", () => onCancel(editor));
  editor.append(
    make(
      "div",
      { className: "row" },
      make("button", { type: "submit", className: "primary", textContent: "Send" }),
      cancel,
    ),
  );
  const send = (event) => {
    event.preventDefault();
    if (field.value.trim()) onEdit(field.value.trim());
  };
  editor.addEventListener("submit", send);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") onCancel(editor);
  });
  requestAnimationFrame(() => field.focus());
  return editor;
}

/** An answer that ended. `onAgain` and `onContinue` ask for another one, or for more of it. */
export function answerOf(node, branch, { formatted, onAgain, onContinue }) {
  const tokens = unpackTokens(node.tokens, node.content, node.stats?.drafter);
  const box = emptyAnswer();
  const view = remember(new View(box, { formatted }));
  view.show(node.content, tokens);
  view.end(node.content);
  const foot = make("div", { className: "foot" }, factsOf(node, tokens));
  const end = endInWords(node);
  if (end)
    foot.prepend(
      make(
        "p",
        { className: "end" },
        end,
        ...(node.finish === "length" || node.finish === "stopped" ? [" ", button("Continue", onContinue)] : []),
      ),
    );
  const again = button("Regenerate", onAgain, { className: "again" });
  return frame(node, branch, [
    box,
    foot,
    actionsOf(
      button("Copy", () => copy(node.content), { label: "Copy the answer" }),
      again,
    ),
  ]);
}

/** The place of an answer. Its tokens can be walked through with the arrow keys. */
export function emptyAnswer() {
  const box = make("div", { className: "answer", tabIndex: 0 });
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Answer");
  return box;
}

/** The summary of an answer, which opens into the chart of its steps and the reason why it did not draft. */
function factsOf(node, tokens) {
  const pieces = summaryOf({ ...node, tokens: node.count ?? tokens.length });
  const summary = make("summary", { textContent: pieces.join(" · ") });
  const details = make("details", { className: "facts" }, summary);
  const rounds = roundsOf(tokens);
  details.addEventListener("toggle", () => details.open && rounds.length && drawSteps(details, rounds), { once: true });
  if (node.stats?.off_reason)
    details.append(
      make("p", { className: "quiet", textContent: `At the end it did not draft: ${node.stats.off_reason}.` }),
    );
  if (node.stats?.speedup_note)
    details.append(make("p", { className: "quiet", textContent: `Speed-up: ${node.stats.speedup_note}.` }));
  return details;
}

function drawSteps(details, rounds) {
  const figure = document.getElementById("steps").content.cloneNode(true);
  const svg = figure.querySelector("svg");
  details.append(figure);
  stepChart(svg, rounds);
}
