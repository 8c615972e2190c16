"""How far a token is from being the one drawn, and how far arithmetic can move it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from paceline.audit.arithmetic import Arithmetic
from paceline.audit.differences import DifferenceKind, compare, shortfalls
from paceline.audit.replay import Replay
from paceline.engine.probe import Probe
from paceline.types import Finish, Origin, Request, SamplingParams
from tests.rig import build
from tests.runs import prompt
from tests.tiny_models import TARGET

REQUEST = Request(id="r", prompt=prompt(12, seed=1), sampling=SamplingParams(temperature=0, max_tokens=4))


def probed(**options: object) -> Probe:
    sampling = replace(REQUEST.sampling, **options)
    return build("toy").engine.probes.at(replace(REQUEST, sampling=sampling), ())


def ranked(found: Probe) -> list[int]:
    return found.logits.argsort(descending=True).tolist()


def test_greedy_tokens_fall_short_by_their_logits() -> None:
    found = probed()
    best, second = ranked(found)[:2]
    assert found.token == best
    expected = float(found.logits[best] - found.logits[second])
    assert shortfalls(found, [best, second], bound=0) == [0, pytest.approx(expected)]


def test_penalties_count() -> None:
    best, second = ranked(probed())[:2]
    biased = probed(logit_bias={best: -50.0})
    assert shortfalls(biased, [second, best], bound=0) == [0, pytest.approx(50, abs=20)]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}])
def test_the_drawn_token_never_falls_short(options: dict[str, float]) -> None:
    for seed in range(20):
        found = probed(temperature=1.5, seed=seed, **options)
        others = [token for token in ranked(found)[:9] if token != found.token]
        drawn, *rest = shortfalls(found, [found.token, *others], bound=0)
        assert drawn == 0
        assert all(short > 0 for short in rest)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}])
def test_what_a_filter_excludes_is_out_of_reach_but_at_its_border(options: dict[str, float]) -> None:
    found = probed(temperature=1.0, seed=1, **options)
    kept = int((torch.isfinite(found.sampler.shape(found.logits[None].clone()))).sum())
    outside = ranked(found)[kept]
    margin = float(found.logits[ranked(found)[kept - 1]] - found.logits[outside])
    assert shortfalls(found, [outside], bound=0) == [math.inf]
    assert math.isfinite(shortfalls(found, [outside], bound=10 * margin)[0])
    assert shortfalls(found, [ranked(found)[-1]], bound=1e-4) == [math.inf]


def replayed(tokens: list[int], finish: Finish = Finish.LENGTH, text: str = "") -> Replay:
    steps = [1, 2, 2, 2, 3][: len(tokens)]
    return Replay(tokens=tokens, origins=[Origin.ACCEPTED] * len(tokens), steps=steps, finish=finish, text=text)


def test_where_a_difference_is() -> None:
    engine, by = build("toy").engine, Arithmetic(bitwise=True)
    truth = [engine.probes.at(REQUEST, ()).token]
    for _ in range(3):
        truth.append(engine.probes.at(REQUEST, truth).token)
    wrong = [*truth[:2], (truth[2] + 1) % 97, 5]
    assert compare(engine, REQUEST, replayed(truth), replayed(truth), by) is None
    found = compare(engine, REQUEST, replayed(truth), replayed(wrong), by)
    assert found is not None
    assert (found.kind, found.position, found.step, found.place) == (DifferenceKind.STRUCTURAL, 2, 2, 1)
    assert (found.plain, found.replayed, found.expected) == (truth[2], wrong[2], truth[2])
    turned = compare(engine, REQUEST, replayed(wrong), replayed(truth), by)
    assert turned is not None
    assert "the plain answer is the one" in turned.reason


def test_two_close_tokens_far_from_the_right_one_are_no_tie() -> None:
    engine = build("toy").engine
    found = engine.probes.at(REQUEST, ())
    low = ranked(found)[-2:]
    loose = Arithmetic.rounded(torch.float32, layers=2, width=64)
    assert abs(float(found.logits[low[0]] - found.logits[low[1]])) < 1
    difference = compare(engine, REQUEST, replayed(low[:1]), replayed(low[1:]), loose)
    assert difference is not None
    assert difference.kind is DifferenceKind.STRUCTURAL
    assert "neither" in difference.reason


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replayed([3, 4]), "the replayed answer ended"),
        (replayed([3, 4, 5, 6]), "the plain answer ended"),
        (replayed([3, 4, 5], Finish.STOP), "one ended by length and the other by stop"),
        (replayed([3, 4, 5], text="x"), "different texts"),
    ],
)
def test_ends_and_texts_are_compared(other: Replay, reason: str) -> None:
    found = compare(build("toy").engine, REQUEST, replayed([3, 4, 5]), other, Arithmetic(bitwise=True))
    assert found is not None
    assert found.kind is DifferenceKind.STRUCTURAL
    assert reason in found.reason


def test_the_bound_holds_for_a_model_of_floats() -> None:
    """Rows that ride along move logits, by less than the bound and not by orders of magnitude less."""
    rig = build("eager")
    bound_by = Arithmetic.rounded(torch.float32, layers=TARGET.config.num_layers, width=TARGET.config.intermediate_size)
    moved = []
    for seed in range(8):
        tokens = prompt(40, seed=seed)
        alone, together = (rig.engine.probes.logits_after(tokens, chunk=chunk) for chunk in (1, 32))
        gaps = alone - together
        moved.append(float(gaps.max() - gaps.min()) / bound_by.bound(alone))
    assert 0.005 < max(moved) < 1


def test_the_bound_of_coarser_numbers_is_larger() -> None:
    logits = build("toy").engine.probes.logits_after(prompt(9, seed=2))
    fine, coarse = (Arithmetic.rounded(t, layers=30, width=1536).bound(logits) for t in (torch.float32, torch.bfloat16))
    assert 0 < fine < coarse / 100
    assert Arithmetic(bitwise=True).bound(logits) == 0
