"""A real browser that visits the playground of a real server. Importing this skips a test where there is none.

It needs `pip install playwright` and a Chromium, which `playwright install chromium` brings, or a package such as
Debian's chromium."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from paceline.llm import LLM
from paceline.server.bridge import Bridge
from paceline.server.process import ServerProcess, bind
from paceline.server.settings import Settings

playwright = pytest.importorskip("playwright.async_api", reason="needs Playwright and a browser")
KEY = "sk-playground"
HELLO = "Hello, hello, hello"  # a random model answers it at length, at temperature 0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@dataclass(frozen=True)
class Screen:
    width: int
    theme: str

    def __str__(self) -> str:
        return f"{self.width}-{self.theme}"


WIDE, PHONE = Screen(1280, "light"), Screen(390, "dark")
SCREENS = [WIDE, Screen(1280, "dark"), Screen(390, "light"), PHONE]


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


class Site:
    """A server and a browser, shared by the tests. Each visit has storage of its own."""

    def __init__(self, runner: asyncio.Runner, url: str, browser: Any) -> None:
        self._runner, self._url, self._browser = runner, url, browser

    def visit(self, look: Callable[[Any], Awaitable[None]], screen: Screen = WIDE) -> None:
        async def whole() -> None:
            async with asyncio.timeout(60), self._page(screen) as page:
                await look(page)

        self._runner.run(whole())

    @asynccontextmanager
    async def _page(self, screen: Screen) -> AsyncIterator[Any]:
        """A page with a key, of which nothing may go wrong unseen, or go elsewhere."""
        wrong: list[str] = []
        own = (self._url, "blob:")
        size = {"width": screen.width, "height": 760}
        context = await self._browser.new_context(viewport=size, color_scheme=screen.theme, accept_downloads=True)
        page = await context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda said: "Content Security" in said.text and wrong.append(said.text))
        page.on("request", lambda request: request.url.startswith(own) or wrong.append(request.url))
        await page.goto(self._url)
        await playwright.expect(page.locator("#unlock")).to_contain_text("wants an API key")
        await page.fill("#key", KEY)
        await page.press("#key", "Enter")
        await playwright.expect(page.locator("#unlock")).to_be_hidden()
        yield page
        await context.close()
        assert wrong == []


@pytest.fixture(scope="module")
def site(llm: LLM) -> Iterator[Site]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            url = runner.run(stack.enter_async_context(served(llm)))
            kit = runner.run(stack.enter_async_context(playwright.async_playwright()))
            browser = runner.run(launched(kit))
            yield Site(runner, url, browser)
            runner.run(browser.close())
        finally:
            runner.run(stack.aclose())


async def launched(kit: Any) -> Any:
    try:
        return await kit.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    except playwright.Error as error:
        pytest.skip(reason=f"no browser: {error.message.splitlines()[0]}")


async def put(page: Any, **controls: str | bool) -> None:
    """Set controls. On a narrow screen they are in a drawer."""
    narrow = await page.locator("#show-settings").is_visible()
    if narrow:
        await page.click("#show-settings")
    for name, value in controls.items():
        control = page.locator(f"#{name.replace('__', '-')}")
        await (control.set_checked(value) if isinstance(value, bool) else control.fill(value))
    if narrow:
        await page.keyboard.press("Escape")
        await playwright.expect(page.locator("#settings")).not_to_be_in_viewport()


async def ask(page: Any, text: str) -> list[dict[str, Any]]:
    """What the server tells of the same request, asked once more after the page has its answer."""
    before = await page.locator(".facts").count()
    async with page.expect_request("**/v1/chat/completions") as waiting:
        await page.fill("#prompt", text)
        await page.press("#prompt", "Enter")
    request = await waiting.value
    await playwright.expect(page.locator(".facts")).to_have_count(before + 1)
    async with httpx.AsyncClient(timeout=20) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = await client.post(request.url, json=request.post_data_json, headers=headers)
    return [json.loads(event[6:]) for event in answer.text.split("\n\n") if event.startswith("data: {")]
