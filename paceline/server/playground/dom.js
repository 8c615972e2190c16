// Making and finding elements. Nothing here parses HTML: every text becomes a text node.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Makes an SVG element. `title` is what a pointer that rests on it reads. */
export function draw(tag, attributes = {}, text = "", title = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  if (title) element.append(draw("title", {}, title));
  return element;
}

/** Makes a button. `label` is its name where the text alone does not say enough. */
export function button(text, onClick, { label = "", className = "" } = {}) {
  const made = make("button", { type: "button", textContent: text, className });
  if (label) made.setAttribute("aria-label", label);
  if (label) made.title = label;
  made.addEventListener("click", onClick);
  return made;
}

/** Changes a text only if it differs, so that a live region is not read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Returns a function that runs at most once a frame, with the latest arguments. */
export function onceAFrame(work) {
  let latest = null;
  return (...args) => {
    if (!latest) requestAnimationFrame(() => work(...[latest, (latest = null)][0]));
    latest = args;
  };
}

/** Shows a short message, with an action if there is one. It goes away by itself. */
export function toast(text, action = null) {
  const box = $("toast");
  const close = () => (box.hidden = true);
  box.replaceChildren(make("span", { textContent: text }));
  if (action) box.append(button(action.text, () => (close(), action.run())));
  box.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(close, 6000);
}

/** Copies a text. Browsers keep the clipboard from pages that came over plain HTTP from another machine: those copy
    from a field. */
export async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyFromField(text);
    toast("Copied");
  } catch (error) {
    toast(`Not copied: ${error.message}`);
  }
}

function copyFromField(text) {
  const field = make("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser does not allow it");
}

/** Offers a text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
