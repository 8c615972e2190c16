"""Grammars by the kernels of a GPU: masks, sure tokens and checked drafts give the text of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.engine import caution
from paceline.types import Grammar, SamplingParams
from tests.runs import plain, run, tokens_of

pytest.importorskip("llguidance", reason="grammars are an extra")

from tests.laws.test_grammars import engine
from tests.laws.test_grammars_on_device import COMPACT, asked, device
from tests.laws.test_unmasked_rounds import DRAFTERS, FEW

TWO = SamplingParams(temperature=1, seed=4, top_k=2, grammar=Grammar.choice(["hello world", "hello there"]))


def test_drafts_and_neighbours_change_nothing() -> None:
    params = (TWO, SamplingParams(temperature=0, grammar=COMPACT, repetition_penalty=1.3))
    some = [
        replace(each, prompt=each.prompt[:3], sampling=replace(each.sampling, max_tokens=6)) for each in asked(params)
    ]
    told = run(device("noisy", backend="cuda"), some)
    assert tokens_of(told) == tokens_of(run(device(backend="cuda"), plain(some)))
    assert told["0", 0].text in ("hello world", "hello there")
    assert told["1", 0].text.startswith('{"name')


def test_rounds_without_masks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, counts of penalties and held states are cut on the device, between its steps."""
    monkeypatch.setattr(caution, "FIRST_ROUNDS", 0)
    params = SamplingParams(temperature=1, seed=4, grammar=FEW, repetition_penalty=1.3, frequency_penalty=0.5)
    [some] = asked((params,))
    some = replace(some, prompt=some.prompt[:3], sampling=replace(params, max_tokens=7))
    rig = engine(on_device={"eagle": DRAFTERS["eagle"]}, backend="cuda")
    told = run(rig, [some])
    assert tokens_of(told) == tokens_of(run(device(backend="cuda"), plain([some])))
    assert rig.engine.stats.wasted > 1
