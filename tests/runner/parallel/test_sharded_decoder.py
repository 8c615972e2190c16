"""Split models of every kind compute what one process computes, and the same bits at every degree if asked to."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.base import Batch, Output
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.parallel.sharded_decoder import ShardedDecoder
from tests.runner.parallel.split_models import PAGES, VARIANTS, Threads
from tests.tiny_batches import chunks_of
from tests.tiny_models import random_weights

TOKENS = [(7 * i + 3) % 96 for i in range(40)]
SIZES = (20, 5, 1, 14)
SLOTS = torch.arange(128)


def weights_of(variant: str) -> dict[str, torch.Tensor]:
    return random_weights(VARIANTS[variant], seed=3)


def unsplit(variant: str, taps: tuple[int, ...] = ()) -> TorchForward:
    return TorchForward(VARIANTS[variant], weights_of(variant), num_pages=PAGES, taps=taps)


def computed(threads: Threads, parts: list[ShardedDecoder], batch: Batch) -> Output:
    first, *others = threads.each(lambda rank, exchange: parts[rank].compute(batch))
    assert first is not None
    assert others == [None] * len(others), "only rank 0 gets an output"
    return first


def passes(variant: str, degree: int, *, same_bits: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and keys and values, after several passes."""
    threads = Threads.of(degree)
    parts = threads.build(VARIANTS[variant], weights_of(variant), same_bits=same_bits)
    logits = [computed(threads, parts, batch).logits for batch in chunks_of(TOKENS, SIZES)]
    pair = threads.each(lambda rank, exchange: parts[rank].read(SLOTS))[0]
    assert pair is not None
    return torch.cat(logits), torch.stack(pair)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str) -> None:
    whole = unsplit(variant)
    expected = torch.cat([whole(batch).logits for batch in chunks_of(TOKENS, SIZES)])
    logits, kv = passes(variant, 2, same_bits=False)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv, torch.stack(whole.kv.read(SLOTS)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_at_every_degree(variant: str) -> None:
    one = passes(variant, 1, same_bits=True)
    for degree in (2, 4):
        other = passes(variant, degree, same_bits=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_other_bits_if_not_asked_to() -> None:
    """Or the law above would say nothing."""
    one, two = (passes("llama", degree, same_bits=False)[0] for degree in (1, 2))
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_hidden_states_embeddings_and_outputs() -> None:
    taps, [batch] = (0, 1, 3, 4), chunks_of(TOKENS, (20,))
    batch = Batch(**{name: getattr(batch, name) for name in batch.__slots__} | {"states": True})
    whole, threads = unsplit("gemma", taps), Threads.of(2)
    parts = threads.build(VARIANTS["gemma"], weights_of("gemma"), same_bits=False, taps=taps)
    expected, output = whole(batch), computed(threads, parts, batch)
    assert output.features is not None
    assert output.states is not None
    torch.testing.assert_close(output.features, expected.features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.states, expected.states, rtol=1e-4, atol=1e-4)
    assert torch.equal(output.argmax, output.logits.argmax(-1).int())
    tokens = torch.arange(96, dtype=torch.int32)
    for embedded in threads.each(lambda rank, exchange: parts[rank].embed(tokens)):
        assert torch.equal(embedded, whole.embed(tokens))
    logits = threads.each(lambda rank, exchange: parts[rank].project(output.states))[0]
    assert logits is not None
    torch.testing.assert_close(logits, whole.project(output.states), rtol=1e-4, atol=1e-4)


def test_keys_and_values_move_on_every_rank() -> None:
    threads = Threads.of(4)  # more ranks than key/value heads
    parts = threads.build(VARIANTS["llama"], weights_of("llama"), same_bits=False)
    computed(threads, parts, chunks_of(TOKENS, (20,))[0])

    def read() -> torch.Tensor:
        pair = threads.each(lambda rank, exchange: parts[rank].read(SLOTS))[0]
        assert pair is not None
        return torch.stack(pair)

    before = read()
    threads.each(lambda rank, exchange: parts[rank].move([80, 81], [3, 80]))
    after = read()
    assert torch.equal(after[:, :, [3, 80]], before[:, :, [80, 81]])
    assert not torch.equal(before[:, :, 80], before[:, :, 81])
