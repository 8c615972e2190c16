"""Which part of a model each shard has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidRequest
from paceline.models.load import open_model
from paceline.models.shapes import SHAPES
from paceline.models.tensor_names import expected_shapes
from paceline.models.weights import load_weights
from paceline.runner.parallel.sharded_source import ShardedSource
from paceline.runner.parallel.split import (
    Split,
    inputs_of_shards,
    kv_heads,
    piece_of,
    plan_split,
    shard_config,
)
from tests.runner.parallel.split_models import VARIANTS, cut, write_tiny
from tests.tiny_models import TARGET, random_weights

CONFIG = TARGET.config  # 4 heads, 2 key/value heads, 97 tokens


def test_ranks_have_their_shards_in_order() -> None:
    split = Split(degree=4, shards=8)
    assert [list(split.of_rank(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_together_are_the_model(shards: int) -> None:
    split = Split(degree=shards, shards=shards)
    for name, shape in expected_shapes(CONFIG).items():
        pieces = [piece_of(name, CONFIG, shard, split) for shard in range(shards)]
        if pieces[0] is None:
            assert name.endswith("norm")
            continue
        covered = [set(range(piece.start, piece.stop)) for piece in pieces if piece is not None]
        size = shape[0] if pieces[0].axis == "rows" else shape[1]
        assert set.union(*covered) == set(range(size)), name
        copies = shards // CONFIG.num_kv_heads if name.endswith((".k", ".v")) and shards > CONFIG.num_kv_heads else 1
        assert sum(map(len, covered)) == size * copies, name


def test_heads_read_their_own_keys() -> None:
    """Query head h of the model reads key/value head h // 2, in any split."""
    for shards in (1, 2, 4):
        split = Split(degree=1, shards=shards)
        for shard in range(shards):
            config, (first, end) = shard_config(CONFIG, shard, split), kv_heads(CONFIG, shard, split)
            group = config.num_heads // config.num_kv_heads
            for head in range(config.num_heads):
                whole = shard * config.num_heads + head
                assert first + head // group == whole // 2 < end


@pytest.mark.parametrize("variant", ["llama", "tied", "biases"])
def test_a_shard_reads_its_part_of_every_tensor(variant: str, tmp_path: Path) -> None:
    config, split = VARIANTS[variant], Split(degree=2, shards=2)
    weights = random_weights(config, seed=0)
    opened = open_model(str(write_tiny(tmp_path, config, weights)))
    for shard in range(2):
        source = ShardedSource(opened.source, opened.config, shard=shard, split=split)
        part = load_weights(source, shard_config(opened.config, shard, split))
        expected = cut(weights, config, shard, split)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[name], expected[name]) for name in part)
    assert source.files() == opened.source.files()
    sizes = sum(source.size(name) for name in source.shapes())
    assert sizes < 0.6 * sum(opened.source.size(name) for name in opened.source.shapes())


def test_a_shard_of_a_quantised_file() -> None:
    """Rows of q and k are stored in another order, and columns inside of blocks."""
    opened, split = open_model("smollm2"), Split(degree=3, shards=3)
    source = ShardedSource(opened.source, opened.config, shard=1, split=split)
    config = shard_config(opened.config, 1, split)
    for file_name, canonical in (("attn_q", "q"), ("attn_k", "k"), ("ffn_down", "down")):
        name, canonical = f"blk.3.{file_name}.weight", f"layers.3.{canonical}"
        rows, piece = opened.source.shapes()[name][0], piece_of(canonical, opened.config, 1, split)
        whole = opened.source.dialect.convert(canonical, opened.source.read_float(name, 0, rows), opened.config)
        part = source.dialect.convert(canonical, source.read_float(name, 0, source.shapes()[name][0]), config)
        assert isinstance(whole, torch.Tensor)
        assert piece is not None
        assert torch.equal(part, whole.narrow(0 if piece.axis == "rows" else 1, piece.start, piece.size))
    assert source.quantised


def test_kv_memory_counts_copies() -> None:
    one, two, four = (Split(degree=n, shards=n).page_bytes(CONFIG, torch.float32) for n in (1, 2, 4))
    assert one == two == four // 2


@pytest.mark.parametrize(
    ("shape", "degree", "same_bits", "allowed"),
    [
        (
            "smollm2-135m",
            2,
            False,
            "3 key/value heads, and can be split over 1, 3 or 9 ranks only",
        ),
        ("smollm2-135m", 3, True, "can be split with the same bits across degrees over 1 rank only"),
        ("llama-3.1-8b", 3, False, "over 1, 2, 4, 8, 16 or 32 ranks only"),
        ("llama-3.1-8b", 16, True, "over 1, 2, 4 or 8 ranks only"),
    ],
)
def test_degrees_that_heads_do_not_allow(shape: str, degree: int, same_bits: bool, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tensor_parallel {degree}: tiny has .*{allowed}"):
        plan_split("tiny", SHAPES[shape], degree=degree, same_bits=same_bits)


def test_heads_that_would_read_keys_of_two_shards() -> None:
    uneven = replace(CONFIG, num_heads=12, num_kv_heads=4)
    with pytest.raises(InvalidRequest, match="over 1, 2, 4 or 12 ranks"):
        plan_split("tiny", uneven, degree=6, same_bits=False)


def test_shards_of_every_degree() -> None:
    llama = SHAPES["llama-3.1-8b"]
    assert [plan_split("x", llama, degree=n, same_bits=True).shards for n in (1, 2, 4, 8)] == [8, 8, 8, 8]
    assert [plan_split("x", llama, degree=n, same_bits=False).shards for n in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert "8 shards, with the same bits" in plan_split("x", llama, degree=8, same_bits=True).spoken


def test_compiled_shards_are_cut_between_groups() -> None:
    """96 columns of the MLP are three groups of 32: one on the first rank, two on the second."""
    split = plan_split("tiny", CONFIG, degree=2, same_bits=False, packed=True)
    assert [shard_config(CONFIG, rank, split).intermediate_size for rank in range(2)] == [32, 64]
    assert [inputs_of_shards("down", CONFIG, rank, split) for rank in range(2)] == [[32], [64]]
    assert [inputs_of_shards("o", CONFIG, rank, split) for rank in range(2)] == [[32], [32]]


def test_compiled_ranks_have_whole_heads() -> None:
    """With the same bits at every degree, a rank has its shards' heads in one piece, and cuts their sums alone."""
    config = replace(CONFIG, head_dim=32, intermediate_size=160)
    split = plan_split("tiny", config, degree=2, same_bits=True, packed=True)
    assert (split.shards, split.by_ranks.shards) == (4, 2)
    assert shard_config(config, 1, split.by_ranks).num_heads == 2
    assert [inputs_of_shards("o", config, rank, split) for rank in range(2)] == [[32, 32], [32, 32]]
    assert [inputs_of_shards("down", config, rank, split) for rank in range(2)] == [[32, 32], [32, 64]]
    assert split.page_bytes(config, torch.bfloat16) == Split(1, 1).page_bytes(config, torch.bfloat16)
    four = plan_split("tiny", config, degree=4, same_bits=True, packed=True)
    assert four.page_bytes(config, torch.bfloat16) == 2 * Split(1, 1).page_bytes(config, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, "1 or 2"),
        ({"intermediate_size": 32}, "1 rank only"),
        ({"head_dim": 32, "intermediate_size": 160}, "1, 2 or 4"),
    ],
)
def test_groups_that_shards_would_cut(changes: dict[str, int], allowed: str) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"weights in groups of 32 inputs, and can be split over {allowed}"):
        plan_split("tiny", config, degree=3, same_bits=False, packed=True)
