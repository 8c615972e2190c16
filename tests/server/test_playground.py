"""The playground: how it is served, what its page may load and must label, and what of its modules needs no page."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import paceline.server.playground as playground
from paceline.server.playground import PAGES, install_playground
from paceline.types import OffKind

HERE = Path(playground.__file__).parent
ROOT = Path(__file__).parents[2]
HTML, STYLE = ((HERE / name).read_text(encoding="utf-8") for name in ("index.html", "style.css"))
MODULES = {path.name: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.js"))}
SCRIPT = "\n".join(MODULES.values())
PURE = ("answer", "charts", "inline", "markdown", "race", "render", "store", "tree", "words", "api")  # no page on import
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
    dangers = ("innerHTML", "outerHTML", "insertAdjacentHTML", "DOMParser", "document.write", "createContextualFragment")
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
        assert sentence[0].isupper() and sentence.endswith("."), sentence


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


# The modules that need no page, where Node is there to run them.


def run(code: str, tmp_path: Path) -> Any:
    """What `code` returns, with everything that these modules export in reach."""
    node = shutil.which("node")
    if node is None:
        pytest.skip(reason="the modules of the page are run by Node, which is not installed")
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    exported = re.compile(r"^export (?:function|class|const) (\w+)", flags=re.MULTILINE)
    imports = [f'import {{ {", ".join(exported.findall(MODULES[f"{name}.js"]))} }} from "./{name}.js";' for name in PURE]
    main = "\n".join(imports) + f"\nconsole.log(JSON.stringify((() => {{ {code} }})()));"
    (tmp_path / "test.js").write_text(main, encoding="utf-8")
    told = subprocess.run([node, str(tmp_path / "test.js")], capture_output=True, text=True, timeout=200)
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
        "system": " Be brief. ",
        "drafter": "ngram",
        "max_draft": "4",
        "rule": "coupled",
        "temperature": "0",
        "top_p": "0.9",
        "seed": "",
        "max_tokens": "20",
        "stop-texts": "END\n\n###",
    }
    messages = [{"role": "user", "content": "hi"}]
    code = f"""
        const controls = {json.dumps(controls)}, messages = {json.dumps(messages)};
        const full = requestOf(messages, {{...controls, logprobs: true}}, {{model: "tiny"}});
        return [
            full,
            requestOf(messages, controls, {{model: "tiny", plain: true}}),
            requestOf(messages, {{...controls, drafter: "off"}}, {{model: "tiny"}}),
            requestOf(messages, {{rule: "coupled", drafter: "", max_draft: "", seed: "7"}}, {{model: "tiny"}}),
            continuationOf(full, [1, 2, 3]),
        ];
    """
    full, plain, off, default, more = run(code, tmp_path)
    assert full == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 20,
        "stop": ["END", "###"],
        "logprobs": True,
        "speculation": {"enabled": True, "rule": "coupled", "drafter": "ngram", "max_draft": 4},
        "paceline": {"events": True},
    }
    assert plain == off == {**{k: v for k, v in full.items() if k != "logprobs"}, "speculation": {"enabled": False}}
    assert default["speculation"] == {"enabled": True, "rule": "coupled"}
    assert (default["seed"], default["messages"]) == (7, messages)
    assert not {"temperature", "top_p", "max_tokens", "stop"} & default.keys()
    assert more == {**{k: v for k, v in full.items() if k != "messages"}, "prompt": [1, 2, 3], "logprobs": 0}


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None},
    {
        "choices": [{"index": 0, "delta": {"content": "Once"}, "logprobs": {"content": [{"logprob": 0.0}]}}],
        "paceline": {"round": 1, "origins": ["plain"], "token_texts": ["Once"], "drafter": None},
    },
    {
        "choices": [{"index": 0, "delta": {"content": " upon a"}, "finish_reason": "length"}],
        "paceline": {"round": 2, "origins": ["accepted", "bonus"], "token_texts": [" upon", " a"], "drafter": "ngram"},
        "speculation": {"num_draft_tokens": 3, "num_accepted_tokens": 1, "drafter": "ngram", "tokens_per_step": 1.5},
    },
    {"choices": [], "usage": {"completion_tokens": 3}},
]


def test_an_answer_is_put_together_from_chunks(tmp_path: Path) -> None:
    code = f"""
        const answer = new Answer(0);
        {json.dumps(CHUNKS)}.forEach((chunk, i) => answer.add(chunk, 100 * i));
        const kept = unpackTokens(packTokens(answer.tokens), answer.text, "ngram");
        return {{text: answer.text, count: answer.count, speed: answer.speed, stats: answer.stats, finish: answer.finish,
                steps: answer.steps, tokens: answer.tokens, kept, rounds: roundsOf(answer.tokens),
                end: endInWords({{finish: "length", asked: {{max_tokens: 3}}, count: 3}}),
                full: endInWords({{finish: "length", asked: {{max_tokens: 9}}, count: 3}}),
                pieces: summaryOf({{stats: answer.stats, tokens: 3, seconds: 0.2, speed: 20}}),
                tip: describe(answer.tokens[0]), drafted: describe(answer.tokens[1])}};
    """
    told = run(code, tmp_path)
    assert (told["text"], told["count"], told["speed"], told["steps"]) == ("Once upon a", 3, 20, 2)
    assert (told["stats"]["drafter"], told["finish"]) == ("ngram", "length")
    assert [token["origin"] for token in told["tokens"]] == ["plain", "accepted", "bonus"]
    for kept, token in zip(told["kept"], told["tokens"], strict=True):
        assert all(kept[name] == token[name] for name in ("text", "origin", "round", "since")), kept
    assert told["tokens"][0]["probability"] == told["kept"][0]["probability"] == 1
    assert told["rounds"] == [
        {"round": 1, "from": 0, "to": 100, "origins": ["plain"]},
        {"round": 2, "from": 100, "to": 200, "origins": ["accepted", "bonus"]},
    ]
    assert told["tip"].split("\n") == ['"Once" plain', "probability 100.0 %", "step 1", "100 ms after the request"]
    assert told["drafted"].split("\n")[0] == '" upon" accepted from ngram'
    assert (told["end"], told["full"]) == ("Cut at max tokens (3).", "Cut: the context is full.")
    assert told["pieces"][3:] == ["1.50 tokens per step", "33 % of 3 drafted tokens accepted"]


def test_a_server_that_tells_no_origins_is_shown_without(tmp_path: Path) -> None:
    assert run('return tokensOf({choices: [{delta: {content: "hi"}}]}, 5)', tmp_path) == [
        {"text": "hi", "origin": None, "at": 5}
    ]


def test_the_verdict_of_a_race(tmp_path: Path) -> None:
    code = """
        const run = (text, seconds, finish = "stop") => ({answer: {text, finish}, seconds});
        return [verdictOf(run("same", 2), run("same", 1), ""), verdictOf(run("same", 2), run("some", 1), ""),
            verdictOf(run("", 2, "stopped"), run("", 1), ""), excuseOf({rule: "typical"}), excuseOf({rule: "coupled"}),
            [["", ""], ["long", "longer"], ["", "x"]].map((pair) => firstDifference(...pair))];
    """
    same, different, stopped, excuse, none, places = run(code, tmp_path)
    assert (same["className"], same["times"]) == ("same", 2)
    assert "Identical texts, 4 characters: speculation was 2.00 × as fast" in same["text"]
    assert (different["className"], different.get("times")) == ("different", None)
    assert "from character 2 on: “ame” and “ome”" in different["text"]
    assert stopped.get("times") is None
    assert (excuse, none) == ("the rule typical is lossy", "")
    assert places == [-1, 4, 0]


def test_facts_are_said_in_words(tmp_path: Path) -> None:
    model = {
        "id": "smollm2",
        "max_model_len": 8192,
        "meta": {
            "n_params": 134_515_008,
            "size": 98_346_240,
            "bits_per_weight": 5.85,
            "device": "cpu",
            "device_name": "CPU",
            "kernels": "compiled",
            "drafters": {"eagle": "a head", "ngram": "looks up tokens"},
        },
    }
    state = {"default_drafter": "eagle", "drafters": {"eagle": None, "ngram": "it hung"}, "bitwise": True}
    code = f"""
        const model = {json.dumps(model)}, state = {json.dumps(state)};
        return [Object.fromEntries(cardOf(model, state)), cardLine(model), cardOf({{id: "x"}}, null).length,
            stateInWords(200, {{}}), stateInWords(503, {{status: "starting", progress: 42.4}}), stateInWords(0, null),
            stateInWords(503, {{status: "draining"}}), stateInWords(503, {{status: "dead"}}), stateInWords(502, null),
            speedupInWords({{speedup: {{speedup: 1.5, low: 1.25, high: 1.75}}}}),
            speedupInWords({{default_drafter: "ngram", answers_by_drafter: {{ngram: 2, none: 1}}}}),
            reasonOf("something new"), problemInWords({{message: "no key was given", status: 401}})];
    """
    card, line, short, ready, starting, gone, draining, dead, other, speedup, few, reason, problem = run(code, tmp_path)
    assert card == {
        "Name": "smollm2",
        "Parameters": "134.5 million",
        "Weights": "5.8 bits each on average, 98 MB in memory",
        "Context": "8,192 tokens",
        "Runs on": "CPU: compiled",
        "Drafter": "eagle: a head",
        "Also drafts": "ngram: out of use: it hung",
        "Exact": "to the bit, whatever else is in the batch",
    }
    assert line == "smollm2 · 134.5 million parameters · 5.8 bits · 8,192 tokens of context · on CPU"
    assert (short, ready) == (1, None)
    assert "loading 42 %" in starting
    assert all(word in text for word, text in zip(("not answer", "shutting", "restart", "502"), (gone, draining, dead, other), strict=True))
    assert (speedup["number"], few["number"]) == ("1.50 ×", "")
    assert "1.25 to 1.75" in speedup["note"]
    assert "3 so far" in few["note"]
    assert (reason, problem) == ("Something new.", "No key was given. Enter an API key.")


def test_a_conversation_is_a_tree_that_survives_broken_data(tmp_path: Path) -> None:
    code = """
        const made = newConversation(5);
        const first = addMessage(made, null, {role: "user", content: "A question\\nwith more"});
        const answer = addMessage(made, first.id, {role: "assistant", content: "one", finish: "length", model: "tiny"});
        addMessage(made, first.id, {role: "assistant", content: "two"});
        const edited = addMessage(made, null, {role: "user", content: "Another"});
        const texts = () => pathOf(made).map((node) => node.content);
        const seen = [texts()];
        chooseBranch(made, first.id); seen.push(texts());
        chooseBranch(made, answer.id); seen.push(texts());
        const markdown = toMarkdown(made);
        removeMessage(made, answer.id); seen.push(texts());
        const read = readConversation(JSON.stringify(made));
        const broken = ["", "null", "{}", "[]", JSON.stringify({...made, version: 0}), JSON.stringify({...made, nodes: 5}),
            JSON.stringify({...made, nodes: [{id: 1, parent: 1, role: "user", content: ""}]}),
            JSON.stringify({...made, nodes: [{id: 1, parent: null, role: "user", content: 5}]})];
        return [seen, branchesOf(made, edited).length, made.title, JSON.stringify(read) === JSON.stringify(made),
            broken.map(readConversation), readConversation(JSON.stringify({...made, leaf: 99})).leaf, markdown,
            fileName("Why? Über-all!")];
    """
    seen, branches, title, same, broken, leaf, markdown, name = run(code, tmp_path)
    question = "A question\nwith more"
    assert seen == [["Another"], [question, "two"], [question, "one"], [question, "two"]]
    assert (branches, title, same) == (2, "Another", True)
    assert broken == [None] * len(broken)
    assert leaf == 4
    assert markdown.endswith(f"## You\n\n{question}\n\n## tiny\n\none\n\n*(cut at max tokens)*\n")
    assert name == "why-über-all"


def test_the_history_is_bounded_and_never_fails(tmp_path: Path) -> None:
    code = """
        class Memory {
            constructor(most) { this.most = most; this.map = new Map(); }
            get length() { return this.map.size; }
            key(i) { return [...this.map.keys()][i]; }
            getItem(key) { return this.map.get(key) ?? null; }
            removeItem(key) { this.map.delete(key); }
            setItem(key, text) {
                const others = [...this.map].filter(([each]) => each !== key).reduce((sum, [, each]) => sum + each.length, 0);
                if (others + text.length > this.most) throw new Error("quota");
                this.map.set(key, text);
            }
        }
        const talk = (i, size) => {
            const made = {...newConversation(i), id: `c${i}`};
            addMessage(made, null, {role: "user", content: "x".repeat(size)});
            return made;
        };
        const ids = (store) => store.list().map((conversation) => conversation.id);
        const many = new Store(new Memory(1e9));
        for (let i = 0; i < 60; i++) many.save(talk(i, 10));
        const tight = new Store(new Memory(3000)), kept = [0, 1, 2, 3].map((i) => tight.save(talk(i, 1000)));
        const tooLong = tight.save(talk(9, 9000));
        const storage = new Memory(1e9);
        storage.setItem(PREFIX + "bad", "{"); storage.setItem("other", "{");
        const broken = new Store(storage); broken.save(talk(1, 5));
        const none = new Store(null), unkept = [none.save(talk(1, 5)), none.save(talk(2, 5))];
        return [ids(many), kept, ids(tight), tooLong, ids(broken), storage.getItem("other"), unkept, ids(none)];
    """
    many, kept, tight, too_long, broken, other, unkept, none = run(code, tmp_path)
    assert many == [f"c{i}" for i in range(59, 9, -1)]
    assert (kept, too_long) == ([True] * 4, False)
    assert tight[0] == "c9"  # in memory alone
    assert (broken, other) == (["c1"], "{")
    assert (unkept, none) == ([False, False], ["c2", "c1"])


# ── Markdown ──


def shape(text: str, tmp_path: Path) -> list[Any]:
    """The blocks of a text, each with its inline pieces as a short string."""
    code = f"""
        const show = (lines) => inlinesOf(lines).map((piece) => piece.text ?? (piece.break ? "⏎" : piece.close ? "⟩"
            : `⟨${{piece.open.tag}}${{piece.open.href ? ` ${{piece.open.href}}` : ""}} `)).join("");
        const walk = (block) => {{
            if (block.type === "code") return ["code", block.language, block.lines.map((line) => line.text).join("\\n")];
            if (block.blocks) return [block.type, ...block.blocks.map(walk)];
            if (block.items) return [block.ordered ? `list ${{block.first}}` : "list", ...block.items.map((item) => item.map(walk))];
            if (block.head) return ["table", block.aligns, ...[block.head, ...block.rows].map((row) => row.map((cell) => show([cell])))];
            return block.lines ? [block.type + (block.level ?? ""), show(block.lines)] : [block.type];
        }};
        return blocksOf({json.dumps(text)}).map(walk);
    """
    blocks: list[Any] = run(code, tmp_path)
    return blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("# One *two* ##\ntext", [["heading1", "One ⟨em two⟩"], ["paragraph", "text"]]),
        ("a **b _c_** ***d*** ~~e~~", [["paragraph", "a ⟨strong b ⟨em c⟩⟩ ⟨em ⟨strong d⟩⟩ ⟨del e⟩"]]),
        ("snake_case_name and 2 * 3 * 4", [["paragraph", "snake_case_name and 2 * 3 * 4"]]),
        ("`a*b*` ``c`d`` `open", [["paragraph", "⟨code a*b*⟩ ⟨code c`d⟩ `open"]]),
        ("one\ntwo", [["paragraph", "one⏎two"]]),
        ("- a\n  - b\n- c", [["list", [["paragraph", "a"], ["list", [["paragraph", "b"]]]], [["paragraph", "c"]]]]),
        ("3. a\n\n4. b", [["list 3", [["paragraph", "a"]], [["paragraph", "b"]]]]),
        ("> q\n> - r", [["quote", ["paragraph", "q"], ["list", [["paragraph", "r"]]]]]),
        ("```py\nx *y*\n\n z\n```\nend", [["code", "py", "x *y*\n\n z"], ["paragraph", "end"]]),
        ("```\nnever closed", [["code", "", "never closed"]]),
        (
            "| a | b |\n|---|--:|\n| 1 | *2* \\| 3 |",
            [["table", ["left", "right"], ["a", "b"], ["1", "⟨em 2⟩ | 3"]]],
        ),
        ("---", [["rule"]]),
        ("[x](https://a.b/c_(d) \"t\")", [["paragraph", "⟨a https://a.b/c_(d) x⟩"]]),
        ("see https://a.b/c. <mailto:x@y.z>", [["paragraph", "see ⟨a https://a.b/c https://a.b/c⟩. ⟨a mailto:x@y.z mailto:x@y.z⟩"]]),
        ("![x](https://a.b/c.png)", [["paragraph", "⟨a https://a.b/c.png x⟩"]]),
        ("[x](javascript:alert(1))", [["paragraph", "[x](javascript:alert(1))"]]),
        ("[x](data:text/html,hi) [y](//a.b) [z](ftp://a.b)", [["paragraph", "[x](data:text/html,hi) [y](//a.b) [z](ftp://a.b)"]]),
        ("<script>alert(1)</script>", [["paragraph", "<script>alert(1)</script>"]]),
        ("**open *and [never](closed", [["paragraph", "**open *and [never](closed"]]),
        (r"\*not\* \a", [["paragraph", r"*not* \a"]]),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, str) else "",
)
def test_markdown(text: str, blocks: list[Any], tmp_path: Path) -> None:
    assert shape(text, tmp_path) == blocks


def test_markdown_is_read_in_parts_as_in_whole_and_knows_its_places(tmp_path: Path) -> None:
    """While a text grows, blocks before the last two do not change; each piece says where it stood."""
    code = """
        let seed = 1;
        const random = (most) => (seed = (seed * 1103515245 + 12345) % 2147483648) % most;
        const bits = ["- a", "1. b", "\\n", "\\n\\n", "**", "text ", "```", "> ", "| a | b |", "|--|--|", "  ", "# h", "---",
            "*", "-", "1", "`x`", "\\n- ", "[l](https://a.b)", "https://c.d ", "\\\\*"];
        const pieces = (block) => [...(block.lines && block.type !== "code" ? inlinesOf(block.lines) : block.lines ?? []),
            ...(block.head ? [block.head, ...block.rows].flat().flatMap((cell) => inlinesOf([cell])) : []),
            ...(block.blocks ?? []).flatMap(pieces), ...(block.items ?? []).flat().flatMap(pieces)];
        const wrong = [];
        let read = 0;
        for (let k = 0; k < 3000; k++) {
            const text = Array.from({ length: random(14) }, () => bits[random(bits.length)]).join("");
            let blocks = [];
            for (let cut = 1; cut <= text.length; cut++) {
                const kept = Math.max(0, blocks.length - 2);
                blocks = [...blocks.slice(0, kept), ...blocksOf(text.slice(0, cut), blocks[kept]?.start ?? 0)];
                if (JSON.stringify(blocks) !== JSON.stringify(blocksOf(text.slice(0, cut)))) wrong.push(text.slice(0, cut));
            }
            for (const piece of blocks.flatMap(pieces)) {
                read += 1;
                if (piece.text && text.slice(piece.at, piece.at + piece.text.length) !== piece.text) wrong.push(text);
            }
        }
        return [wrong, read];
    """
    wrong, read = run(code, tmp_path)
    assert wrong == []
    assert read > 10_000


def test_long_and_hostile_markdown_is_read_with_bounded_work(tmp_path: Path) -> None:
    """100 KB of a mark take at most a few times as many pieces as characters, and nesting is bounded."""
    code = """
        const bits = ["*", "**a", "*a_b", "[", "[a](", "![", "`", "`a``", "<", "https://)", "\\\\", "~~a~~ ", "> ", "- ",
            "- - ", "1. ", "\\n", "- a\\n\\n", "|", "| a |\\n|--|\\n", "# # ", "```\\n", "*a **b ", "[x](a \\"", "   ", "-   "];
        let deepest = 0;
        const depth = (blocks) => 1 + Math.max(0, ...blocks.map((block) => depth(block.blocks ?? (block.items ?? []).flat())));
        const nesting = (lines) => {
            let open = 0;
            for (const piece of inlinesOf(lines)) deepest = Math.max(deepest, (open += piece.open ? 1 : piece.close ? -1 : 0));
        };
        const each = (blocks) => blocks.forEach((block) => {
            if (block.lines) nesting(block.lines);
            each(block.blocks ?? (block.items ?? []).flat());
        });
        const depths = bits.map((bit) => {
            const blocks = blocksOf(bit.repeat(Math.ceil(1e5 / bit.length)) + "x");
            each(blocks);
            return depth(blocks);
        });
        nesting([{ text: "*a **b ".repeat(5000) + "c** d* ".repeat(5000), at: 0 }]);
        return [Math.max(...depths), deepest];
    """
    blocks, inlines = run(code, tmp_path)
    assert blocks <= 10
    assert inlines == 12


# ── charts ──


def test_ticks_are_round_and_reach_the_value(tmp_path: Path) -> None:
    assert run("return [0.7, 1, 3.2, 17, 99, 1234].map(ticksOf)", tmp_path) == [
        [0, 0.2, 0.4, 0.6, 0.8],
        [0, 0.25, 0.5, 0.75, 1],
        [0, 1, 2, 3, 4],
        [0, 5, 10, 15, 20],
        [0, 25, 50, 75, 100],
        [0, 500, 1000, 1500],
    ]


def test_steps_that_arrive_together_share_their_time(tmp_path: Path) -> None:
    rounds = [{"from": 0, "to": 100}, {"from": 100, "to": 200}, {"from": 200, "to": 201}, {"from": 201, "to": 300}]
    spread = run(f"return spread({json.dumps(rounds)})", tmp_path)
    assert spread == [
        {"from": 0, "to": 100},
        {"from": 100, "to": 150.5},
        {"from": 150.5, "to": 201},
        {"from": 201, "to": 300},
    ]
