// The settings of requests and of the page, kept in this browser.

import { $ } from "./dom.js";

const KEPT = "paceline.settings";
const TEXTS = ["system", "drafter", "max_draft", "rule", "temperature", "top_p", "seed", "max_tokens", "stop-texts"];
const SWITCHES = ["logprobs", "colours", "formatted"];

/** Reads the controls: texts, and switches as booleans. */
export function controls() {
  const texts = TEXTS.map((name) => [name, $(name).value]);
  return Object.fromEntries([...texts, ...SWITCHES.map((name) => [name, $(name).checked])]);
}

export function startControls(onShow) {
  restore();
  const changed = () => {
    localKeep(KEPT, JSON.stringify(controls()));
    showColours();
  };
  $("controls").addEventListener("input", changed);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("formatted").addEventListener("change", onShow);
  $("defaults").addEventListener("click", () => {
    $("controls").reset();
    changed();
    onShow();
  });
  showColours();
}

const showColours = () => document.body.classList.toggle("colourless", !$("colours").checked);

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(KEPT));
  } catch {
    // nothing is stored, or it is broken: the defaults stand
  }
  for (const name of TEXTS) if (typeof kept?.[name] === "string") choose($(name), kept[name]);
  for (const name of SWITCHES) if (typeof kept?.[name] === "boolean") $(name).checked = kept[name];
}

/** Sets a control. An option that the server has not named yet is added, so that the choice survives a reload. */
function choose(control, value) {
  if (control.tagName === "SELECT" && ![...control.options].some((option) => option.value === value))
    control.append(new Option(value, value));
  control.value = value;
}

export function localKeep(name, text) {
  try {
    localStorage.setItem(name, text);
  } catch {
    // the browser stores nothing for this page: the setting lasts until it is closed
  }
}

/** Limits the controls to what the server allows, and shows its defaults. */
export function offer(speculation, model) {
  const drafters = Object.keys(speculation.drafters ?? {});
  for (const option of [...$("drafter").options]) {
    const own = ["", "off"].includes(option.value);
    if (!own && !drafters.includes(option.value)) option.remove();
  }
  const known = new Set([...$("drafter").options].map((option) => option.value));
  $("drafter").append(...drafters.filter((name) => !known.has(name)).map((name) => new Option(name, name)));
  $("drafter").options[0].text = speculation.default_drafter
    ? `the server’s: ${speculation.default_drafter}`
    : "the server’s: none";
  for (const option of $("rule").options) option.disabled = !(speculation.rules ?? []).includes(option.value);
  if (speculation.max_draft) $("max_draft").max = speculation.max_draft;
  const advice = model?.meta?.default_sampling ?? {};
  $("temperature").placeholder = String(advice.temperature ?? "the server’s");
  $("top_p").placeholder = String(advice.top_p ?? "the server’s");
}
