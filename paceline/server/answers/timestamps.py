"""Times as texts, for the APIs that want them so."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(seconds: float | None = None) -> str:
    """Write a time, by default now, as RFC 3339 has it."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
