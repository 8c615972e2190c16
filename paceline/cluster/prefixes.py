"""The beginnings of a prompt as short hashes: requests with a hash in common share a beginning of that length.

    characters   0 ....... 64 ....... 128 .............. 256 ...........................
    hashes               h0          h1                h2        each of all text before it

Lengths double, so that a prompt of any length has few. The text is what a chat template would read, in its order: a
conversation that goes on keeps the hashes that it had. Nothing here decides what the prefix cache shares: a hash only
says where to look first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

FIRST_LENGTH = 64  # characters of the shortest beginning: about as many as fill a page of keys and values
HASH_BYTES = 8
LEADING = ("cache_salt", "tools", "system", "instructions")  # fields that stand before the messages
GROWING = ("messages", "prompt", "input", "input_prefix")  # fields that a later request may continue


def beginnings(body: bytes) -> tuple[str, ...]:
    """Hash the beginnings of the prompt in a request's body, the shortest first. None of one that is not JSON."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    return hashes(prompt_text(request)) if isinstance(request, Mapping) else ()


def prompt_text(request: Mapping[str, Any]) -> str:
    """Write the parts of a request that its prompt is made of, so that a longer conversation begins like a shorter."""
    leading = [_written(request[name]) for name in LEADING if request.get(name)]
    growing = [part for name in GROWING if name in request for part in _parts(request[name])]
    return "\n".join([*leading, *growing])


def _parts(value: Any) -> Iterator[str]:
    yield from (map(_written, value) if isinstance(value, list) else (_written(value),))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def hashes(text: str) -> tuple[str, ...]:
    found, state, done, end = [], blake2b(digest_size=HASH_BYTES), 0, FIRST_LENGTH
    while end <= len(text):
        state.update(text[done:end].encode(errors="surrogatepass"))
        found.append(state.hexdigest())
        done, end = end, end * 2
    return tuple(found)
