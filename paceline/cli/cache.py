"""Cache: the packed weights that make later starts fast: list them, or clear them.

paceline cache
paceline cache clear

A model is packed for this machine's kernels at its first start, and read from the cache at later ones. The least
recently used make room for new ones. PACELINE_CACHE names the folder, PACELINE_CACHE_SIZE its size (10G; 0: no cache).
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from paceline.cli.style import Style
from paceline.sizes import format_size

if TYPE_CHECKING:
    from paceline.runner.loading.pack_store import Entry


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "clear"), default="list", help="default: list")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: Namespace) -> int:
    from paceline.runner.loading.pack_store import cache_limit, clear, entries, pack_folder

    facts = {"folder": str(pack_folder()), "limit_bytes": cache_limit()}
    if args.action == "clear":
        freed = clear()
        print(json.dumps(facts | {"freed_bytes": freed}) if args.json else f"freed {format_size(freed)}")
        return 0
    found = entries()[::-1]  # the last used first
    total = sum(entry.bytes for entry in found)
    if args.json:
        print(json.dumps(facts | {"bytes": total, "packs": [_facts(entry) for entry in found]}))
        return 0
    print(Style(sys.stdout).bold(str(pack_folder())))
    for entry in found:
        print(f"  {format_size(entry.bytes):>10}  {_date(entry.used)}  {entry.model} ({entry.format}, {entry.variant})")
    limit = format_size(cache_limit()) if cache_limit() else "nothing: the cache is off"
    print(f"{format_size(total)} in {len(found)} packs, of {limit}")
    return 0


def _facts(entry: Entry) -> dict[str, object]:
    return {
        "model": entry.model,
        "format": entry.format,
        "variant": entry.variant,
        "bytes": entry.bytes,
        "used": _date(entry.used),
        "path": str(entry.path),
    }


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
