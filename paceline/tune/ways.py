"""Ways to decode that a study compares, and the prompts that it compares them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.offline import Cell
from paceline.bench.workloads import BenchPrompt
from paceline.llm import LLM
from paceline.tune.candidates import name_in
from paceline.types import Speculation

PLAIN, DEFAULT = "plain", "default"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode. A drafter without a length is its engine's default: governed, and of all its drafters."""

    group: int  # engine that holds it
    drafter: str  # as the user named it; PLAIN or DEFAULT
    draft: int | None = None

    def cell(self, llm: LLM, batch: int, temperature: float) -> Cell:
        if self.drafter == PLAIN:
            return Cell(batch, temperature)
        if self.draft is None:
            return Cell(batch, temperature, Speculation(), DEFAULT)
        name = name_in(llm, self.drafter)
        return Cell(batch, temperature, Speculation(drafter=name, max_draft=self.draft), name, fixed=True)


@dataclass(frozen=True, slots=True)
class Asking:
    """The question of a study: prompts with their tokens, and over what it compares."""

    prompts: Sequence[BenchPrompt]
    tokens: Sequence[tuple[int, ...]]
    drafts: Sequence[int]
    batches: Sequence[int]
    temperature: float = 0.0
    rounds: int | None = None  # batches that a check decodes; None: as many as all prompts make
    ignore_eos: bool = False
