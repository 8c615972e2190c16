"""The playground in a real browser. Skipped where there is none: `pip install playwright`, and a Chromium, which
`playwright install chromium` brings, or a package such as Debian's chromium-headless-shell."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.llm import LLM
from paceline.server.bridge import Bridge
from paceline.server.process import ServerProcess, bind
from paceline.server.settings import Settings

playwright = pytest.importorskip("playwright.async_api", reason="needs Playwright and a browser")
KEY = "sk-playground"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@asynccontextmanager
async def served(llm: LLM) -> AsyncIterator[str]:
    settings = Settings(port=0, api_keys=(KEY,), drain_timeout=0)
    listening = asyncio.Event()
    with bind(settings) as listener:
        process = ServerProcess(Bridge(llm, model="tiny"), settings, source=None, announce=listening.set)
        running = asyncio.create_task(process.run(listener))
        await listening.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            process.stop()
            await running


@asynccontextmanager
async def browsing(url: str) -> AsyncIterator[Any]:
    """A page with a key, of which nothing may go wrong unseen, or go elsewhere."""
    wrong: list[str] = []
    async with playwright.async_playwright() as kit:
        try:
            browser = await kit.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(reason=f"no browser: {error.message.splitlines()[0]}")
        page = await browser.new_page(viewport={"width": 375, "height": 700}, color_scheme="dark")
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith((url, "data:")) or wrong.append(request.url))
        await page.goto(url)
        await playwright.expect(page.locator("#server")).to_contain_text("no key was given")
        await page.fill("#key", KEY)
        await page.press("#key", "Tab")
        await playwright.expect(page.locator("#server")).to_contain_text("tiny · drafter ngram")
        await page.fill("#max_tokens", "60")
        yield page
        await browser.close()
    assert wrong == []


def visit(llm: LLM, look: Callable[[Any], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), served(llm) as url, browsing(url) as page:
            await look(page)

    asyncio.run(whole())


async def ask(page: Any, text: str) -> list[dict[str, Any]]:
    """What the server tells of the same request, asked once more after the page has its answer."""
    async with page.expect_request("**/v1/chat/completions") as waiting:
        await page.fill("#prompt", text)
        await page.press("#prompt", "Enter")
    request = await waiting.value
    await playwright.expect(page.locator("#said")).to_contain_text("tokens")
    async with httpx.AsyncClient(timeout=20) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = await client.post(request.url, json=request.post_data_json, headers=headers)
    return [json.loads(event[6:]) for event in answer.text.split("\n\n") if event.startswith("data: {")]


def test_colours_are_the_servers_record(llm: LLM) -> None:
    async def look(page: Any) -> None:
        await page.fill("#max_tokens", "150")  # long enough for a random model to repeat itself
        chunks = await ask(page, "Hello, hello, hello")
        told = [origin for chunk in chunks if chunk.get("paceline") for origin in chunk["paceline"]["origins"]]
        spans = page.locator("#log .answer .t")
        assert await spans.evaluate_all("spans => spans.map((span) => span.classList[1])") == told
        assert {"accepted", "bonus", "plain"} == {*told}
        said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert await page.locator("#log .answer").evaluate("box => box.textContent") == said
        await page.focus("#log .answer")
        await page.keyboard.press("ArrowRight")
        await playwright.expect(page.locator("#tip")).to_contain_text("probability")
        await playwright.expect(page.locator("#timeline rect")).to_have_count(len(told))

    visit(llm, look)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_race_ends_identical(llm: LLM, temperature: str) -> None:
    async def look(page: Any) -> None:
        await page.fill("#temperature", temperature)
        await page.focus("#tab-chat")
        await page.keyboard.press("ArrowRight")
        await page.click("#go")
        await playwright.expect(page.locator("#verdict")).to_contain_text("identical")
        assert await page.locator("#plain-text .t.accepted").count() == 0
        assert await page.locator("#plain-text .t.plain").count() > 0

    visit(llm, look)


def test_nothing_sticks_out_of_a_narrow_screen(llm: LLM) -> None:
    async def look(page: Any) -> None:
        await ask(page, "a long word: " + 80 * "w")
        for tab in ("chat", "race", "live"):
            await page.click(f"#tab-{tab}")
            assert await page.evaluate("document.documentElement.scrollWidth") == 375
        await playwright.expect(page.locator("#acceptance-now")).to_contain_text("%")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        await page.click("#theme")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"

    visit(llm, look)


def test_what_is_refused_is_said_and_can_be_asked_again(llm: LLM) -> None:
    async def look(page: Any) -> None:
        await page.fill("#max_tokens", "0")
        await page.fill("#prompt", "again")
        await page.press("#prompt", "Enter")
        await playwright.expect(page.locator("#problem")).to_contain_text("max_tokens must be")
        await playwright.expect(page.locator("#prompt")).to_have_value("again")
        await playwright.expect(page.locator("#log *")).to_have_count(0)

    visit(llm, look)
