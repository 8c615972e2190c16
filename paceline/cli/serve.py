"""Serve: an OpenAI-compatible server with a playground, on http://127.0.0.1:8000.

paceline serve
paceline serve ./model.gguf --port 9000 --served-name mine
paceline serve ./qwen2.5-1.5b --drafter ./qwen2.5-0.5b --drafter ngram --api-keys secret

Every option is also an environment variable (--max-waiting: PACELINE_MAX_WAITING, MODEL: PACELINE_MODEL) and a line of
the file given by --config (max_waiting: 64). A flag counts before the environment, that before the file. Lists are
given by repeating the flag, with commas in the environment (drafters: with spaces), and as lists in the file.

Stop with Ctrl-C or SIGTERM; SIGHUP reads limits and keys anew.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from paceline.checks import check_integer
from paceline.cli.options import add_model_options, load
from paceline.errors import MissingExtra
from paceline.server.gather import gather, is_size
from paceline.server.launch import DEFAULTS, ENGINE, LOADING, OPTIONS, settings_of, words
from paceline.server.settings import HELP, HINTS, Settings

EXTRA = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser, default_target=DEFAULTS["model"])
    parser.set_defaults(target=None, format=None, device=None)  # None: not given
    parser.add_argument("--config", metavar="FILE", help="YAML with options")
    group = parser.add_argument_group("server")
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        group.add_argument(
            option, dest=field.name, default=None, help=_help(field.name, field.default), **_reader(field.name)
        )


def check_extra() -> None:
    """Raise MissingExtra where a package of the server is not installed."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"the server needs {', '.join(missing)}", extra="serve")


def run(args: Namespace) -> int:
    check_extra()
    from paceline.models.resolve import served_name
    from paceline.server import logs
    from paceline.server.process import bind, serve

    given = options_of(args, os.environ)
    settings = settings_of(given)
    logs.start_log(as_json=settings.log_json, verbose=args.verbose)
    listener = bind(settings)
    with listener:
        serve(
            lambda progress: load(_for_loading(args, given), report=progress),
            settings,
            listener=listener,
            source=lambda: settings_of(options_of(args, os.environ)),
            model=served_name(given["model"]),
        )
    return 0


def options_of(args: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect the options given as flags, in the environment or in a file, and the defaults of what to load."""
    flags = vars(args) | {"model": args.target}
    file = args.config or environ.get("PACELINE_CONFIG")
    return DEFAULTS | gather(OPTIONS, flags=flags, environ=environ, file=file)


def _for_loading(args: Namespace, given: Mapping[str, Any]) -> Namespace:
    """Make the arguments for `load` as if every option had been a flag."""
    if given.get("threads") is not None:
        check_integer("threads", given["threads"], 1, 4096)
    said = {name: given.get(name) for name in (*LOADING, *ENGINE)}
    return Namespace(**{**vars(args), **said, "target": said["model"], "drafter": words(said["drafter"])})


def _reader(name: str) -> dict[str, Any]:
    hint = HINTS[name]
    if hint is bool:
        return {"action": BooleanOptionalAction}
    if hint == tuple[str, ...]:
        return {"action": "append", "metavar": "TEXT"}
    metavar = (
        "BYTES" if is_size(name) else {int: "N", int | None: "N", float: "SECONDS", float | None: "X"}.get(hint, "TEXT")
    )
    return {"metavar": metavar}


def _help(name: str, default: Any) -> str:
    if default is None or default == ():
        return HELP[name]
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    return f"{HELP[name]} (default: {', '.join(shown) if isinstance(shown, tuple) else shown})"
