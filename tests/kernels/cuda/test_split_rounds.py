"""Rounds of a model over two ranks: with the same bits across degrees they do what the rounds of one rank do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.runner.rounds.protocol import Chunk, Offer, Rounds, Seat
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import pack
from paceline.types import SamplingParams
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.split_rounds import MODELS, leading_rounds, rounds_of_rank

pytestmark = pytest.mark.skipif(ON_GPU, reason="ranks are processes of the interpreter")
TEXTS: dict[int, list[int]] = {2: [5, 6, 7, 8, 5, 6], 0: [1, 2, 3, 1]}
OTHERS = (None, "ngram", "model", "trees", "layers")
KINDS = ("bias", "qk-norm", "tied")
# What is said stands in the prompt, so that a lookup finds something.
PARAMS: dict[int, dict[str, Any]] = {
    2: {"temperature": 0.8, "top_p": 0.95, "logprobs": 3, "presence_penalty": 0.5, "allowed_tokens": (5, 6, 7, 8)},
    0: {"temperature": 0, "min_tokens": 3, "logit_bias": {3: 2.0}},
}


def enter(rounds: Rounds, lane: int, vocab_size: int) -> None:
    sampler = Sampler(SamplingParams.of(**PARAMS[lane]), seed=7 + lane, vocab_size=vocab_size, eos_ids=(4,))
    sampler.see_prompt(TEXTS[lane])
    rounds.write(lane, np.array(TEXTS[lane], dtype=np.int32), sampler)
    rounds.set_pages(lane, 0, range(4 * lane, 4 * lane + 4))


def played(rounds: Rounds, drafter: str | None, vocab_size: int) -> list[Any]:
    """Read two prompts, draft and decode; return what came of every step."""
    steps: list[tuple[Sequence[Chunk], Sequence[Seat]]] = [
        ([Chunk(2, 0, 5, draws=False, drafts=drafter is not None)], []),
        ([Chunk(0, 0, 4, draws=True, drafts=drafter is not None)], [Seat(2, 3)]),
        ([], [Seat(2, 3, offer=Offer(6, (5, 6, 7, 8, 5, 6, 7, 8))), Seat(0, 0)]),
        ([], [Seat(0, 3), Seat(2, 4)]),
    ]
    for lane in TEXTS:
        enter(rounds, lane, vocab_size)
    outcomes: list[Any] = []
    for chunks, seats in steps:
        found = rounds.collect(rounds.launch(chunks, seats, drafter=drafter, context=40))
        outcomes.append(found[:2])
    return [*outcomes, masked(rounds, drafter, vocab_size)]


def masked(rounds: Rounds, drafter: str | None, vocab_size: int) -> Any:
    """Decode lane 0 with a mask, which comes once the step is launched."""
    ticket = rounds.launch([], [Seat(2, 0), Seat(0, 0)], drafter=drafter, context=40, masked=[1])
    [branch] = rounds.drafts(ticket)[1]
    rounds.sheet(ticket).put(branch.rows, [pack({9}, vocab_size)])
    rounds.draw(ticket, [1])
    chunks, seats, _ = rounds.collect(ticket)
    assert seats[1].tokens == (9,)
    return chunks, seats


@pytest.mark.parametrize("drafter", ["eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_two_ranks_do_what_one_does(drafter: str | None, tmp_path: Path) -> None:
    vocab = MODELS["two-layers"].vocab_size
    alone = played(rounds_of_rank("two-layers", drafter, 0, 1, same_bits=True), drafter, vocab)
    split = played(leading_rounds("two-layers", drafter, 2, tmp_path, same_bits=True), drafter, vocab)
    assert split == alone
    assert any(landed.drafted for _, seats in alone for landed in seats), "somebody drafted, and be it the host"


def test_ranks_copy_for_the_same_seats(tmp_path: Path) -> None:
    """Only rank 0 knows the bars: with one on a single rank, the ranks would verify different drafts."""
    told = []
    for folder in (None, tmp_path):
        if folder is None:
            rounds: Rounds = rounds_of_rank("two-layers", "portfolio", 0, 1, same_bits=True)
        else:
            rounds = leading_rounds("two-layers", "portfolio", 2, folder, same_bits=True)
        for lane in TEXTS:
            enter(rounds, lane, MODELS["two-layers"].vocab_size)
        rounds.collect(
            rounds.launch([Chunk(2, 0, 5, draws=False), Chunk(0, 0, 3, draws=False)], [], drafter=None, context=40)
        )
        steps = [[Seat(2, 2, max_copy=4, sure=2), Seat(0, 2, max_copy=4)], [Seat(2, 0, max_copy=4, sure=2), Seat(0, 1)]]
        told.append([rounds.collect(rounds.launch([], seats, drafter="portfolio", context=40))[1] for seats in steps])
    assert told[0] == told[1]
    first, other = told[0][0]
    assert first.drafted == (7, 8, 5, 6)
    assert first.match is not None
    assert first.match.copied
    assert len(other.drafted) == 2


@pytest.mark.parametrize("model", ["post-norms", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS)])
def test_kinds_of_models(model: str, tmp_path: Path) -> None:
    """Heads, columns and tokens that cannot be halved evenly, and all that happens around a sum."""
    vocab = MODELS[model].vocab_size
    alone = played(rounds_of_rank(model, None, 0, 1, same_bits=True), None, vocab)
    split = played(leading_rounds(model, None, 2, tmp_path, same_bits=True), None, vocab)
    assert split == alone
