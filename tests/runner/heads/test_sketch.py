"""Heads with many outputs compute only the best of them, and find nearly the same drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.quant import GROUP, dequantise
from paceline.models.heads import EagleHead
from paceline.runner.heads import head_pack
from paceline.runner.heads import sketch as sketches
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.protocol import TreeRequest
from paceline.runner.heads.sketch import (
    EXACT_OUTPUTS,
    FITTED_RANK_DIVISOR,
    MAX_INPUTS,
    MIN_OUTPUTS,
    RANK_DIVISOR,
    directions,
    exact_outputs,
    sketch,
)
from paceline.sampling.sampler import Stream, noise_keys
from tests.heads import random_eagle
from tests.kernels.tiny_forward import RUNNABLE
from tests.runner.heads.test_torch import CONFIG, COUNTS, FEATURES, FIRST, both, drawing, tokens_of

HIDDEN, OUTPUTS = 192, 9008  # the last slices have fewer outputs than the first
SEEDS = range(25)


def head_with(decay: float) -> EagleHead:
    """A head whose outputs depend on directions with weights that fall by `decay` from one to the next."""
    head = random_eagle(replace(CONFIG, vocab_size=OUTPUTS), hidden=HIDDEN, seed=4)
    draw = torch.Generator().manual_seed(5)
    basis, _ = torch.linalg.qr(torch.randn((HIDDEN, HIDDEN), generator=draw))
    sizes = decay ** torch.arange(HIDDEN)
    weight = torch.randn((OUTPUTS, HIDDEN), generator=draw) * sizes @ basis.T
    weight *= 2.5 / float((weight.square().sum(1)).mean().sqrt())
    return EagleHead(config=head.config, weights={**head.weights, "head": weight}, ids=head.ids)


def agreement(head: CompiledHead, inverse_temperature: float) -> float:
    """Share of first drafted tokens that are the best of all outputs."""
    hits = 0
    for seed in SEEDS:
        features = torch.randn(FEATURES.shape, generator=torch.Generator().manual_seed(seed))
        logits = head(FIRST, features=features).logits
        keys = torch.from_numpy(noise_keys(seed, np.array(COUNTS) + 1, Stream.TOKEN))
        places = (
            head.pick(logits, torch.full((3,), inverse_temperature), keys) if inverse_temperature else logits.argmax(1)
        )
        drafts = head.draft(drawing([seed] * 3, inverse_temperature), features, [TreeRequest(1, 0.0, 0.0)] * 3, width=1)
        hits += sum(a == b for a, b in zip(tokens_of(drafts), head.ids[places.long()][:, None].tolist(), strict=True))
    return hits / (3 * len(SEEDS))


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 1.7])
def test_shortlists_hold_the_best_output(
    variant: str, inverse_temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    head = head_with(decay=0.96)
    assert agreement(both(head)[0], inverse_temperature) > 0.9
    monkeypatch.setattr(sketches, "sketch", lambda weight, norm, space: sketch(weight.flip(0), norm))
    assert agreement(both(head)[0], inverse_temperature) < 0.75  # not near 0: large noise alone finds many


def test_trees_are_nearly_those_of_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    head, found = head_with(decay=0.96), []
    for kind in ("rough", "whole"):
        fast, _ = both(head)
        for inverse_temperature in (0.0, 1.0):
            for seed in SEEDS[:8]:
                drafts = fast.draft(
                    drawing([seed] * 3, inverse_temperature), FEATURES, [TreeRequest(6, 0.0, 0.0)] * 3, width=3
                )
                found.append((kind, [set(zip(tree.tokens, tree.parents, strict=True)) for tree in drafts]))
        monkeypatch.setattr(head_pack, "sketch_rank", lambda *layer: None)
    rough, whole = ([tree for name, trees in found if name == kind for tree in trees] for kind in ("rough", "whole"))
    assert all(len(tree) == 6 for tree in rough + whole)
    same = sum(len(a & b) for a, b in zip(rough, whole, strict=True))
    assert same > 0.8 * 6 * len(whole)


def test_filters_look_at_the_shortlists() -> None:
    """With top_k 1 the draft is the greedy one under any noise."""
    fast, _ = both(head_with(decay=0.96))
    greedy = tokens_of(fast.draft(drawing([1] * 3, 0.0), FEATURES, [TreeRequest(1, 0.0, 0.0)] * 3, width=1))
    for seed in SEEDS[:5]:
        wanted = [TreeRequest(1, 0.0, 0.0, top_k=1)] * 3
        assert tokens_of(fast.draft(drawing([seed] * 3, 1.0), FEATURES, wanted, width=1)) == greedy


def test_a_pass_with_logits_computes_all_of_them() -> None:
    fast, eager = both(head_with(decay=0.96))
    fast.draft(drawing([1] * 3, 1.0), FEATURES, [TreeRequest(4, 0.0, 0.0)] * 3, width=2)
    logits, wanted = fast(FIRST, features=FEATURES).logits, eager(FIRST, features=FEATURES).logits
    assert float((logits - wanted).abs().max()) < 0.1 * float(wanted.abs().max())


# ── the rough copy ──


def product(weight: Tensor, norm: Tensor) -> Tensor:
    found = sketch(weight, norm)
    assert found is not None
    return dequantise(found.up) @ dequantise(found.down)


def test_a_sketch_is_the_best_of_its_rank() -> None:
    weight = head_with(decay=0.96).weights["head"]
    assert isinstance(weight, Tensor)
    norm, common = 1 + 0.3 * torch.randn((2, HIDDEN), generator=torch.Generator().manual_seed(6))
    weight = weight + common  # the same for all outputs: does not change their order
    whole = weight * norm
    whole -= whole.mean(0)
    rank = HIDDEN // int(RANK_DIVISOR)
    left_out = torch.linalg.svdvals(whole)[rank:].square().sum()
    error = (product(weight, norm) - whole).square().sum()
    assert left_out < error < left_out + 0.012 * whole.square().sum()  # plus the rounding to 4 bits


def spread_rows(count: int) -> Tensor:
    """Rows of root mean square 1 near a space of 24 dimensions, which is not the one with the largest outputs."""
    draw = torch.Generator().manual_seed(7)
    basis, _ = torch.linalg.qr(torch.randn((HIDDEN, HIDDEN), generator=draw))
    rows = torch.randn((count, 24), generator=draw) @ basis[:24] + 0.03 * torch.randn((count, HIDDEN), generator=draw)
    return rows / rows.square().mean(dim=1, keepdim=True).sqrt()


def test_directions_fitted_to_rows_are_fewer_and_better() -> None:
    weight, norm, rows = head_with(decay=1.0).weights["head"], torch.ones(HIDDEN), spread_rows(2000)
    assert isinstance(weight, Tensor)
    space = directions(weight, norm, rows.T @ rows / len(rows))
    assert space is not None
    assert space.dtype == torch.int8
    whole = (weight - weight.mean(0)) @ rows[:200].T
    errors = []
    for found in (sketch(weight, norm), sketch(weight, norm, space)):
        assert found is not None
        rough = dequantise(found.up) @ dequantise(found.down) @ rows[:200].T
        errors.append(float((rough - whole).norm() / whole.norm()))
    assert len(space) < HIDDEN // int(RANK_DIVISOR)
    assert errors[0] > 0.7
    assert errors[1] < 0.15


def test_a_head_with_fitted_directions_computes_fewer_outputs() -> None:
    head = head_with(decay=0.96)
    norm, weight = head.weights["norm"], head.weights["head"]
    assert isinstance(norm, Tensor)
    assert isinstance(weight, Tensor)
    space = directions(weight, norm, torch.eye(HIDDEN))
    assert agreement(both(replace(head, sketch=space))[0], 1.0) > 0.85
    found = sketch(weight, norm, space)
    assert found is not None
    assert exact_outputs(space) < exact_outputs(None) == EXACT_OUTPUTS
    assert len(dequantise(found.down)) == int(HIDDEN / FITTED_RANK_DIVISOR) // GROUP * GROUP


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(MIN_OUTPUTS - 16, 192), (9000, 192), (9008, 64), (MIN_OUTPUTS, MAX_INPUTS + 32)]
)
def test_layers_without_a_sketch(outputs: int, inputs: int) -> None:
    assert sketch(torch.ones((outputs, inputs)), torch.ones(inputs)) is None
    assert directions(torch.ones((outputs, inputs)), torch.ones(inputs), torch.eye(inputs)) is None
