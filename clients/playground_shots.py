"""Pictures of the playground for the docs, by a real browser at a running server.

    python clients/playground_shots.py http://127.0.0.1:8000 docs/images

Needs `pip install playwright pillow` and a Chromium. Pictures have 128 colours, so that they stay below 150 KB."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

MAX_BYTES = 150_000  # of a picture
MAX_QUESTIONS = 200  # until the server has measured its speed-up
PROMPTS = "import('/playground/examples.js').then((made) => made.EXAMPLES.map((example) => example.prompt))"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
JSON = {"content-type": "application/json"}
SHOTS: dict[str, tuple[int, str, Callable[[Page], None]]] = {}  # name → width, theme, what to do first


def shot(width: int, theme: str) -> Callable[[Callable[[Page], None]], Callable[[Page], None]]:
    def register(prepare: Callable[[Page], None]) -> Callable[[Page], None]:
        SHOTS[prepare.__name__] = (width, theme, prepare)
        return prepare

    return register


@shot(1280, "light")
def first(page: Page) -> None:
    """The first view of a server that has measured its speed-up."""
    page.wait_for_selector("#hero-speedup:not([hidden])")


@shot(1280, "light")
def chat(page: Page) -> None:
    """An answer, and its steps."""
    answer(page, 0)
    page.click(".facts summary")
    page.locator(".facts svg").scroll_into_view_if_needed()


@shot(1280, "dark")
def race(page: Page) -> None:
    page.click("#tab-race")
    page.click("#go")
    page.wait_for_selector("#verdict.same", timeout=120_000)
    page.wait_for_timeout(800)  # the bars grow


@shot(1280, "light")
def live(page: Page) -> None:
    for example in (3, 2, 1):
        answer(page, example)
        page.click("#new")
    page.click("#tab-live")
    page.wait_for_timeout(3000)


@shot(390, "light")
def phone(page: Page) -> None:
    answer(page, 3)


@shot(390, "dark")
def phone_first(page: Page) -> None:
    page.wait_for_selector("#hero-speedup:not([hidden])")


def answer(page: Page, example: int) -> None:
    page.click(f".example >> nth={example}")
    page.wait_for_selector(".facts", timeout=120_000)


def warm_up(url: str, prompts: Sequence[str]) -> None:
    """Ask the page's examples until the server has measured its speed-up."""
    for i in range(MAX_QUESTIONS):
        with urllib.request.urlopen(f"{url}/v1/speculation") as answer:
            if json.load(answer)["speedup"] is not None:
                return
        messages = [{"role": "user", "content": prompts[i % len(prompts)]}]
        body = {"messages": messages, "seed": i, "max_tokens": 150}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), JSON)
        urllib.request.urlopen(request).read()


def save(picture: bytes, path: Path) -> None:
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path} {size / 1000:.0f} kB")
    assert size < MAX_BYTES, f"{path} has {size} bytes: {MAX_BYTES} are allowed"


def visit(browser: Browser, url: str, width: int, theme: Any, prepare: Callable[[Page], None]) -> bytes:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#card dt", state="attached")
    prepare(page)
    page.mouse.move(0, 0)
    picture = page.screenshot()
    context.close()
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=SHOTS, help="one picture")
    args = parser.parse_args()
    with sync_playwright() as kit:
        browser = kit.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(args.url)
        warm_up(args.url.rstrip("/"), page.evaluate(PROMPTS))
        page.close()
        for name, (width, theme, prepare) in SHOTS.items():
            if args.only in (None, name):
                path = args.folder / f"playground-{name.replace('_', '-')}.png"
                save(visit(browser, args.url, width, theme, prepare), path)
        browser.close()


if __name__ == "__main__":
    main()
