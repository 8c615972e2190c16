"""The governor of a running server as a table: measured speed-ups, who drafts now, why others do not, and prices.

It reads `/v1/speculation` every second and draws the table in its place. Without a terminal it prints the table once.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from paceline.cli.style import Style
from paceline.errors import InvalidRequest, NotReady

SECONDS = 1.0  # between two readings
TIMEOUT_SECONDS = 10.0
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K\n", "\x1b[J"  # draw over the old table: clearing it first flickers
CLEAR_SCREEN = "\x1b[2J"
COLUMNS = (
    f"{'drafter':<20} {'batch':>6} {'kind':<7} {'speed-up':>9} {'95 % interval':>14} {'tokens/step':>12} "
    f"{'accepted':>9}  state"
)

Told = Mapping[str, Any]


def watch(url: str, *, key: str | None, once: bool) -> int:
    """Show the table until Ctrl-C, or once."""
    style = Style(sys.stdout)
    told = read(url, key=key)
    if once or not sys.stdout.isatty():
        print("\n".join(table(told, style)))
        return 0
    sys.stdout.write(CLEAR_SCREEN)
    while True:
        lines = [*table(told, style), "", style.dim(f"{url} · every {SECONDS:g} s · Ctrl-C leaves")]
        sys.stdout.write(HOME + "".join(line + CLEAR_LINE for line in lines) + CLEAR_REST)
        sys.stdout.flush()
        time.sleep(SECONDS)
        told = read(url, key=key)


def read(url: str, *, key: str | None) -> Told:
    """Read /v1/speculation. Raises an error that says what to do if the server cannot tell it."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise InvalidRequest(f"--live takes the address of a server, such as http://127.0.0.1:8000, not {url!r}")
    key = key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{base}/v1/speculation", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        raise _refused(base, error.code) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NotReady(f"{base} does not answer as a Paceline server: {reason}; is it running there?") from None
    if not isinstance(told, dict) or "speedups" not in told:
        raise InvalidRequest(f"{base} runs a version that does not measure the speed-up: update the server")
    return told


def _refused(base: str, status: int) -> InvalidRequest | NotReady:
    if status in (401, 403):
        return InvalidRequest(f"{base} wants another API key: give --api-key, or set OPENAI_API_KEY")
    if status == 404:
        return InvalidRequest(f"{base} has no /v1/speculation: it is no Paceline server")
    return NotReady(f"{base} answered with status {status}: try again later")


def table(told: Told, style: Style) -> list[str]:
    """Make the lines of the table."""
    found = told["speedup"]
    overall = f"{found['ratio']:.2f} × plain ({_interval(found)})" if found else style.plain(str(told["speedup_note"]))
    drawn = f"{told['drawn_share']:.1%} of steps drawn to run plain"
    return [
        f"{style.bold(style.plain(told['model']))}  {told['running']} running, {told['waiting']} waiting",
        f"speed-up {style.bold(overall)}  {style.dim(drawn)}",
        "",
        style.bold(COLUMNS),
        *([_row(group, style) for group in told["speedups"]] or [style.dim("no step with a drafter yet")]),
        "",
        *_now(told, style),
        *_prices(told, style),
    ]


def _interval(found: Told) -> str:
    return f"{found['low']:.2f} to {found['high']:.2f}"


def _row(group: Told, style: Style) -> str:
    found = group["speedup"]
    state = group["off"] or ("on" if found else f"measuring, {group['runs']} runs so far")
    cells = (
        f"{group['drafter']:<20.20}",
        f"{group['batch']:>6}",
        f"{group['kind']:<7}",
        f"{found['ratio']:>7.2f} ×" if found else f"{'–':>9}",
        f"{_interval(found) if found else '–':>14}",
        f"{'–' if group['tokens_per_step'] is None else format(group['tokens_per_step'], '.2f'):>12}",
        f"{'–' if group['acceptance'] is None else format(group['acceptance'], '.0%'):>9}",
    )
    return style.plain(" ".join(cells)) + "  " + (style.alarm if group["off"] else style.plain)(state)


def _now(told: Told, style: Style) -> list[str]:
    drafting = [f"  {count} with {name}" for name, count in told["drafting_now"].items()]
    plain = [f"  {count}: {reason}" for reason, count in told["off_now"].items()]
    out = [f"  {name}: {reason}" for name, reason in told["drafters"].items() if reason]
    parts = (("drafting now", drafting or ["  none"]), ("not drafting", plain), ("out of use", out))
    return [line for title, lines in parts if lines for line in (style.bold(title), *map(style.plain, lines))]


def _prices(told: Told, style: Style) -> list[str]:
    """A drafted token must be right with a probability above its price."""
    lines = [
        f"  {name:<20.20} {_percent(price, 'entry')} to draft at all, {_percent(price, 'token')} for one more token"
        for name, price in told["prices"].items()
        if price["entry"] or price["token"]
    ]
    return [style.bold("a drafted token pays if it is right with"), *map(style.plain, lines)] if lines else []


def _percent(prices: Told, name: str) -> str:
    return f"{prices[name]:>5.0%}" if prices[name] <= 1 else ">100%"
