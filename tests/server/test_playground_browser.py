"""The playground in a real browser, by real clicks, wide and narrow, light and dark. Skipped where there is none."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import pytest

from paceline.llm import LLM
from tests.server.browser import HELLO, KEY, PHONE, SCREENS, WIDE, Screen, Site, ask, playwright, put
from tests.server.browser import site as site

STEP_SECONDS = 0.05  # of an engine that is slow enough to be stopped


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def style_of(page: Any, selector: str) -> list[str]:
    read = """element => ["backgroundColor", "borderBottomStyle", "borderBottomColor", "fill"]
        .map((name) => getComputedStyle(element)[name])"""
    styles: list[str] = await page.locator(selector).first.evaluate(read)
    return styles


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_a_first_visit(site: Site, screen: Screen) -> None:
    async def look(page: Any) -> None:
        await playwright.expect(page.locator("#hero")).to_contain_text("tiny checks several guesses in one step")
        await playwright.expect(page.locator("#hero-note")).to_contain_text("speed-up over plain decoding")
        await playwright.expect(page.locator(".example")).to_have_count(4)
        assert await page.evaluate("document.documentElement.dataset.theme") == screen.theme
        await put(page, temperature="0", max_tokens="150", formatted=False)
        await page.click(".example >> nth=3")
        await playwright.expect(page.locator(".facts")).to_contain_text("tokens per step")
        await check_legends(page)
        await check_layout(page, screen)
        for tab in ("race", "live"):
            await page.click(f"#tab-{tab}")
            assert await page.evaluate("document.documentElement.scrollWidth") == screen.width
        await check_live(page)
        await page.click("#theme")
        other = {"light": "dark", "dark": "light"}[screen.theme]
        assert await page.evaluate("document.documentElement.dataset.theme") == other
        await page.reload()
        assert await page.evaluate("document.documentElement.dataset.theme") == other

    site.visit(look, screen)


async def check_legends(page: Any) -> None:
    """Tokens look as the legend has them, and columns of the chart as theirs; without colours there is no legend."""
    await page.click(".facts summary")
    for origin in ("accepted", "bonus", "plain"):
        token = f"#log .t.{origin}"
        if await page.locator(token).count():
            assert (await style_of(page, f".bar .legend .{origin}"))[:3] == (await style_of(page, token))[:3]
            swatch, column = (
                await style_of(page, f".facts .swatches .{origin}"),
                await style_of(page, f".facts rect.{origin}"),
            )
            assert swatch[0] == column[3]
    await playwright.expect(page.locator(".facts svg text.title")).to_have_text(
        ["tokens in the step", "seconds after the request"]
    )
    assert await page.locator(".facts svg").get_attribute("aria-label")
    assert await page.locator(".facts rect").count() == await page.locator("#log .t").count()
    await put(page, colours=False)
    await playwright.expect(page.locator(".bar .legend")).to_be_hidden()
    plain, accepted = await style_of(page, "#log .t.plain"), await style_of(page, "#log .t.accepted")
    assert plain[0] == accepted[0]
    await put(page, colours=True)


async def check_layout(page: Any, screen: Screen) -> None:
    """Nothing sticks out, the box stays at the bottom, and side panels are beside the chat or out of the way."""
    assert await page.evaluate("document.documentElement.scrollWidth") == screen.width
    assert await page.evaluate("document.documentElement.scrollHeight") == 760
    box = await page.locator("#prompt").bounding_box()
    assert box["y"] + box["height"] > 660
    for panel in ("#history", "#settings"):
        expected = playwright.expect(page.locator(panel))
        await (expected.to_be_in_viewport() if screen.width > 1152 else expected.not_to_be_in_viewport())


async def check_live(page: Any) -> None:
    await playwright.expect(page.locator("#acceptance-now")).to_contain_text("%")
    await playwright.expect(page.locator("#acceptance text.title")).to_have_text(
        ["% of drafts", "position in the draft"]
    )
    await playwright.expect(page.locator("#speed text.title")).to_have_text(["tokens per second", "seconds before now"])
    assert await page.locator("#speed text.tick").count() > 5
    assert "now" in await page.locator("#speed").get_attribute("aria-label")
    await playwright.expect(page.locator("#counts")).to_contain_text("Drafted tokens")


def test_colours_are_the_servers_record(site: Site) -> None:
    async def look(page: Any) -> None:
        await put(
            page, temperature="0", max_tokens="150", logprobs=True
        )  # long enough for a random model to repeat itself
        chunks = await ask(page, HELLO)
        told = [origin for chunk in chunks if chunk.get("paceline") for origin in chunk["paceline"]["origins"]]
        assert {"accepted", "bonus", "plain"} == {*told}
        spans = page.locator("#log .answer .t")
        formatted = await spans.evaluate_all("spans => spans.map((span) => [span.dataset.i, span.classList[1]])")
        assert all(origin == told[int(i)] for i, origin in formatted)
        assert [int(i) for i, _ in formatted] == sorted(int(i) for i, _ in formatted)
        await put(page, formatted=False)
        assert await spans.evaluate_all("spans => spans.map((span) => span.classList[1])") == told
        assert await page.locator("#log .answer").evaluate("box => box.textContent") == text_of(chunks)
        await page.focus("#log .answer")
        await page.keyboard.press("ArrowRight")
        await playwright.expect(page.locator("#tip")).to_contain_text("probability")
        await spans.nth(told.index("accepted")).hover()
        await playwright.expect(page.locator("#tip")).to_contain_text("accepted from ngram")

    site.visit(look)


@pytest.mark.parametrize(("temperature", "screen"), [("0", WIDE), ("1", PHONE)], ids=str)
def test_a_race_ends_identical(site: Site, temperature: str, screen: Screen) -> None:
    async def look(page: Any) -> None:
        await put(page, temperature=temperature, max_tokens="60")
        await page.focus("#tab-chat")
        await page.keyboard.press("ArrowRight")
        assert "class Account" in await page.locator("#race-prompt").input_value()
        await page.fill("#race-prompt", HELLO)
        await page.set_checked("#together", temperature == "1")
        await page.click("#go")
        await playwright.expect(page.locator("#verdict")).to_contain_text("Identical texts")
        await playwright.expect(page.locator("#verdict")).to_contain_text("× as fast")
        assert await page.locator("#plain-text .t.accepted").count() == 0
        assert await page.locator("#plain-text .t.plain").count() > 0
        assert await page.locator("#plain-text").inner_text() == await page.locator("#fast-text").inner_text()
        for lane in ("plain", "fast"):
            await playwright.expect(page.locator(f"#{lane}-speed")).to_contain_text("tokens/s")
        await page.click("#tab-live")
        await playwright.expect(page.locator("#reasons")).to_contain_text("The request switched speculation off.")

    site.visit(look, screen)


@pytest.mark.parametrize("screen", [WIDE, PHONE], ids=str)
def test_conversations_survive_a_reload(site: Site, screen: Screen) -> None:
    async def look(page: Any) -> None:
        await put(page, temperature="0", max_tokens="12", system="Be kind.", formatted=False)
        chunks = await ask(page, "First question")
        await page.evaluate("localStorage.setItem('paceline.chat.broken', '{')")
        await page.reload()
        await playwright.expect(page.locator("#log .answer")).to_have_text(text_of(chunks), use_inner_text=True)
        tokens = chunks[-1]["usage"]["completion_tokens"]
        assert await page.locator("#log .answer .t").count() == tokens
        assert await page.locator("#system").input_value() == "Be kind."
        await show_history(page)
        await page.click("#new")
        await playwright.expect(page.locator("#hero")).to_be_visible()
        await ask(page, "Second question")
        await check_list(page)
        await check_exports(page, tokens)

    site.visit(look, screen)


async def show_history(page: Any) -> None:
    if await page.locator("#show-history").is_visible() and not await page.locator("#history.open").count():
        await page.click("#show-history")


async def check_list(page: Any) -> None:
    """Rename, delete, undo and open."""
    await show_history(page)
    await playwright.expect(page.locator("#chats .open")).to_have_text(["Second question", "First question"])
    await page.locator("#chats li").nth(1).hover()
    await page.click("[aria-label='Rename “First question”']")
    await page.fill("#chats input", "Renamed")
    await page.press("#chats input", "Enter")
    await playwright.expect(page.locator("#chats .open")).to_have_text(["Renamed", "Second question"])
    await page.locator("#chats li").nth(1).hover()
    await page.click("[aria-label='Delete “Second question”']")
    await playwright.expect(page.locator("#chats .open")).to_have_text(["Renamed"])
    await page.click("#toast button")
    await playwright.expect(page.locator("#chats .open")).to_have_count(2)
    await page.click("text=Renamed")
    await playwright.expect(page.locator("#log .bubble")).to_have_text("First question")


async def check_exports(page: Any, tokens: int) -> None:
    async with page.expect_download() as waiting:
        await page.click("#export-md")
    made = await waiting.value
    assert made.suggested_filename == "renamed.md"
    with open(await made.path(), encoding="utf-8") as file:
        assert file.read().startswith("# Renamed\n\n## You\n\nFirst question\n\n## tiny\n\n")
    async with page.expect_download() as waiting:
        await page.click("#export-json")
    with open(await (await waiting.value).path(), encoding="utf-8") as file:
        whole = json.load(file)
    question, answer = whole["nodes"]
    assert (question["content"], answer["role"], answer["count"]) == ("First question", "assistant", tokens)
    assert answer["asked"]["system"] == "Be kind."


@pytest.mark.parametrize("screen", [WIDE, PHONE], ids=str)
def test_answers_are_continued_regenerated_and_questions_edited(site: Site, screen: Screen) -> None:
    async def look(page: Any) -> None:
        await put(page, temperature="0", max_tokens="10", formatted=False)
        await ask(page, HELLO)
        answer = page.locator("#log .answer")
        first = await answer.inner_text()
        await playwright.expect(page.locator(".end")).to_contain_text("Cut at max tokens (10).")
        await page.click("text=Continue")
        await playwright.expect(page.locator(".facts")).to_contain_text("20 tokens")
        assert (await answer.inner_text()).startswith(first)
        assert await page.locator("#log .answer .t").count() == 20
        await page.click("text=Regenerate")
        await playwright.expect(page.locator(".assistant .branch")).to_have_text("‹2/2›")
        await page.click("[aria-label='Version before']")
        await playwright.expect(page.locator(".assistant .branch")).to_have_text("‹1/2›")
        await page.click(".user >> text=Edit")
        await page.fill(".editor textarea", "Another one")
        await page.press(".editor textarea", "Enter")
        await playwright.expect(page.locator(".bubble")).to_have_text("Another one")
        await playwright.expect(page.locator(".user .branch")).to_have_text("‹2/2›")
        await playwright.expect(page.locator(".facts")).to_contain_text("tokens")
        await page.click(".user [aria-label='Version before']")
        await playwright.expect(page.locator(".bubble")).to_have_text(HELLO)
        await playwright.expect(page.locator(".assistant .branch")).to_have_text("‹2/2›")

    site.visit(look, screen)


def test_an_answer_is_stopped_and_copied(site: Site, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step

    def slow() -> Any:
        time.sleep(STEP_SECONDS)
        return step()

    async def look(page: Any) -> None:
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await put(page, temperature="0", max_tokens="200")
        await page.select_option("#drafter", "off")
        for key in ("click", "Escape"):
            await page.click("#new")
            await page.fill("#prompt", HELLO)
            await page.press("#prompt", "Shift+Enter")
            assert await page.locator("#prompt").input_value() == f"{HELLO}\n"
            await page.press("#prompt", "Enter")
            await playwright.expect(page.locator("#meter")).to_contain_text("tokens per step")
            await playwright.expect(page.locator("#send")).to_be_hidden()
            await (page.click("#stop") if key == "click" else page.keyboard.press("Escape"))
            await playwright.expect(page.locator(".end").last).to_contain_text("Stopped.")
            await playwright.expect(page.locator("#send")).to_be_visible()
        await page.locator("[aria-label='Copy the answer']").last.click()
        await playwright.expect(page.locator("#toast")).to_contain_text("Copied")
        stored = """Object.keys(localStorage).filter((key) => key.startsWith("paceline.chat."))
            .map((key) => JSON.parse(localStorage[key]).nodes.at(-1).content)"""
        assert await page.evaluate("navigator.clipboard.readText()") in await page.evaluate(stored)

    monkeypatch.setattr(llm.engine, "step", slow)
    site.visit(look)


def test_what_is_refused_is_said_and_can_be_asked_again(site: Site) -> None:
    async def look(page: Any) -> None:
        await put(page, max_tokens="0")
        await page.fill("#prompt", "again")
        await page.press("#prompt", "Enter")
        await playwright.expect(page.locator("#problem")).to_contain_text("max_tokens must be")
        await playwright.expect(page.locator("#prompt")).to_have_value("again")
        await playwright.expect(page.locator("#log *")).to_have_count(0)
        await page.click("#problem-close")
        await playwright.expect(page.locator("#problem")).to_be_hidden()
        assert await page.evaluate("sessionStorage.getItem('paceline.key')") == KEY
        assert KEY not in await page.evaluate("JSON.stringify(localStorage)")
        await page.click("#forget-key")
        await playwright.expect(page.locator("#unlock")).to_be_visible()
        await page.fill("#key", "sk-wrong")
        await page.press("#key", "Enter")
        await playwright.expect(page.locator("#unlock")).to_contain_text("does not know this API key")

    site.visit(look)


async def not_ready(body: dict[str, Any], route: Any) -> None:
    await route.fulfill(status=503, json=body)


def test_the_state_of_the_server_is_said(site: Site) -> None:
    async def look(page: Any) -> None:
        state = page.locator("#state")
        await playwright.expect(state).to_be_hidden()
        await page.click("#tab-live")  # where the page asks every second
        for body, words in (
            ({"status": "starting", "percent": 42, "doing": "reading"}, "The model is loading: reading, 42 %."),
            ({"status": "draining"}, "shutting down"),
            ({"status": "dead"}, "restart the server"),
        ):
            await page.route("**/ready", partial(not_ready, body))
            await playwright.expect(state).to_contain_text(words, timeout=15_000)
        await page.route("**/ready", lambda route: route.abort())
        await playwright.expect(state).to_contain_text("does not answer", timeout=15_000)
        await page.unroute("**/ready")
        await playwright.expect(state).to_be_hidden(timeout=15_000)

    site.visit(look)


HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)><svg onload=alert(1)>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) <javascript:alert(1)>",
    "[c](data:text/html,<script>alert(1)</script>)",
    "[d](vbscript:x) [e](//evil.example/x) [f](\\\\evil) ![g](https://evil.example/pixel.png) [h](https://ok.example)",
    "| <b>x</b> |\n|--|\n| <img src=x onerror=alert(1)> |",
    "```html\n<script>alert(1)</script>\n",
    "**__*~~`[<>" * 50,
    "> " * 100_000,
    "- " * 50_000,
    "*a **b " * 5_000 + "c** d* " * 5_000,
    "[" * 50_000 + "](javascript:alert(1))" * 2_000,
    "\ud83d" + "﷽" * 1_000 + "\u202e\u0000",
]
SHOW = """async (texts) => {
    const { View } = await import("/playground/render.js");
    const found = { tags: [], links: [], handlers: 0, deepest: 0, texts: [] };
    for (const text of texts) {
        const box = document.body.appendChild(document.createElement("div"));
        const view = new View(box);
        for (const cut of [0.1, 0.5, 0.9, 1]) view.show(text.slice(0, cut * text.length), []);
        for (const element of box.querySelectorAll("*")) {
            found.tags.push(element.tagName);
            found.handlers += [...element.attributes].filter(({ name }) => /^on|^style$/.test(name)).length;
            if (element.href) found.links.push([element.getAttribute("href"), element.rel, element.target]);
            let depth = 0;
            for (let each = element; each !== box; each = each.parentElement) depth++;
            found.deepest = Math.max(found.deepest, depth);
        }
        found.texts.push(box.textContent.length);
        box.remove();
    }
    return { ...found, tags: [...new Set(found.tags)] };
}"""
GROW = """async () => {
    const { View } = await import("/playground/render.js");
    const box = document.body.appendChild(document.createElement("div"));
    const view = new View(box);
    let most = 0, text = "";
    const watch = new MutationObserver(() => {});
    watch.observe(box, { childList: true });
    for (let i = 0; i < 400; i++) {
        text += `Paragraph ${i} with **bold** words.\\n\\n`;
        view.show(text, []);
        const counts = watch.takeRecords().map((record) => record.addedNodes.length + record.removedNodes.length);
        most = Math.max(most, counts.reduce((sum, count) => sum + count, 0));
    }
    return [box.childElementCount, most];
}"""


def test_hostile_markdown_does_nothing(site: Site) -> None:
    async def look(page: Any) -> None:
        found = await page.evaluate(SHOW, HOSTILE)
        harmless = "P UL OL LI BLOCKQUOTE DIV SPAN PRE CODE BUTTON STRONG EM DEL A BR HR TABLE THEAD TBODY TR TH TD"
        assert set(found["tags"]) <= {*harmless.split(), "H3", "H4", "H5", "H6"}
        assert [href for href, _, _ in found["links"]] == ["https://evil.example/pixel.png", "https://ok.example"]
        assert {rel for _, rel, _ in found["links"]} == {"noopener noreferrer nofollow"}
        assert (found["handlers"], found["deepest"] <= 40) == (0, True)
        assert all(length > 0 for length in found["texts"][:6])
        blocks, most = await page.evaluate(GROW)
        assert blocks == 400
        assert most <= 5  # the last two blocks go, and three come: however long the text is

    site.visit(look)
