"""Run: talk with a model here, while a server with its playground answers everybody else.

paceline run
paceline run ./model.gguf --port 9000
paceline run ./qwen2.5-1.5b --drafter ./qwen2.5-0.5b --open

The conversation on the terminal and the server share one engine. The server ends with the conversation;
`paceline serve` has all options of a server that stays.
"""

from __future__ import annotations

import sys
import webbrowser
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli import chat
from paceline.cli.options import load, whole
from paceline.cli.serve import check_extra
from paceline.errors import InvalidRequest
from paceline.server.settings import Settings

if TYPE_CHECKING:
    import socket


def add_arguments(parser: ArgumentParser) -> None:
    chat.add_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--port", type=whole, metavar="N", help="(default: 8000, or any free one)")
    group.add_argument("--open", action="store_true", help="open the playground in a browser")


def run(args: Namespace) -> int:
    check_extra()
    from paceline.models.resolve import served_name
    from paceline.server.background import serving

    listener = _listen(args.port)
    settings = Settings(port=listener.getsockname()[1], drain_timeout=0.0)  # to leave is to stop at once
    with listener:
        llm = load(args)
        with serving(llm, settings, listener=listener, name=served_name(args.target)) as speaker:
            conversation = chat.conversation_of(args, llm, speaker=speaker)
            print(f"playground {settings.url} · base_url {settings.url}/v1", file=sys.stderr, flush=True)
            if args.open:
                webbrowser.open(settings.url)
            conversation.run(chat.greeting(args, llm))
    return 0


def _listen(port: int | None) -> socket.socket:
    """Bind the port that was asked for, else the usual one, else any."""
    from paceline.server.process import bind

    usual = Settings() if port is None else Settings(port=port)
    try:
        return bind(usual)
    except InvalidRequest:
        if port is not None:
            raise
        return bind(replace(usual, port=0))
