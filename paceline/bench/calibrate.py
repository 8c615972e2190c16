"""How many words make so many tokens, by asking a server: its own count of two prompts gives a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.bench.serve import Arm
from paceline.bench.workloads import made_up
from paceline.errors import InvalidRequest

PROBES = (40, 160)  # words


async def words_for(arm: Arm, kind: str, *, tokens: int, data: Path | None) -> int:
    """Words of a made-up prompt that the server will count as about `tokens`, the chat's own ones included."""
    counts = [await _count(arm, kind, words=words, data=data) for words in PROBES]
    a_word = (counts[1] - counts[0]) / (PROBES[1] - PROBES[0])
    if a_word <= 0:
        return tokens  # a server that does not count: a word is a token
    return max(1, round(PROBES[0] + (tokens - counts[0]) / a_word))


async def _count(arm: Arm, kind: str, *, words: int, data: Path | None) -> int:
    [ask] = made_up(kind, count=1, words=words, data=data, seed=-1)
    outcome = await arm.client.ask(replace(ask, max_tokens=1), {"model": arm.model, "temperature": 0})
    if outcome.error is not None and not outcome.counted:
        raise InvalidRequest(f"a first request to {arm.client.root} failed: {outcome.error}")
    return outcome.prompt_tokens
