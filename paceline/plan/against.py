"""A plan against measurements: every step of `bench engine` records, computed and measured.

Drafts that a governor chose, or that ended early, are computed at their mean length, which a record implies. Trees are
left out, and said: a plan knows chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.drafters.eagle.on_device import TREE_SEATS
from paceline.errors import InvalidRequest
from paceline.models.weights import Format
from paceline.plan.drafting import PaperDrafter, paper_drafter
from paceline.plan.gpus import GPUS, Gpu
from paceline.plan.passes import Place, prompt_seconds
from paceline.plan.size import ModelSize, model_size
from paceline.plan.speed import Machine

Record = Mapping[str, Any]
MODES = ("plain", "off", "speculative", "synthetic_speculative")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured figure and the same by the model of `plan`."""

    name: str
    measured: float  # milliseconds of a step, or of reading prompts
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def cells(record: Record) -> list[Cell]:
    """Compare a record of `bench engine`, of steps or of prompts, whose GPU a plan knows."""
    kind = record.get("benchmark")
    if kind == "engine":
        return list(_steps(record))
    if kind == "reading":
        return list(_prompts(record))
    raise InvalidRequest(f"a record of `paceline bench engine --json` on a GPU is needed, not one of {kind!r}")


def _gpu(record: Record) -> Gpu:
    name = str(record["machine"].get("gpu"))
    for gpu in GPUS.values():
        if name in gpu.title:
            return gpu
    raise InvalidRequest(f"the record is of {name}, and a plan knows {', '.join(gpu.title for gpu in GPUS.values())}")


def _steps(record: Record) -> Iterator[Cell]:
    setup = record["setup"]
    place = Place(_gpu(record))
    target = _target(setup, place)
    drafter = None
    context = setup["prompt_tokens"] + setup["output_tokens"] / 2
    for batch in record["batches"]:
        for mode in MODES:
            if mode not in batch or ("speculative" in mode and _drafts_trees(setup, batch["batch"])):
                continue
            if "speculative" in mode and drafter is None:
                drafter = _drafter(setup, place)
            found, count = batch[mode], batch["batch"]
            draft = mean_draft(found) if "speculative" in mode else 0.0
            planned = Machine(target, place, drafter).step_seconds(count, context, draft)
            yield Cell(_title(setup, mode, count, draft), found["step_ms"], 1e3 * planned)


def _title(setup: Record, mode: str, count: int, draft: float) -> str:
    drafter = f" + {setup['drafter']}, {draft:.2f} drafted" if "speculative" in mode else ""
    return f"{setup['target']}{drafter}, {mode.replace('_', ' ')}, batch {count}"


def _drafts_trees(setup: Record, batch: int) -> bool:
    """Whether drafts are trees: asked for, or of a head with few sequences."""
    words = setup["drafter"]
    return "branches=" in words or words.startswith("medusa") or (words.startswith("eagle:") and batch <= TREE_SEATS)


def mean_draft(found: Record) -> float:
    """Return the mean tokens drafted for a sequence in a step: accepted tokens by the share that was accepted."""
    accepted = found.get("tokens_per_step", found["tokens_per_round"]) - 1
    return float(accepted / found["accepted_share"]) if found["accepted_share"] else 0.0


def _target(setup: Record, place: Place) -> ModelSize:
    return _sized(setup["target"], setup["format"], setup["kv_format"], place.gpu.memory)


@cache
def _sized(target: str, format: Format, kv_format: str, memory: int) -> ModelSize:
    return model_size(target, format=format, kv_format=kv_format, memory=memory)


def _drafter(setup: Record, place: Place) -> PaperDrafter | None:
    words = setup["drafter"] + (f",format={setup['drafter_format']}" if setup["drafter_format"] else "")
    return _paper(words, setup["target"], setup["format"], setup["kv_format"], place.gpu.memory)


@cache
def _paper(words: str, target: str, format: Format, kv_format: str, memory: int) -> PaperDrafter | None:
    size = _sized(target, format, kv_format, memory)
    return paper_drafter(words, target, size, kv_format=kv_format, memory=memory)


def _prompts(record: Record) -> Iterator[Cell]:
    place = Place(_gpu(record))
    target = _target(record["setup"], place)
    for found in record["prompts"]:
        planned = found["count"] * prompt_seconds(target, place, found["length"])
        name = f"{record['setup']['target']}, reading {found['count']} × {found['length']} tokens"
        yield Cell(name, 1e3 * found["first_token_s"], 1e3 * planned)
