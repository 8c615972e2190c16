"""Prompts that are being read, so that requests with the same beginning wait for one of them and share its pages.

The prefix cache has a page once a request has read it. Requests that begin at the same time, such as forks, would all
read their common beginning. Here the first of them leads, and the others begin when it has read its prompt.

This only decides when a request begins. A page that the cache has evicted in the meantime is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.kernels.base import PAGE_SIZE

MAX_PAGES = 1 << 17  # pages that are remembered as read


def page_keys(prompt: Sequence[int], *, salt: str = "") -> list[int]:
    """Return a key for each full page of a prompt. Prompts share a key where they are equal up to the page's end, and
    have one salt."""
    key, keys = hash(salt), []
    for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE):  # the last token is always computed
        key = hash((key, *prompt[end - PAGE_SIZE : end]))
        keys.append(key)
    return keys


class Prefixes:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._leaders: dict[int, str] = {}  # key of a page that is being read → request that reads it
        self._led: dict[str, list[int]] = {}  # request → keys that it leads
        self._read: dict[int, None] = {}  # keys of pages that were read, oldest first

    def leader(self, keys: Sequence[int]) -> str | None:
        """Return the request that reads most of the pages that nobody has read yet; None: no request reads that many.

        Waiting for a small part of them would take longer than reading it twice."""
        unread = [key for key in keys if key not in self._read]
        shared = [key for key in unread if key in self._leaders]
        return self._leaders[shared[-1]] if shared and 2 * len(shared) >= len(unread) else None

    def begin(self, request_id: str, keys: Sequence[int]) -> None:
        """Let a request lead the pages that nobody reads or has read."""
        own = [key for key in keys if key not in self._leaders and key not in self._read]
        self._led[request_id] = own
        self._leaders |= dict.fromkeys(own, request_id)

    def reads(self, request_id: str) -> bool:
        return request_id in self._led

    def end(self, request_id: str) -> None:
        """Note that a request has read its prompt, or has ended."""
        for key in self._led.pop(request_id):
            del self._leaders[key]
            self._read[key] = None
        while len(self._read) > MAX_PAGES:
            del self._read[next(iter(self._read))]
