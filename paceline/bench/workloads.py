"""Prompts of a benchmark: from a set or a file, or synthetic ones of a given length.

`random` is random words and `sonnet` random lines of the sonnets. Both have the number of words asked for; the caller
knows how many tokens a word has. The kinds of `paceline.prompts.hard` are made, too. Everything else is a source that
`paceline.prompts.files` reads. The same arguments give the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.prompts.files import find, read_prompts, spread
from paceline.prompts.hard import HARD, hard_prompts

SYNTHETIC = ("random", "sonnet")
MADE = (*SYNTHETIC, *HARD)  # sources that are no files
DEFAULT_COUNT = 40  # prompts
VOCABULARY = (
    "air apple arm back bag ball bank base bed bell bird black boat body book box boy bread bridge brown car case "
    "cat chair child city class clock cloud coat cold corn cow cup day desk dog door dress drink east egg end eye "
    "face farm field fire fish floor food foot game garden girl glass gold grass green hair half hand hat head "
    "heart hill home horse hour house ice iron island key king lake land leaf leg letter light line lip list mark "
    "market meat milk moon mother mouth name neck night north nose paper park part path pen picture place plant "
    "plate poet point river road rock room rose salt sand school sea seat seed ship shop side silver sister sky "
    "sleep smile snow soap son song south star stone street sugar summer sun table tail tea time town train tree "
    "voice wall war water way west wheel wind window wing winter wood word work year"
)
TASKS = {
    "random": "Write on about the following words for as long as you can.\n\n",
    "sonnet": "Continue this poem in the same voice.\n\n",
}


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt with its limits, for any server or engine."""

    id: str
    category: str
    messages: tuple[Mapping[str, str], ...] = ()
    tokens: tuple[int, ...] = ()  # instead of messages, for a recorded request
    max_tokens: int = 128
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of the request's body

    @property
    def text(self) -> str:
        return self.messages[-1]["content"] if self.messages else ""


def workload(
    sources: Sequence[str],
    *,
    data: Path | None,
    count: int | None,
    max_tokens: int,
    seed: int = 0,
    words: Callable[[str], int],
) -> list[BenchPrompt]:
    """Choose at most `count` prompts from all sources, evenly spread. `words`: words of a synthetic prompt by kind."""
    found: list[BenchPrompt] = []
    share = None if count is None else -(-count // len(sources))
    for source in sources:
        if source in SYNTHETIC:
            found += synthetic_prompts(source, count=share or DEFAULT_COUNT, words=words(source), data=data, seed=seed)
        else:
            found += _read(source, data=data, count=share, seed=seed)
    chosen = spread(found, count=count or DEFAULT_COUNT)
    return [replace(prompt, max_tokens=max_tokens, seed=seed + i) for i, prompt in enumerate(chosen)]


def _read(source: str, *, data: Path | None, count: int | None, seed: int) -> Iterator[BenchPrompt]:
    hard = hard_prompts(source, count=count or DEFAULT_COUNT, seed=seed) if source in HARD else None
    for prompt in hard or read_prompts(source, data=data, count=count):
        yield BenchPrompt(prompt.id, prompt.category, messages=prompt.messages, tokens=prompt.tokens)


def synthetic_prompts(kind: str, *, count: int, words: int, data: Path | None, seed: int) -> list[BenchPrompt]:
    """Make `count` prompts of `words` words each."""
    lines = _lines(kind, data=data)
    return [
        BenchPrompt(
            f"{kind}/{i}",
            kind,
            messages=({"role": "user", "content": TASKS[kind] + _text(lines, words, random.Random(f"{seed}/{i}"))},),
        )
        for i in range(count)
    ]


def _lines(kind: str, *, data: Path | None) -> Sequence[str]:
    if kind == "random":
        return VOCABULARY.split()  # one word a line
    text = find("sonnet", data=data).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def _text(lines: Sequence[str], words: int, rng: random.Random) -> str:
    """Draw lines until they have `words` words; the last line is cut."""
    drawn: list[list[str]] = []
    left = words
    while left > 0:
        line = rng.choice(lines).split()[:left]
        drawn.append(line)
        left -= len(line)
    return "\n".join(" ".join(line) for line in drawn)
