"""Pairs: which rules tell how often a drafter is right, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.audit.replay import Replay
from paceline.bench.offline import Cell
from paceline.bench.workloads import BenchPrompt
from paceline.tune import pairs
from paceline.tune.pairs import acceptance, lines, verdict
from paceline.tune.predictions import Prediction
from paceline.tune.traces import Trace
from paceline.tune.ways import Asking
from paceline.types import Rule, SequenceStats


def made(ratio: float, interval: tuple[float, float] | None, *, draft: int = 4, batch: int = 1) -> Prediction:
    return Prediction("x", draft, batch, 100.0, ratio, interval, 2.0, 0.5, 0.01)


def test_two_rules_at_one_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[Cell] = []

    def trace(engine: Any, cell: Cell, prompts: list[BenchPrompt], tokens: Any, *, ignore_eos: bool) -> Trace:
        cells.append(cell)
        assert len(prompts) == len(tokens)
        assert {prompt.max_tokens for prompt in prompts} == {32}
        accepted = 3 if cell.speculation.rule == Rule.REJECTION else 2
        return Trace([Replay(stats=SequenceStats(drafted=4, accepted=accepted)) for _ in prompts], [])

    monkeypatch.setattr(pairs, "trace", trace)
    llm: Any = SimpleNamespace(engine=None, parts=SimpleNamespace(drafters={"ngram": SimpleNamespace(words="ngram")}))
    prompts = [BenchPrompt(str(i), "toy", max_tokens=128) for i in range(70)]
    asking = Asking(prompts, [(1, 2)] * 70, drafts=(2,), batches=(1, 8))
    found = acceptance(llm, "ngram", asking)
    assert (found.overlap, found.coupled, found.temperature) == (0.75, 0.5, 1.0)
    assert {(cell.speculation.rule, cell.speculation.max_draft, cell.fixed) for cell in cells} == {
        (Rule.REJECTION, 1, True),
        (Rule.COUPLED, 1, True),
    }
    assert len(cells) == 2 * 7  # 50 prompts, 8 at once
    warm = Asking(prompts, [(1, 2)] * 70, drafts=(2,), batches=(8,), temperature=0.3)
    assert acceptance(llm, "ngram", warm).temperature == 0.3


@pytest.mark.parametrize(
    ("ratio", "interval", "said"),
    [
        (1.9, (1.8, 2.0), "x helps: 1.90 times plain speed [1.80, 2.00] with drafts of 4."),
        (0.7, (0.6, 0.8), "x does not help: 0.70 times plain speed [0.60, 0.80] with drafts of 4 at best."),
        (1.0, (0.9, 1.1), "x makes no clear difference: 1.00 times plain speed [0.90, 1.10] with drafts of 4."),
        (1.3, None, "x: 1.30 times plain speed with drafts of 4, by too few answers for an interval."),
    ],
)
def test_a_verdict_in_a_sentence(ratio: float, interval: tuple[float, float] | None, said: str) -> None:
    others = [made(0.5, (0.4, 0.6), draft=8), made(9.0, (8.0, 10.0), batch=8)]
    assert verdict("x", [*others, made(ratio, interval)]) == said


def test_nothing_to_judge() -> None:
    assert "cannot be judged" in verdict("x", [])
    facts = {"verdict": "v", "vocabulary": 0.5, "weight_bytes": 1 << 20, "kv_bytes_per_token": 12, "temperature": 1.0}
    told = lines({**facts, "overlap": None, "coupled": None})
    assert told == [
        "v",
        "  50% of the target's vocabulary · weights 1.0 MiB · 12 bytes of KV a token",
        "  drafted nothing",
    ]
