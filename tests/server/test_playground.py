"""The playground: how it is served, what its page may load and must label, and what of its script needs no page."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import paceline.server.playground as playground
from paceline.server.playground import PAGES, install_playground

HERE = Path(playground.__file__).parent
HTML, SCRIPT, STYLE = ((HERE / name).read_text(encoding="utf-8") for name in ("index.html", "app.js", "style.css"))
VOID = {"meta", "link", "input", "br"}


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
    assert wanted - {None, "data:,"} == set(PAGES) - {"/"}
    for text in (HTML, SCRIPT, STYLE):
        assert re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\w[\w.-]*\.\w+", text) == []
    assert "@import" not in STYLE
    assert "url(" not in STYLE


def test_nothing_is_written_into_the_page_that_its_policy_forbids() -> None:
    assert PAGE.inline == []
    for tag, attributes, _ in PAGE.elements:
        forbidden = [name for name in attributes if name == "style" or name.startswith("on")]
        assert not forbidden, f"<{tag}> has {forbidden}"
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "new Function", 'setAttribute("style"'):
        assert danger not in SCRIPT


def test_the_key_is_kept_in_memory_only() -> None:
    for store in ("localStorage", "sessionStorage", "document.cookie", "indexedDB"):
        assert store not in SCRIPT


def test_what_the_script_looks_for_is_on_the_page() -> None:
    assert len(IDS) == len(set(IDS))
    assert set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT)) <= set(IDS)
    for name in re.findall(r"\$\(`\$\{(?:name|id)\}-(\w+)`\)", SCRIPT):
        assert any(identifier and identifier.endswith(f"-{name}") for identifier in IDS)


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
    assert len(regions) >= 4
    assert set(regions) == {"polite"}


def test_narrow_screens_and_dark_mode_are_thought_of() -> None:
    assert 'name="viewport"' in HTML
    assert re.search(r"@media \(max-width: \d+rem\)", STYLE)
    assert "color-scheme: light dark" in STYLE
    assert "prefers-color-scheme" in SCRIPT
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


# The script, where Node is there to run it.


def run(code: str, tmp_path: Path) -> Any:
    """What `code` returns, with everything that the script exports in reach."""
    node = shutil.which("node")
    if node is None:
        pytest.skip(reason="the script of the page is run by Node, which is not installed")
    (tmp_path / "app.mjs").write_text(SCRIPT, encoding="utf-8")
    names = ", ".join(re.findall(r"^export (?:function\*?|class|const) (\w+)", SCRIPT, flags=re.MULTILINE))
    main = f'import {{ {names} }} from "./app.mjs";\nconsole.log(JSON.stringify((() => {{ {code} }})()));'
    (tmp_path / "main.mjs").write_text(main, encoding="utf-8")
    told = subprocess.run([node, str(tmp_path / "main.mjs")], capture_output=True, text=True, timeout=200)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_events_are_found_wherever_the_text_is_cut(tmp_path: Path) -> None:
    stream = 'data: {"a":"é"}\n\n: a comment\n\ndata: one\ndata: two\r\n\r\ndata:[DONE]\n\n'
    code = f"""
        const stream = {json.dumps(stream)}, found = [];
        for (let size = 1; size <= stream.length; size++) {{
            const parser = new EventParser(), events = [];
            for (let i = 0; i < stream.length; i += size) events.push(...parser.push(stream.slice(i, i + size)));
            found.push(JSON.stringify(events));
        }}
        return [...new Set(found)].map(JSON.parse);
    """
    assert run(code, tmp_path) == [['{"a":"é"}', "one\ntwo", "[DONE]"]]


def test_controls_become_a_request_that_the_server_knows(tmp_path: Path) -> None:
    controls = {
        "drafter": "ngram",
        "max_draft": "4",
        "rule": "coupled",
        "temperature": "0",
        "seed": "",
        "max_tokens": "20",
    }
    messages = [{"role": "user", "content": "hi"}]
    code = f"""
        const controls = {json.dumps(controls)}, messages = {json.dumps(messages)};
        return [
            requestOf(messages, {{...controls, logprobs: true}}, {{model: "tiny"}}),
            requestOf(messages, controls, {{model: "tiny", plain: true}}),
            requestOf(messages, {{...controls, drafter: "off"}}, {{model: "tiny"}}),
            requestOf(messages, {{...controls, drafter: "", max_draft: "", seed: "7"}}, {{model: "tiny"}}),
        ];
    """
    full, plain, off, default = run(code, tmp_path)
    assert full == {
        "model": "tiny",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": True,
        "speculation": {"enabled": True, "rule": "coupled", "drafter": "ngram", "max_draft": 4},
        "paceline": {"events": True},
    }
    assert plain == off == {**{k: v for k, v in full.items() if k != "logprobs"}, "speculation": {"enabled": False}}
    assert default["speculation"] == {"enabled": True, "rule": "coupled"}
    assert default["seed"] == 7


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None},
    {
        "choices": [{"index": 0, "delta": {"content": "Once"}, "logprobs": {"content": [{"logprob": 0.0}]}}],
        "paceline": {"round": 1, "origins": ["plain"], "token_texts": ["Once"]},
    },
    {
        "choices": [{"index": 0, "delta": {"content": " upon a"}, "finish_reason": "stop"}],
        "paceline": {"round": 2, "origins": ["accepted", "bonus"], "token_texts": [" upon", " a"]},
        "speculation": {"num_draft_tokens": 3, "num_accepted_tokens": 1, "drafter": "ngram"},
    },
    {"choices": [], "usage": {"completion_tokens": 3}},
]


def test_an_answer_is_put_together_from_chunks(tmp_path: Path) -> None:
    code = f"""
        const answer = new Answer();
        {json.dumps(CHUNKS)}.forEach((chunk, i) => answer.add(chunk, 100 * i));
        return {{text: answer.text, count: answer.count, speed: answer.speed, stats: answer.stats,
                tokens: answer.tokens, rounds: roundsOf(answer.tokens, 0),
                tip: describe(answer.tokens[0], "ngram"), drafted: describe(answer.tokens[1], "ngram")}};
    """
    told = run(code, tmp_path)
    assert (told["text"], told["count"], told["speed"]) == ("Once upon a", 3, 20)
    assert told["stats"]["drafter"] == "ngram"
    assert [token["origin"] for token in told["tokens"]] == ["plain", "accepted", "bonus"]
    assert told["tokens"][0]["probability"] == 1
    assert told["rounds"] == [
        {"round": 1, "from": 0, "to": 100, "origins": ["plain"]},
        {"round": 2, "from": 100, "to": 200, "origins": ["accepted", "bonus"]},
    ]
    assert told["tip"].split("\n") == ['"Once" plain', "probability 100.0 %", "step 1"]
    assert told["drafted"].split("\n")[0] == '" upon" accepted from ngram'


def test_a_server_that_tells_no_origins_is_shown_without(tmp_path: Path) -> None:
    assert run('return tokensOf({choices: [{delta: {content: "hi"}}]}, 5)', tmp_path) == [
        {"text": "hi", "origin": None, "at": 5}
    ]


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [("", "", -1), ("same", "same", -1), ("same", "some", 1), ("long", "longer", 4), ("", "x", 0)],
)
def test_the_first_difference(one: str, other: str, at: int, tmp_path: Path) -> None:
    assert run(f"return firstDifference({json.dumps(one)}, {json.dumps(other)})", tmp_path) == at


def test_the_state_of_speculation_is_read_whatever_is_missing(tmp_path: Path) -> None:
    code = """return [stateOf({}), stateOf({drafters: {ngram: null}}), stateOf({drafters: [{name: "ngram"}]}),
        stateOf({drafters: ["ngram"], output_tokens: 5, speedup: {speedup: 2}}).speedup]"""
    nothing, mapping, records, speedup = run(code, tmp_path)
    assert (nothing["drafters"], nothing["reasons"], nothing["remarks"]) == ([], {}, ["no drafter"])
    assert {nothing[name] for name in ("outputTokens", "acceptance", "speedup", "rules", "longest")} == {None}
    assert mapping["drafters"] == records["drafters"] == ["ngram"]
    assert speedup == {"speedup": 2}
