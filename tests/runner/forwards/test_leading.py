"""A Forward of the target's first layers, or of other weights, on the target's KV memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.quant import quantise
from paceline.models.tensor_names import expected_shapes
from paceline.runner.batch import Share, build_batch
from paceline.runner.forwards.compiled import CompiledForward, shape_of
from paceline.runner.forwards.decoder_pack import pack_decoder
from paceline.runner.forwards.torch import TorchForward
from tests.runner.forwards.test_next_pass import CONFIG, INTEGERS, Decoding
from tests.tiny_models import TARGET

OTHERS = {  # weights of another model of the same shape
    name: torch.ones(shape) if len(shape) == 1 else quantise(torch.full(shape, 0.01))
    for name, shape in expected_shapes(CONFIG).items()
}


@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_the_first_layers_alone_are_a_model_of_these_layers(backend: str) -> None:
    target = TARGET.forward(backend, num_pages=4, taps=(0, 2))
    assert isinstance(target, (CompiledForward, TorchForward))
    part = target.leading(1)
    assert part.kv is target.kv
    assert part.taps == ()
    lanes = Decoding.of().lanes
    lanes.pages_np[:] = torch.arange(4).repeat(1, 2)[:, : lanes.pages_np.shape[1]].numpy()
    batch = build_batch(lanes, [Share(0, 0, 9, outs=9)])
    whole = target(batch).logits.clone()
    kept = [each.clone() for each in target.kv.read(batch.slots)]
    said = part(batch).logits.clone()
    small = replace(TARGET.config, num_layers=1)
    weights = {name: weight for name, weight in TARGET.weights.items() if not name.startswith("layers.1.")}
    if backend == "compiled":
        own = {name: quantise(each) if each.dim() == 2 else each for name, each in weights.items()}
        alone = CompiledForward(small, own, num_pages=4, threads=1)(batch)
    else:
        alone = TorchForward(small, weights, num_pages=4)(batch)
    assert torch.equal(said, alone.logits)
    assert not torch.equal(said, whole)
    assert all(map(torch.equal, kept, target.kv.read(batch.slots))), "the first layers write what the target wrote"


def test_no_weight_is_copied() -> None:
    target = Decoding.of().forward
    part = target.leading(1)
    assert part.pack is target.pack
    assert part.embedding.address == target.embedding.address


def test_a_pass_of_another_program_cancels_the_prefetched_one() -> None:
    """Else it could write its keys and values over those of a pass that the target believes to have computed."""
    pair, alone = Decoding.of(threads=2), Decoding.of(threads=1)
    other = pair.forward.with_kv(CONFIG, pack_decoder(dict(OTHERS), threads=2))
    for _ in range(12):
        one, two = pair.step(), alone.step()
        # The next token is known, and the target's next pass has begun: the other model reads the same token now.
        other(build_batch(pair.lanes, [Share(0, pair.length, 1)]))
        assert all(map(torch.equal, pair.results(one), alone.results(two)))
    assert pair.prefetched == 0


def test_programs_on_one_memory_share_their_threads() -> None:
    target = Decoding.of(threads=2).forward
    with pytest.raises(AssertionError, match="programs on one KV memory share their threads"):
        CompiledForward(CONFIG, target.pack, num_pages=20, threads=1, beside=target)


def test_memory_for_other_keys_is_not_shared() -> None:
    target = Decoding.of().forward
    assert isinstance(target.kv, CpuKV)
    with pytest.raises(AssertionError, match="lie elsewhere"):
        target.kv.lend(shape_of(CONFIG, pages=7, positions=16))
    with pytest.raises(AssertionError, match="3 layers in memory for 2"):
        target.kv.lend(shape_of(replace(CONFIG, num_layers=3), pages=20, positions=16))
    assert {name.split(".")[1] for name in INTEGERS if name.startswith("layers")} == {"0", "1"}
