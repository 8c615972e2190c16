// The list of conversations: open, rename, delete, export.

import { current, open, openNew, save, store } from "./chat.js";
import { $, button, download, make, say, toast } from "./dom.js";
import { fileName, toMarkdown } from "./tree.js";

export function startHistory({ onOpen }) {
  const opened = (work) => () => (work(), showHistory(), onOpen());
  $("new").addEventListener("click", opened(openNew));
  $("new-small").addEventListener("click", opened(openNew));
  $("export-json").addEventListener("click", () => exportAs("json"));
  $("export-md").addEventListener("click", () => exportAs("md"));
  $("chats").addEventListener("click", (event) => {
    const id = event.target.closest("button.open")?.dataset.id;
    const chosen = id && store.list().find((conversation) => conversation.id === id);
    if (chosen) opened(() => open(chosen))();
  });
  addEventListener("storage", showHistory); // another tab changed the history
  showHistory();
}

/** Shows the list, and the title of the conversation in view. */
export function showHistory() {
  const conversations = store.list();
  $("chats").replaceChildren(...conversations.map(entryOf));
  $("no-chats").hidden = conversations.length > 0;
  const empty = !current().nodes.length;
  say($("title"), empty ? "New chat" : current().title);
  for (const id of ["export-json", "export-md"]) $(id).disabled = empty;
}

function entryOf(conversation) {
  const chosen = conversation.id === current().id;
  const title = make("button", {
    type: "button",
    className: "open",
    textContent: conversation.title,
    title: conversation.title,
  });
  title.dataset.id = conversation.id;
  if (chosen) title.setAttribute("aria-current", "true");
  const entry = make("li", {}, title);
  const name = `“${conversation.title}”`;
  entry.append(
    button("✎", () => entry.replaceChildren(nameField(conversation)), { label: `Rename ${name}`, className: "icon" }),
    button("×", () => remove(conversation), { label: `Delete ${name}`, className: "icon" }),
  );
  return entry;
}

function nameField(conversation) {
  const field = make("input", { value: conversation.title, maxLength: 80 });
  field.setAttribute("aria-label", "Name of the conversation");
  const rename = () => {
    const name = field.value.trim();
    const target = conversation.id === current().id ? current() : conversation;
    if (name && name !== target.title) save(Object.assign(target, { title: name, named: true }));
    showHistory();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") rename();
    if (event.key === "Escape") showHistory();
  });
  field.addEventListener("blur", () => field.isConnected && rename());
  requestAnimationFrame(() => (field.focus(), field.select()));
  return field;
}

function remove(conversation) {
  store.remove(conversation.id);
  if (conversation.id === current().id) openNew();
  showHistory();
  toast(`Deleted “${conversation.title}”`, {
    text: "Undo",
    run: () => (save(conversation), open(conversation), showHistory()),
  });
}

function exportAs(form) {
  const conversation = current();
  const name = `${fileName(conversation.title)}.${form}`;
  if (form === "md") download(name, toMarkdown(conversation), "text/markdown");
  else download(name, JSON.stringify(conversation, null, 2), "application/json");
}
