"""Compiled parts of every kind compute what the whole program computes: bitwise, and with the same bits at every
degree if asked to."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from ctypes import byref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import NoAnswer
from paceline.kernels.base import Batch
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import VECTOR, Pack, Packed
from paceline.kernels.cpu.program import _matrix
from paceline.models.config import ModelConfig
from paceline.models.load import open_model
from paceline.models.weights import Format, TensorSource, describe_weights, in_format
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.decoder_pack import decoder_layout, read_decoder
from paceline.runner.loading.pack_store import SIZE_VARIABLE, entries
from paceline.runner.parallel.compiled_part import pack_of_rank
from paceline.runner.parallel.messages import Load
from paceline.runner.parallel.split import piece_of, plan_split
from tests.kernels.tiny_forward import rows_of
from tests.runner.parallel.compiled_ranks import CompiledRanks, Held, apart
from tests.runner.parallel.split_models import PAGES, VARIANTS, write_tiny
from tests.tiny_batches import chunks_of
from tests.tiny_models import TARGET, random_weights

TOKENS = [(7 * i + 3) % 96 for i in range(60)]
SIZES = (20, 5, 1, 14)
SLOTS = torch.arange(16 * PAGES)
WIDE = replace(TARGET.config, head_dim=32, intermediate_size=160)  # four shards: one group, but for the last one's two
KINDS: Mapping[str, ModelConfig] = {
    **VARIANTS,
    "wide": WIDE,
    "everything": replace(
        VARIANTS["gemma"], head_dim=32, qkv_bias=True, output_bias=True, mlp_bias=True, tied_head=True
    ),
}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch)


def whole(
    config: ModelConfig, weights: Mapping[str, Tensor], format: Format, taps: tuple[int, ...] = ()
) -> CompiledForward:
    """The program of the unsplit model, packed from memory."""
    packed = {name: in_format(weight, name, format=format) for name, weight in weights.items()}
    return CompiledForward(config, packed, num_pages=PAGES, threads=1, taps=taps)


def near(mine: Tensor, other: Tensor) -> None:
    """Sums in another order round an input of the next product to another integer now and then, so that an error is
    rare or tiny."""
    error = (mine - other).abs() / other.std()
    assert error.median() < 1e-5
    assert error.max() < 0.1


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_computes(kind: str, format: Format) -> None:
    config, weights = KINDS[kind], random_weights(KINDS[kind], seed=3)
    ranks, one = CompiledRanks.of(config, weights, 2, format=format), whole(config, weights, format)
    for batch in chunks_of(TOKENS, SIZES):
        output, expected = ranks.compute(batch), one(batch)
        near(output.logits, expected.logits)
        assert torch.equal(output.argmax, output.logits.argmax(-1).int())
    near(ranks.read(SLOTS), torch.stack(one.kv.read(SLOTS)))


@pytest.mark.parametrize(("degree", "heads", "kv_heads"), [(3, 6, 3), (4, 4, 2), (4, 4, 1)])
def test_other_degrees(degree: int, heads: int, kv_heads: int) -> None:
    """A number of ranks that is no power of two, and more ranks than key/value heads."""
    config = replace(WIDE, num_heads=heads, num_kv_heads=kv_heads)
    weights = random_weights(config, seed=3)
    ranks, one = CompiledRanks.of(config, weights, degree), whole(config, weights, "int4")
    for batch in chunks_of(TOKENS, SIZES):
        near(ranks.compute(batch).logits, one(batch).logits)
    near(ranks.read(SLOTS), torch.stack(one.kv.read(SLOTS)))


def test_more_rows_than_a_slot_holds() -> None:
    """127 rows of 2,048 numbers go through a slot at once."""
    config = replace(WIDE, hidden_size=2048, num_layers=1, vocab_size=96)
    weights = random_weights(config, seed=3)
    ranks = CompiledRanks.of(config, weights, 2, num_pages=20, threads=(1, 2))
    tokens = [(7 * i * i + 3) % 96 for i in range(300)]
    pages = list(range(20))
    together = ranks.compute(rows_of((tokens, 0, 300, pages)))
    logits = together.logits.clone()
    for first in (0, 120, 240):
        last = min(first + 120, 300)
        assert torch.equal(ranks.compute(rows_of((tokens, first, last, pages))).logits, logits[first:last])


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_every_batch(format: Format) -> None:
    """Token by token, in chunks beside other sequences, and with other numbers of threads on the ranks."""
    config = KINDS["everything"]
    weights, texts = random_weights(config, seed=3), [TOKENS[:40], TOKENS[13:50]]
    tables = [[5, 2, 7], [1, 0, 6]]
    alone = CompiledRanks.of(config, weights, 2, format=format)
    wanted = [
        torch.cat([alone.compute(rows_of((text, i, i + 1, pages))).logits.clone() for i in range(len(text))])
        for text, pages in zip(texts, tables, strict=True)
    ]
    kept = alone.read(SLOTS)
    source = random.Random(1)
    for threads in ((1, 1), (2, 1), (1, 3)):
        ranks, done = CompiledRanks.of(config, weights, 2, format=format, threads=threads), [0, 0]
        while done != [40, 37]:
            stops = [min(len(text), start + source.randint(1, 12)) for text, start in zip(texts, done, strict=True)]
            works = [w for w in zip(texts, done, stops, tables, strict=True) if w[2] > w[1]]
            logits = ranks.compute(rows_of(*works)).logits
            for text, start, stop, _ in works:
                mine, logits = logits[: stop - start], logits[stop - start :]
                assert torch.equal(mine, wanted[texts.index(text)][start:stop])
            done = stops
        assert torch.equal(ranks.read(SLOTS), kept)


def passes(degree: int, *, same_bits: bool = True) -> list[Tensor]:
    """Logits, hidden states, and keys and values, after several passes."""
    config = KINDS["everything"]
    config = replace(config, intermediate_size=160)
    ranks = CompiledRanks.of(config, random_weights(config, seed=3), degree, same_bits=same_bits, taps=(0, 1))
    outputs = [ranks.compute(batch) for batch in chunks_of(TOKENS, SIZES)]
    features = [output.features.clone() for output in outputs if output.features is not None]
    return [torch.cat([output.logits for output in outputs]), torch.cat(features), ranks.read(SLOTS)]


def test_the_same_bits_at_every_degree() -> None:
    one = passes(1)
    for degree in (2, 4):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, passes(degree), strict=True))


def test_other_bits_if_not_asked_to() -> None:
    """Or the law above would say nothing."""
    one, two = (passes(degree, same_bits=False)[0] for degree in (2, 4))
    assert not torch.equal(one, two)
    near(one, two)


def test_hidden_states_embeddings_and_outputs() -> None:
    config, taps = VARIANTS["gemma"], (0, 1, 3, 4)
    weights, [batch] = random_weights(config, seed=3), chunks_of(TOKENS, (20,))
    batch = Batch(**{name: getattr(batch, name) for name in batch.__slots__} | {"states": True})
    one, ranks = whole(config, weights, "int4", taps), CompiledRanks.of(config, weights, 2, taps=taps)
    expected, output = one(batch), ranks.compute(batch)
    for name in ("features", "states"):
        near(getattr(output, name), getattr(expected, name))
    tokens = torch.arange(97, dtype=torch.int32)
    for embedded in ranks.threads.each(lambda rank, exchange: ranks.parts[rank].embed(tokens)):
        assert torch.equal(embedded, one.embed(tokens))
    states = torch.randn((5, 64), generator=torch.Generator().manual_seed(1))
    logits = ranks.threads.each(lambda rank, exchange: ranks.parts[rank].project(states))[0]
    assert logits is not None
    assert torch.equal(logits, one.project(states)), "an output is computed by one rank"


def test_a_pass_without_logits() -> None:
    [batch] = chunks_of(TOKENS, (20,))
    ranks = CompiledRanks.of(WIDE, random_weights(WIDE, seed=3), 2)
    empty = replace(batch, logit_rows=batch.logit_rows[:0])
    assert ranks.compute(empty).logits.shape == (0, 97)
    assert ranks.read(SLOTS).abs().sum() > 0


def test_nan_never_wins() -> None:
    weights = random_weights(WIDE, seed=3)
    ranks = CompiledRanks.of(WIDE, weights, 2)
    logits = torch.tensor([[torch.nan, 1.0, 2.0], [5.0, torch.nan, 5.0], [torch.nan] * 3])
    best = [torch.tensor([0, 0, 0], dtype=torch.int32), torch.tensor([1, 1, 0], dtype=torch.int32)]
    part = ranks.parts[0]
    part.config = replace(WIDE, vocab_size=3)  # one token on rank 0, two on rank 1
    assert part._highest(logits, best).tolist() == [2, 0, 0]


def test_keys_and_values_move_on_every_rank() -> None:
    ranks = CompiledRanks.of(WIDE, random_weights(WIDE, seed=3), 4)  # two key/value heads
    ranks.compute(chunks_of(TOKENS, (20,))[0])
    before = ranks.read(SLOTS)
    ranks.threads.each(lambda rank, exchange: ranks.parts[rank].move([80, 81], [3, 80]))
    after = ranks.read(SLOTS)
    assert torch.equal(after[:, :, [3, 80]], before[:, :, [80, 81]])
    assert not torch.equal(before[:, :, 80], before[:, :, 81])


# ── packs ──


def unpacked(matrix: Packed) -> Tensor:
    """All numbers of a packed matrix."""
    out, rows = torch.empty((matrix.outputs, matrix.inputs)), torch.arange(matrix.outputs, dtype=torch.int32)
    assert load_library().paceline_rows(byref(_matrix(matrix)), rows.data_ptr(), len(rows), out.data_ptr()) == 0
    return out


def check_packs(source: TensorSource, config: ModelConfig, format: Format, degree: int) -> None:
    """A rank's matrices have the bits of the whole model's."""
    split = plan_split("tiny", config, degree=degree, same_bits=False, packed=True)
    complete = Pack(decoder_layout(describe_weights(source, config, format=format)), threads=2)
    read_decoder(complete, source, config, format=format)
    rank = degree - 1
    load = Load(0, "tiny", format, split, 1, torch.float32, ())
    part = pack_of_rank(load, source, config, rank=rank)
    for name in part.layout.items:
        if part.layout.items[name].format == VECTOR:
            continue
        mine, other, piece = part.matrix(name), complete.matrix(name), piece_of(name, config, rank, split)
        assert piece is not None
        assert mine.format == other.format, name
        theirs = unpacked(other).narrow(0 if piece.axis == "rows" else 1, piece.start, piece.size)
        assert torch.equal(unpacked(mine), theirs), name


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_pack_of_floats(format: Format) -> None:
    check_packs(Held(random_weights(WIDE, seed=3)), WIDE, format, 4)


@pytest.mark.slow
def test_a_pack_of_a_quantised_file() -> None:
    opened = open_model("smollm2")
    check_packs(opened.source, opened.config, "native", 3)


def test_ranks_have_packs_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts of the same sizes, which a cache could mistake for each other."""
    monkeypatch.setenv(SIZE_VARIABLE, "1G")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    config = replace(WIDE, intermediate_size=128, vocab_size=96)
    opened = open_model(str(write_tiny(tmp_path, config, random_weights(config, seed=3))))
    split = plan_split("tiny", opened.config, degree=2, same_bits=False, packed=True)
    load = Load(0, str(tmp_path), "int4", split, 1, torch.float32, ())

    def sums() -> list[int]:
        return [pack_of_rank(load, opened.source, opened.config, rank=rank).checksum() for rank in range(2)]

    first = sums()
    assert len({*first}) == 2
    assert sums() == first
    assert sorted(entry.model for entry in entries()) == [f"{tmp_path.name}, rank {rank} of 2" for rank in range(2)]


# ── ranks that are lost ──


@pytest.mark.parametrize("threads", [1, 2])
def test_a_silent_rank_ends_the_pass(threads: int) -> None:
    ranks = CompiledRanks.of(WIDE, random_weights(WIDE, seed=3), 2, threads=(threads, 1), timeout=0.2)
    [batch] = chunks_of(TOKENS, (20,))
    for _ in range(2):  # and every later one
        with pytest.raises(NoAnswer, match="another rank has not answered in time") as caught:
            ranks.parts[0].compute(batch)
        assert caught.value.silent
    keys, _ = ranks.parts[0]._forward.kv.read(SLOTS)
    assert not keys.any(), "layers are computed after the loss"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rank_that_is_gone_ends_the_pass(threads: int) -> None:
    mine, theirs = socket.socketpair()
    ranks = CompiledRanks.of(WIDE, random_weights(WIDE, seed=3), 2, threads=(threads, 1), pipes=[mine.fileno()])
    theirs.close()
    with pytest.raises(NoAnswer, match="another rank has gone") as caught:
        ranks.parts[0].compute(chunks_of(TOKENS, (20,))[0])
    assert not caught.value.silent
    mine.close()


def test_a_late_rank_loses_nothing() -> None:
    """Its sums are waited for: a slot is not written again before all have read it."""
    ranks = CompiledRanks.of(WIDE, random_weights(WIDE, seed=3), 2)
    batches = chunks_of(TOKENS, SIZES)
    expected = [ranks.compute(batch).logits.clone() for batch in batches]
    pauses = random.Random(2)

    def work(rank: int, _: object) -> list[Tensor]:
        found = []
        for batch in batches:
            torch.zeros(pauses.randrange(1, 1 << 22)).sum()
            output = ranks.parts[rank].compute(batch)
            found += [] if output is None else [output.logits.clone()]
        return found

    found = ranks.threads.each(work)[0]
    assert all(map(torch.equal, found, expected))
