"""Names of the headers by which door, router and replica speak of a request."""

from __future__ import annotations

from collections.abc import Iterable

REPLICA = b"x-paceline-replica"  # in an answer: who gave it; in a request: who alone may
PREFIX = b"x-paceline-prefix"  # set by the door: beginnings of the prompt, the shortest first

Header = tuple[bytes, bytes]


def value_of(headers: Iterable[Header], name: bytes) -> str | None:
    """Find the first header of this name."""
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)


def without(headers: Iterable[Header], name: bytes) -> list[Header]:
    return [header for header in headers if header[0].lower() != name]
