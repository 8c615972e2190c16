"""Colours on a terminal; NO_COLOR turns them off, FORCE_COLOR on."""

from __future__ import annotations

import os
from typing import TextIO

from paceline.types import Origin

GREEN_BOLD, BOLD, DIM, RED_BOLD, RESET = "\x1b[1;32m", "\x1b[1m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"

# Code of a control character → its escape: text of a model must not move the cursor or rename the window.
ESCAPED_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def wants_colour(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Style:
    """Formatting of text for one stream."""

    def __init__(self, stream: TextIO) -> None:
        self.coloured = wants_colour(stream)
        self._terminal = stream.isatty()

    def bold(self, text: str) -> str:
        return self._coloured(text, BOLD)

    def dim(self, text: str) -> str:
        return self._coloured(text, DIM)

    def alarm(self, text: str) -> str:
        return self._coloured(text, RED_BOLD)

    def plain(self, text: str) -> str:
        """Make text of the model safe for a terminal, without colour."""
        return text.translate(ESCAPED_CONTROLS) if self._terminal else text

    def token(self, text: str, origin: Origin) -> str:
        """Make text of the model safe for a terminal, in colour if it was drafted and accepted."""
        shown = self.plain(text)
        return self._coloured(shown, GREEN_BOLD) if origin is Origin.ACCEPTED else shown

    def _coloured(self, text: str, code: str) -> str:
        return f"{code}{text}{RESET}" if self.coloured and text else text
