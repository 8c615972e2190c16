"""Candidates: the drafters that are compared, and the engines that hold them.

The target's usual drafters share an engine, so that what the portfolio makes of them is measured, too. Every other
candidate has an engine of its own: two models cannot be loaded into one, and a candidate that does not load or does not
fit must not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.drafters.recipe import Recipe, name_by
from paceline.drafters.registry import PORTFOLIO
from paceline.kernels.base import PAGE_SIZE
from paceline.llm import LLM
from paceline.runner.loading.models import ReadyModel

NOT_SCORED = (PORTFOLIO, "prediction")  # they have no drafts of their own, or only for requests that bring some
Load = Callable[[Sequence[str]], LLM]
"""Drafters, as a user names them → the target with them."""


@dataclass(frozen=True, slots=True)
class Group:
    """Drafters that one engine holds."""

    words: tuple[str, ...]  # as the user names them

    @property
    def scored(self) -> tuple[str, ...]:
        """Drafters that are compared with fixed draft lengths."""
        return tuple(words for words in self.words if kind_of(words) not in NOT_SCORED)

    @property
    def title(self) -> str:
        return ", ".join(self.scored)


class Engines:
    """Loads the engine of a group. It keeps the latest one alone, because two may not fit into memory."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._latest: tuple[Group, LLM] | None = None

    def of(self, group: Group) -> LLM:
        if self._latest is None or self._latest[0] != group:
            self._latest = None  # its memory is free before the next one is loaded
            self._latest = group, self._load(group.words)
        return self._latest[1]


def groups(usual: Sequence[str], candidates: Sequence[str]) -> list[Group]:
    """Divide drafters among engines: the usual ones in the first, every further candidate in one of its own."""
    others = [words for words in dict.fromkeys(candidates) if words not in usual]
    return [Group(tuple(usual)), *(Group((words,)) for words in others)]


def kind_of(words: str) -> str:
    return words.partition(":")[0]


def name_in(llm: LLM, words: str) -> str:
    """Return the name by which a request asks for a drafter that was loaded by these words."""
    return name_by(words, llm.parts.drafters)


def is_lookup(llm: LLM, words: str) -> bool:
    """Return whether drafts follow from the tokens alone, and a replay on the host finds them."""
    made = llm.parts.drafters[name_in(llm, words)]
    if llm.parts.target.decoder is not None or made.taps or made.page_bytes:
        return False
    guard = llm.engine.drafters[name_in(llm, words)]
    return not (guard.shares_kv or guard.hears_logits)


def reason(error: Exception) -> str:
    return " ".join(str(error).split())


def vocabulary_share(made: Recipe, target: ReadyModel) -> float:
    """Return the share of the target's vocabulary that a drafter can draft; ids that both have mean the same."""
    return 1.0 if made.vocabulary is None else made.vocabulary / target.model.config.vocab_size


def memory_of(made: Recipe) -> dict[str, Any]:
    """Return the bytes of weights that a drafter adds, and of a token in its KV memory."""
    return {"weight_bytes": made.own_bytes, "kv_bytes_per_token": made.page_bytes // PAGE_SIZE}
