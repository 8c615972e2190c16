"""The host's work for the masks of one more sequence in a step on a device: a count of Python calls."""

from __future__ import annotations

import math

import pytest

from paceline.engine import caution
from paceline.runner.rounds.portable import PortableRounds
from paceline.types import Grammar, Request, SamplingParams
from tests.calls import count_calls
from tests.laws.test_grammars import TARGET, TOKENIZER
from tests.rig import build
from tests.runs import prompt

STEPS = 4  # within one page of each sequence
HOST = ("paceline/engine/", "paceline/sampling/")
FREE = Grammar.regex("[a-z]{900,}")
LETTERS = {token: 100.0 for letter in "abcdefgh" for token in TOKENIZER.encode(letter, add_bos=False)}


def calls_in(batch: int, grammar: Grammar | None) -> int:
    """Count the calls of `STEPS` steps in which `batch` sequences decode, without those of the device."""
    limits = {"max_sequences": batch, "max_draft_batch": batch, "max_step_tokens": 512}
    rig = build("toy", forward=TARGET.forward("toy", num_pages=160), tokenizer=TOKENIZER, on_device={}, **limits)
    for i in range(batch):
        sampling = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=grammar is None, grammar=grammar, logit_bias=LETTERS
        )
        rig.engine.submit(Request(id=f"{i}", prompt=prompt(18, seed=i), sampling=sampling))
    for _ in range(4):
        rig.engine.step()
    count, tokens = count_calls(
        lambda: sum(len(event.tokens) for _ in range(STEPS) for event in rig.engine.step()), of=HOST
    )
    assert tokens == batch * STEPS
    return count


def test_a_grammar_takes_few_calls_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.sampling.grammar_state.MAX_INLINE_SECONDS", math.inf)
    with_it, without = ((calls_in(8, grammar) - calls_in(2, grammar)) / 6 / STEPS for grammar in (FREE, None))
    assert with_it - without <= 22


def test_a_round_without_masks_takes_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is computed: the grammar reads the tokens."""
    monkeypatch.setattr("paceline.sampling.grammar_state.MAX_INLINE_SECONDS", math.inf)
    monkeypatch.setattr(caution, "FIRST_ROUNDS", 0)
    monkeypatch.setattr(PortableRounds, "sheet", None)
    with_it, without = ((calls_in(8, grammar) - calls_in(2, grammar)) / 6 / STEPS for grammar in (FREE, None))
    assert with_it - without <= 14
