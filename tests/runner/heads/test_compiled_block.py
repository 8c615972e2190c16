"""Compiled block drafters compared with those in torch: logits of blocks, what they leave behind, bits of variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.kernels.quant import values_of
from paceline.models.block_config import Convolutions, Markov, Selector
from paceline.models.block_heads import BlockHead
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.block import TorchBlock
from paceline.runner.heads.compiled_block import MAX_BLOCKS, CompiledBlock
from paceline.runner.heads.protocol import Anchor, BlockForward
from tests.block_heads import random_block
from tests.kernels.tiny_forward import RUNNABLE
from tests.runner.heads.test_torch import CONFIG, COUNTS, FEATURES, FIRST, FLOATS, PAGES, TABLES, compiled, rows

NETWORKS: dict[str, dict[str, Any]] = {
    "fill-in": {},
    "anchor first": {"anchor_first": True},
    "longer than a page": {"block_size": 21},
    "causal, with a window": {"window": 6},
    "both ways, with a window": {"window": 6, "causal": (False, False)},
    "both ways, with a window that is shorter than a block": {"window": 3, "causal": (False, False)},
    "window in one layer of two": {"window": 4, "causal": (True, False), "block_size": 21},
    "draft vocabulary": {"draft_vocab": 60},
    "markov": {"markov": Markov("vanilla", 32), "anchor_first": True},
    "gated": {"markov": Markov("gated", 32), "confidence": "states and tokens"},
    "rnn": {"markov": Markov("rnn", 32)},
    "odd rank": {"markov": Markov("vanilla", 7), "draft_vocab": 60},
    "odd rank, gated": {"markov": Markov("gated", 33), "confidence": "states and tokens"},
    "odd rank, rnn": {"markov": Markov("rnn", 20)},
    "convolutions": {"convolutions": Convolutions(2, 16)},
    "choice": {"selector": Selector(8, 6)},
    "DFlash2": {"convolutions": Convolutions(3, 8), "selector": Selector(24, 5), "draft_vocab": 60, "block_size": 21},
    "scaled": {"embedding_scale": 2.0, "logit_scale": 0.5, "softcap": 4.0},
}
NEXT = rows(COUNTS, (2, 3, 1), [5, 6, 7, 8, 9, 10], (0, 1, 2))  # the rows after those of FIRST
BEFORE = 4  # token that a row is asked for after


def network(*, causal: tuple[bool, ...] | None = None, **options: Any) -> BlockHead:
    """Kernels of convolutions are small: large ones carry the rounding of 8 bits far."""
    head = random_block(CONFIG, taps=(0, 1, 2), **{"block_size": 6, **options})
    kernels = {name: 0.1 * values_of(each) for name, each in head.weights.items() if name.endswith("_conv.kernel")}
    head = replace(head, weights={**head.weights, **kernels})
    return head if causal is None else replace(head, config=replace(head.config, causal=causal))


def make(head: BlockHead, *, threads: int = 2) -> CompiledBlock:
    return CompiledBlock(head.quantised(), compiled(threads=threads), num_pages=PAGES, max_context=48)


def in_torch(head: BlockHead) -> TorchBlock:
    target = TorchForward(CONFIG, FLOATS, num_pages=PAGES)
    floats = head.quantised().in_floats()
    shapes = {name: values_of(weight).shape for name, weight in head.weights.items()}
    assert all(not values_of(each)[..., shapes[name][-1] :].any() for name, each in floats.weights.items()), "padding"
    weights = {name: values_of(each)[..., : shapes[name][-1]] for name, each in floats.weights.items()}
    return TorchBlock(replace(floats, weights=weights), target, num_pages=PAGES)


def anchors(head: BlockHead) -> list[Anchor]:
    """Anchors after the rows of FIRST: inside of the first page, right at its beginning, and inside of the second."""
    longest = head.config.longest
    return [Anchor(7 + s, count, TABLES[s][: -(-count // 16)], longest - (s == 1)) for s, count in enumerate(COUNTS)]


def drafted(block: BlockForward, asked: list[Anchor]) -> tuple[torch.Tensor, list[float | None]]:
    """Return the logits of all rows of all blocks, and the confidence in each. The best of each is told with them."""
    logits, sure = [], []
    with torch.inference_mode():
        for each, anchor in zip(block.blocks(asked), asked, strict=True):
            for row in range(anchor.tokens):
                sure.append(each.confidence(row, BEFORE))
                logits.append(each.logits(row, BEFORE).clone())
                assert each.best(row) == int(logits[-1].argmax())
    return torch.cat(logits), sure


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_are_those_of_torch(name: str) -> None:
    head = network(**NETWORKS[name])
    mine, plain = make(head), in_torch(head)
    for block in (mine, plain):
        block(FIRST, features=FEATURES)
    (found, sure), (expected, sure_there) = drafted(mine, anchors(head)), drafted(plain, anchors(head))
    assert distance(found, expected) < 0.06
    assert [each is None for each in sure] == [each is None for each in sure_there]
    assert [each or 0 for each in sure] == pytest.approx([each or 0 for each in sure_there], abs=0.05)


def test_probabilities_are_those_of_a_softmax() -> None:
    mine = make(network())
    logits = 4 * torch.randn((1, 1003), generator=torch.Generator().manual_seed(5))
    for place in (0, 517, 1002, int(logits.argmax())):
        assert mine.probability(logits, place) == pytest.approx(float(logits[0].softmax(0)[place]), rel=1e-5)
    logits[0, :900] = -torch.inf  # tokens that are ruled out
    assert mine.probability(logits, 3) == 0
    assert mine.probability(logits, 1000) == pytest.approx(float(logits[0].softmax(0)[1000]), rel=1e-5)


def test_rows_see_later_ones_of_their_block() -> None:
    """Of a block whose last rows are not computed, or are not seen, the first rows would have other logits."""
    head = network()
    mine, causal = make(head), in_torch(random_block(CONFIG, taps=(0, 1, 2), block_size=6, window=999))
    for block in (mine, causal):
        block(FIRST, features=FEATURES)
    found, other = drafted(mine, anchors(head))[0], drafted(causal, anchors(head))[0]
    assert distance(found, other) > 0.2


def test_a_block_leaves_nothing_behind() -> None:
    head = network()
    mine, fresh = make(head), make(head)
    for block in (mine, fresh):
        block(FIRST, features=FEATURES)
    first, again = drafted(mine, anchors(head))[0], drafted(mine, anchors(head))[0]
    assert torch.equal(first, again)
    for block in (mine, fresh):
        block(NEXT, features=FEATURES[:6])
    asked = [Anchor(2, each.position + 1, TABLES[s][:2], each.tokens) for s, each in enumerate(anchors(head))]
    assert torch.equal(drafted(mine, asked)[0], drafted(fresh, asked)[0])


@pytest.mark.parametrize("name", ["markov", "DFlash2"])
def test_a_block_does_not_depend_on_its_neighbours(name: str) -> None:
    head = network(**NETWORKS[name])
    mine = make(head)
    mine(FIRST, features=FEATURES)
    together = drafted(mine, anchors(head))[0]
    alone = torch.cat([drafted(mine, [anchor])[0] for anchor in anchors(head)])
    assert torch.equal(together, alone)


def test_more_blocks_than_one_pass_has_room_for() -> None:
    head = network()
    mine = make(head)
    mine(FIRST, features=FEATURES)
    asked = anchors(head)
    many = [asked[i % 2 * 2] for i in range(MAX_BLOCKS + 3)]  # the same context may be drafted after more than once
    once = [drafted(mine, [anchor])[0] for anchor in (asked[0], asked[2])]
    assert torch.equal(drafted(mine, many)[0], torch.cat([once[i % 2] for i in range(MAX_BLOCKS + 3)]))


@pytest.mark.parametrize("options", [{"markov": Markov("vanilla", 32), "window": 5}, NETWORKS["DFlash2"]])
@pytest.mark.parametrize("variant", RUNNABLE)
def test_variants_have_the_same_bits(variant: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    head = network(**{**options, "block_size": 21})
    usual = make(head)
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    forced = make(head, threads=1)
    for block in (usual, forced):
        block(FIRST, features=FEATURES)
    assert torch.equal(drafted(usual, anchors(head))[0], drafted(forced, anchors(head))[0])
