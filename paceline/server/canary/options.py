"""The options of a canary, as settings and /admin/drafters give them. Needs nothing of the extra `serve`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.checks import check_integer, check_known, check_number
from paceline.errors import InvalidRequest

HEADER = "header:"
MAX_RATIO = 10.0
TYPES: dict[str, type] = {
    "drafter": str,
    "share": float,
    "by": str,
    "min_requests": int,
    "promote_at": float,
    "rollback_at": float,
}


@dataclass(frozen=True, slots=True)
class CanaryOptions:
    """A canary as it is asked for."""

    drafter: str  # name of a loaded drafter, words that load one, or none for plain decoding
    share: float = 0.05  # of the requests that get it
    by: str = "request"  # request, key, or header:NAME; all requests with the same one are in the same arm
    min_requests: int = 50  # pairs of requests before it can be promoted
    promote_at: float = 1.02  # speed over the default above which it is promoted
    rollback_at: float = 0.98  # speed over the default below which it is rolled back

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str) or not self.drafter:
            raise InvalidRequest(f"canary drafter must be a name or words, not {self.drafter!r}", param="drafter")
        check_number("canary share", self.share, 0, 1, open_low=True, param="share")
        if self.share == 1:
            raise InvalidRequest(
                "canary share must be below 1, or nothing is left to compare with; promote instead", param="share"
            )
        check_integer("canary min_requests", self.min_requests, 1, 1 << 30, param="min_requests")
        for name in ("promote_at", "rollback_at"):
            check_number(f"canary {name}", getattr(self, name), 0, MAX_RATIO, open_low=True, param=name)
        if self.promote_at < self.rollback_at:
            raise InvalidRequest(
                f"canary promote_at {self.promote_at:g} is below rollback_at {self.rollback_at:g}: a speed between "
                "them would be promoted and rolled back; raise promote_at, or lower rollback_at",
                param="promote_at",
            )
        self._check_by()

    def _check_by(self) -> None:
        if not isinstance(self.by, str) or not re.fullmatch(r"request|key|header:[A-Za-z0-9-]{1,64}", self.by):
            raise InvalidRequest(
                f"canary by is request, key, or header: with a name, such as header:x-user; not {self.by!r}", param="by"
            )

    @property
    def header(self) -> str | None:
        """The header that assigns, in small letters; None: another thing does."""
        return self.by.removeprefix(HEADER).lower() if self.by.startswith(HEADER) else None

    @classmethod
    def read(cls, given: Any) -> Self:
        """Read a mapping, or a text such as `drafter=eagle:./new share=0.1`."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = _parse(given)
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"a canary has options such as `drafter` and `share`, not {given!r}", param="canary")
        check_known(cls, given, kind="canary option")
        if "drafter" not in given:
            raise InvalidRequest("a canary needs a drafter: name a loaded one, or words that load one", param="drafter")
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _parse(text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in shlex.split(text):
        name, found, value = part.partition("=")
        if not found:
            raise InvalidRequest(f"canary options are such as share=0.1, not {part!r}", param="canary")
        given[name] = _value(name, value)
    return given


def _value(name: str, text: str) -> Any:
    kind = TYPES.get(name, str)
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"canary {name} must be {wanted}, not {text!r}", param=name) from None
