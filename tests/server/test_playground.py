"""The playground: how it is served, what its page may load, and what it must label."""

from __future__ import annotations

import asyncio
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from paceline.server.playground import PAGES, install_playground
from paceline.types import OffKind
from tests.server.node import HERE, MODULES

ROOT = Path(__file__).parents[2]
HTML, STYLE = ((HERE / name).read_text(encoding="utf-8") for name in ("index.html", "style.css"))
SCRIPT = "\n".join(MODULES.values())
MAX_LINES = 300  # of a module
MAX_BYTES = 150_000  # of everything that a visit loads
VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """Every element with its attributes, and what stands around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.inline: list[str] = []  # what scripts and styles hold
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style") and data.strip():
            self.inline.append(data)


PAGE = Page(HTML)
IDS = [attributes["id"] for _, attributes, _ in PAGE.elements if "id" in attributes]


def get(path: str, method: str = "GET") -> httpx.Response:
    async def ask() -> httpx.Response:
        app = FastAPI()
        install_playground(app)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, headers={"accept": "text/html"})

    return asyncio.run(ask())


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_served_as_they_are_and_may_load_nothing_foreign(path: str) -> None:
    answer = get(path)
    name, content_type = PAGES[path]
    assert answer.status_code == 200
    assert answer.content == (HERE / name).read_bytes()
    assert answer.headers["content-type"] == content_type
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_head_is_answered_without_a_body() -> None:
    answer = get("/", "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/playground/", "/playground/__init__.py", "/playground/../metrics", "/index.html"])
def test_nothing_else_is_served(path: str) -> None:
    assert get(path).status_code == 404


def test_the_page_needs_nothing_but_its_own_files() -> None:
    wanted = {attributes.get("src") or attributes.get("href") for tag, attributes, _ in PAGE.elements if tag != "a"}
    imported = {f"/playground/{name}" for name in re.findall(r'from "\./([\w.]+)";$', SCRIPT, flags=re.MULTILINE)}
    assert (wanted - {None}) | imported == set(PAGES) - {"/"}
    assert len(re.findall(r"^import ", SCRIPT, flags=re.MULTILINE)) == len(re.findall(r' from "\./', SCRIPT))
    icon = (HERE / "icon.svg").read_text(encoding="utf-8")
    for text in (HTML, SCRIPT, STYLE, icon):
        assert re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\w[\w.-]*\.\w+", text) == []
    assert "@import" not in STYLE
    assert "url(" not in STYLE


def test_everything_is_packaged() -> None:
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = packaging["tool"]["setuptools"]["package-data"]["paceline"]
    package = HERE.parents[1]
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    assert {HERE / name for name, _ in PAGES.values()} <= packaged


def test_modules_are_small() -> None:
    for name, text in MODULES.items():
        assert text.count("\n") < MAX_LINES, name
    assert sum((HERE / name).stat().st_size for name, _ in PAGES.values()) < MAX_BYTES


def test_nothing_is_written_into_the_page_that_its_policy_forbids() -> None:
    assert PAGE.inline == []
    for tag, attributes, _ in PAGE.elements:
        forbidden = [name for name in attributes if name == "style" or name.startswith("on")]
        assert not forbidden, f"<{tag}> has {forbidden}"
    dangers = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "DOMParser",
        "document.write",
        "createContextualFragment",
    )
    for danger in (*dangers, "eval(", "new Function", "srcdoc", 'setAttribute("style"'):
        assert danger not in SCRIPT


def test_the_key_is_kept_for_the_session_of_the_tab_only() -> None:
    assert [name for name, text in MODULES.items() if "sessionStorage" in text] == ["api.js"]
    assert "localStorage" not in MODULES["api.js"]
    for store in ("document.cookie", "indexedDB"):
        assert store not in SCRIPT


def test_every_reason_has_a_sentence() -> None:
    reasons = MODULES["words.js"].split("export const REASONS = {")[1].split("};")[0]
    told = dict(re.findall(r'^  "([^"]+)": "([^"]+)",$', reasons, flags=re.MULTILINE))
    assert told.keys() == {kind.value for kind in OffKind}
    for sentence in told.values():
        assert sentence[0].isupper()
        assert sentence.endswith(".")


def test_four_examples_are_offered_and_one_is_raced() -> None:
    examples = MODULES["examples.js"].split("export const EXAMPLES = [")[1].split("];")[0]
    assert len(re.findall(r"title: ", examples)) == 4
    assert "export const RACE_PROMPT" in MODULES["examples.js"]


def test_what_the_script_looks_for_is_on_the_page() -> None:
    assert len(IDS) == len(set(IDS))
    assert set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT)) <= set(IDS)
    for name in re.findall(r"\$\(`\$\{name\}-(\w+)`\)", SCRIPT):
        assert {f"plain-{name}", f"fast-{name}"} <= set(IDS)
    for names in re.findall(r"for \(const id of \[([^\]]+)\]\)", SCRIPT):
        assert set(re.findall(r'"([\w-]+)"', names)) <= set(IDS)


def test_everything_that_takes_input_has_a_label() -> None:
    labelled = {attributes.get("for") for tag, attributes, _ in PAGE.elements if tag == "label"}
    for tag, attributes, around in PAGE.elements:
        if tag in ("input", "select", "textarea"):
            assert "label" in around or attributes["id"] in labelled or "aria-label" in attributes, attributes
        if attributes.get("role") in ("img", "log", "tablist", "group"):
            assert "aria-label" in attributes, attributes
        for reference in ("aria-controls", "aria-labelledby", "aria-describedby", "for"):
            assert attributes.get(reference) in (None, *IDS), attributes


def test_live_regions_are_polite() -> None:
    regions = [attributes["aria-live"] for _, attributes, _ in PAGE.elements if "aria-live" in attributes]
    assert len(regions) >= 5
    assert set(regions) == {"polite", "off"}
    [log] = [attributes for _, attributes, _ in PAGE.elements if attributes.get("aria-live") == "off"]
    assert log["id"] == "log"  # it is made anew again and again; an ended answer is read out from #said


def test_narrow_screens_and_dark_mode_are_thought_of() -> None:
    assert 'name="viewport"' in HTML
    assert re.search(r"@media \(max-width: \d+rem\)", STYLE)
    assert "color-scheme: light dark" in STYLE
    assert "prefers-color-scheme" in SCRIPT
    assert "prefers-reduced-motion" in STYLE
    assert ":focus-visible" in STYLE
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", STYLE):
        assert light != dark, name


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("ink", "ground"),
    [
        *((ink, ground) for ink in ("ink", "quiet", "alert", "accepted-ink") for ground in ("ground", "raised")),
        *(("ink", ground) for ground in ("accepted", "bonus", "plain")),
        ("on-accent", "accent"),
    ],
)
def test_texts_can_be_read_in_both_themes(ink: str, ground: str) -> None:
    colours = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", STYLE)}
    for theme in (0, 1):
        assert contrast(colours[ink][theme], colours[ground][theme]) >= 4.5
