"""Names of models on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,120}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and the quantisation or file that is asked for; None: whatever is preferred."""

    id: str  # org/name
    quant: str | None = None

    def __str__(self) -> str:
        return self.id if self.quant is None else f"{self.id}:{self.quant}"


def hub_name(name: str) -> HubName | None:
    """Read org/name[:quant]; None if the text is no such name."""
    found = NAME.fullmatch(name)
    return None if found is None or ".." in name else HubName(found[1], found[2])
