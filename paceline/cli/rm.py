"""Rm: remove models that `paceline pull` fetched.

paceline rm Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
paceline rm HuggingFaceTB/SmolLM2-360M-Instruct

A name without a quantisation means every file of the repository, unfinished ones included.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from paceline.sizes import format_size


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name that `paceline list` shows")


def run(args: Namespace) -> int:
    from paceline.models.hub.store import remove

    for name in args.models:
        print(f"{name}: removed, {format_size(remove(name))} free again", flush=True)
    return 0
