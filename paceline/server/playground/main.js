// The page: views, drawers, theme and keys. It talks to the server that it came from, and to no other.

import { ask, render, startChat } from "./chat.js";
import { localKeep, startControls } from "./controls.js";
import { $, button, make } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { showHistory, startHistory } from "./history.js";
import { modelName, poll, rememberRace, startLive } from "./live.js";
import { startRace } from "./race.js";
import { complain, isRunning, stop, whenDone } from "./running.js";
import { hideTip, startTips } from "./tips.js";

const THEME = "paceline.theme";
const DRAWERS = { "show-history": "history", "show-settings": "settings" };

function select(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  poll();
}

function turnTabs(event) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const at = tabs.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  const tab = tabs[(to + tabs.length) % tabs.length];
  select(tab);
  tab.focus();
}

/** Opens one drawer, or none. Wide screens show both beside the chat; the style decides. */
function openDrawer(name) {
  // Whoever opened the drawer that closes now gets the focus back.
  const opener = Object.keys(DRAWERS).find((each) => $(DRAWERS[each]).classList.contains("open"));
  for (const [each, drawer] of Object.entries(DRAWERS)) {
    $(drawer).classList.toggle("open", drawer === name);
    $(each).setAttribute("aria-expanded", drawer === name);
  }
  $("veil").hidden = !name;
  if (name) $(name).focus();
  else $(opener)?.focus();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", theme === "dark" ? "Use light colours" : "Use dark colours");
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const ofSystem = () => (system.matches ? "dark" : "light");
  let kept = null;
  try {
    kept = localStorage.getItem(THEME);
  } catch {
    // nothing is stored: the system decides
  }
  setTheme(["light", "dark"].includes(kept) ? kept : ofSystem());
  system.addEventListener("change", () => setTheme(ofSystem()));
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(theme);
    localKeep(THEME, theme);
  });
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function escape(event) {
  if (event.key !== "Escape") return;
  hideTip();
  if (document.querySelector(".drawer.open")) openDrawer(null);
  else if (isRunning()) stop();
}

function showExamples() {
  $("examples").append(
    ...EXAMPLES.map(({ title, note, prompt }) => {
      const card = button("", () => ask(prompt), { className: "example" });
      card.append(make("b", { textContent: title }), make("span", { textContent: note }));
      return card;
    }),
  );
}

function start() {
  startTheme();
  startTips();
  startControls(() => render({ stay: true }));
  showExamples();
  startChat({ model: modelName, onSave: showHistory });
  startHistory({ onOpen: () => (openDrawer(null), select($("tab-chat"))) });
  startRace({ model: modelName, onMeasured: rememberRace });
  for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => select(tab));
  document.querySelector("[role=tablist]").addEventListener("keydown", turnTabs);
  for (const [opener, drawer] of Object.entries(DRAWERS)) {
    $(opener).addEventListener("click", () => openDrawer($(drawer).classList.contains("open") ? null : drawer));
  }
  for (const id of ["veil", "close-history", "close-settings"]) $(id).addEventListener("click", () => openDrawer(null));
  $("measure").addEventListener("click", () => (select($("tab-race")), $("start").requestSubmit()));
  for (const id of ["stop", "halt"]) $(id).addEventListener("click", stop);
  for (const id of ["prompt", "race-prompt"]) $(id).addEventListener("keydown", sendOnEnter);
  $("problem-close").addEventListener("click", () => complain(null));
  document.addEventListener("keydown", escape);
  whenDone(poll);
  startLive();
}

start();
