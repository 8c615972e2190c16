// The facts of a token: under the pointer, or walked to with the arrow keys.

import { $ } from "./dom.js";
import { describe } from "./words.js";

const views = new WeakMap(); // box → its View

export function remember(view) {
  views.set(view.box, view);
  return view;
}

const viewOf = (element) => views.get(element.closest?.(".answer"));

function show(span) {
  const box = span.getBoundingClientRect();
  const tip = $("tip");
  tip.textContent = describe(viewOf(span).tokens[span.dataset.i]);
  tip.hidden = false;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  const fits = box.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.top = `${fits ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

export function hideTip() {
  $("tip").hidden = true;
  for (const span of document.querySelectorAll(".t.at")) span.classList.remove("at");
}

function hover(event) {
  const span = event.target.closest?.(".t");
  if (span && viewOf(span)) show(span);
  else $("tip").hidden = true;
}

/** Moves from token to token by arrow keys. The tip is read out, because the answer is described by it. */
function walk(event) {
  const box = event.target.classList?.contains("answer") ? event.target : null;
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const spans = box && step ? [...box.querySelectorAll(".t")] : [];
  if (!spans.length) return;
  event.preventDefault();
  const at = spans.findIndex((span) => span.classList.contains("at"));
  const next = spans[Math.max(0, Math.min(spans.length - 1, at + step))];
  hideTip();
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
  show(next);
  box.setAttribute("aria-describedby", "tip");
}

export function startTips() {
  document.addEventListener("keydown", walk);
  document.addEventListener("pointerover", hover);
  document.addEventListener("focusout", hideTip);
  document.addEventListener("scroll", () => ($("tip").hidden = true), { capture: true, passive: true });
}
