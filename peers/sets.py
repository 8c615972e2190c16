"""The prompts of a comparison: four kinds of work, drawn from the prompt sets, as token ids.

Every round at every concurrency has prompts of its own, because a drafter may remember earlier answers. The same
arguments draw the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.prompts.files import Prompt, read_prompts

SETS = {  # kind of work → prompt set, category of it
    "chat": ("mt_bench", None),
    "code": ("humaneval", None),
    "summary": ("spec_bench", "summarization"),
    "JSON": ("bfcl", None),
}
MAX_PROMPT_TOKENS = 800
SEED = 0
Encode = Callable[[Prompt], Sequence[int]]
Cell = tuple[str, int, int]  # set, prompts at once, round


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    sets: Sequence[str]
    rounds: int
    tokens: int  # length of the longest answer
    counts: Mapping[int, int]  # prompts at once → prompts per round
    slow_counts: Mapping[int, int]  # prompts at once → prompts per round of slow systems, the first of `counts`

    def cells(self) -> list[Cell]:
        """All cells, in the order of measuring."""
        return [(name, at_once, turn) for turn in range(self.rounds) for name in self.sets for at_once in self.counts]


def draw(plan: Plan, *, data: Path | None, encode: Encode) -> dict[Cell, list[Task]]:
    found: dict[Cell, list[Task]] = {}
    for name in plan.sets:
        tasks = iter(_sample(name, count=plan.rounds * sum(plan.counts.values()), data=data, encode=encode))
        for turn in range(plan.rounds):
            found |= {(name, n, turn): [next(tasks) for _ in range(count)] for n, count in plan.counts.items()}
    return found


def _sample(name: str, *, count: int, data: Path | None, encode: Encode) -> list[Task]:
    source, category = SETS[name]
    prompts = [p for p in read_prompts(source, data=data) if category in (None, p.category)]
    random.Random(SEED).shuffle(prompts)
    tasks = (Task(prompt.id, list(encode(prompt))) for prompt in prompts)
    usable = [task for task in tasks if len(task.tokens) <= MAX_PROMPT_TOKENS]
    if len(usable) < count:
        raise SystemExit(f"{name}: {count} prompts are needed, {source} has {len(usable)}; ask for fewer rounds")
    return usable[:count]
