"""Self-consistency as a program, all runs at once and the same calls one after another, in turns.

Both arms have the same seeds, so their tokens must be equal. Each turn has a salt of its own: nothing comes from the
prefix cache or from remembered answers of another turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokenizers import pre_tokenizers

from paceline.bench.statistics import paired_ratio
from paceline.llm import LLM
from paceline.models.weights import Format
from paceline.program import State, gen, program
from paceline.runner.loading.models import choose_device, ready_shape
from paceline.text.tokenizer import Tokenizer

Arm = Literal["together", "one by one"]
ARMS: tuple[Arm, ...] = ("together", "one by one")
TASK = (
    "A shop sells {a} baskets with {b} apples each. {c} apples are bad and are thrown away. The others are sold for "
    "2 coins each. How many coins does the shop get? Think step by step, then give the number.\n\nAnswer:"
)


@dataclass(frozen=True, slots=True)
class Setup:
    runs: int = 64
    forks: int = 8
    max_tokens: int = 32
    temperature: float = 0.8
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float
    tokens: list[tuple[int, ...]]  # of every call

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


@program
def answers(s: State, task: str, setup: Setup, waits: bool) -> None:
    """Answer a task several times. `waits`: each answer is awaited before the next one is asked for."""
    s += task
    for fork in s.fork(setup.forks):
        fork += gen("answer", max_tokens=setup.max_tokens, temperature=setup.temperature, ignore_eos=True)
        if waits:
            fork["answer"]


def measure(llm: LLM, setup: Setup, *, tick: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Measure both arms, every second round in reverse order, and return the record."""
    take_turn(llm, replace(setup, runs=1, forks=2), "together", number=-1)  # a warm-up
    turns: dict[Arm, list[Turn]] = {arm: [] for arm in ARMS}
    for number in range(setup.rounds):
        for i, arm in enumerate(ARMS if number % 2 == 0 else ARMS[::-1]):
            turns[arm].append(take_turn(llm, setup, arm, number=number))
            tick(2 * number + i + 1, 2 * setup.rounds)
    return _record(setup, turns)


def take_turn(llm: LLM, setup: Setup, arm: Arm, *, number: int) -> Turn:
    alone = arm == "one by one"
    tasks = [TASK.format(a=3 + i % 7, b=4 + i % 11, c=1 + i % 3) for i in range(setup.runs)]
    items = [{"task": task, "setup": setup, "waits": alone} for task in tasks]
    began = time.perf_counter()
    states = answers.run_batch(
        items, on=llm, seed=setup.seed, at_once=1 if alone else max(setup.runs, 1), cache_salt=f"{arm} {number}"
    )
    seconds = time.perf_counter() - began
    calls = [call for state in states for call in state.wait().run.calls]
    return Turn(seconds, [() if call.sample is None else tuple(call.sample.tokens) for call in calls])


def _record(setup: Setup, turns: dict[Arm, list[Turn]]) -> dict[str, Any]:
    first, *others = [turn.tokens for arm in ARMS for turn in turns[arm]]
    pairs: list[list[tuple[float, float]]] = [[(turn.count, turn.seconds) for turn in turns[arm]] for arm in ARMS]
    ratio = paired_ratio(*pairs)
    return {
        "benchmark": "program",
        "runs": setup.runs,
        "forks": setup.forks,
        "max_tokens": setup.max_tokens,
        "calls": setup.runs * setup.forks,
        "seconds": {arm: [turn.seconds for turn in turns[arm]] for arm in ARMS},
        "tokens_per_second": {
            arm: sum(t.count for t in turns[arm]) / sum(t.seconds for t in turns[arm]) for arm in ARMS
        },
        "speedup": None if ratio is None else ratio.record(),
        "identical": all(tokens == first for tokens in others),
    }


def text(record: dict[str, Any]) -> str:
    together, alone = (record["tokens_per_second"][arm] for arm in ARMS)
    said = "the same tokens" if record["identical"] else "OTHER TOKENS"
    speeds = f"{together:.1f} tokens a second together, {alone:.1f} one by one"
    return (
        f"{record['runs']} runs with {record['forks']} forks each: {speeds}: × {record['speedup']['ratio']:.2f}, {said}"
    )


def random_llm(shape: str, *, format: Format, device: str, **options: Any) -> LLM:
    """Load a model of a known shape with random weights, and a tokenizer of bytes."""
    model = ready_shape(shape, format=format, device=choose_device(device))
    return LLM(replace(model, tokenizer=_bytes_tokenizer()), device=device, drafter=options.pop("drafter"), **options)


def _bytes_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<eos>", *letters, "Ġt"]  # and one pair, since a vocabulary without any is taken for a broken file
    parts: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["Ġ t"], "eos_token_id": 0}
    parts["token_type"] = [3] + [1] * (len(tokens) - 1)
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in parts.items()})
