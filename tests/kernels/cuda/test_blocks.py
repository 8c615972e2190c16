"""Block drafters as launches: their blocks are those of plain torch, and they write where nobody reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.kernels.base import PAGE_SIZE
from paceline.models.block_config import Convolutions, Markov, Selector
from paceline.models.block_heads import BlockHead
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads import cuda_block
from paceline.runner.heads.block import TorchBlock
from paceline.runner.heads.cuda_block import CudaBlock, check_on_cuda
from paceline.runner.heads.protocol import Anchor
from paceline.runner.heads.selector import BEHIND
from paceline.runner.loading.blocks import ReadyBlock
from paceline.runner.rounds.device_state import DeviceState
from tests.block_heads import random_block
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.round_pairs import forward
from tests.kernels.cuda.test_heads import compare
from tests.kernels.tiny_forward import rows_of
from tests.tiny_models import TARGET, VOCAB, cuda_forward

PAGES = 12
TABLES = ((0, 5), (3, 8), (6, 2), (9, 4))  # pages of the lanes
LENGTHS = (6, 17, 22, 1)  # committed tokens: the context ends inside of a page, at its end, in a second one, is empty
DUMMY = len(LENGTHS)
SEATS = (2, 0, DUMMY, 3, 1)
REAL = [seat for seat, lane in enumerate(SEATS) if lane != DUMMY]
TEXTS = np.random.default_rng(0).integers(0, VOCAB, (len(LENGTHS), 32)).tolist()
NETWORKS: dict[str, dict[str, Any]] = {
    "fill-in": {},
    "anchor first": {"anchor_first": True},
    "longer than a page": {"block_size": 21, "layers": 1},
    "causal, with a window": {"window": 6},
    "causal in one layer of two": {"causal": (True, False)},
    "draft vocabulary": {"draft_vocab": 61},
    "vanilla": {"markov": Markov("vanilla", 8), "anchor_first": True, "layers": 1},
    "gated": {"markov": Markov("gated", 8), "layers": 1},
    "rnn": {"markov": Markov("rnn", 8), "layers": 1},
    "odd rank": {"markov": Markov("vanilla", 7), "anchor_first": True, "layers": 1},
    "odd rank, rnn": {"markov": Markov("rnn", 21), "layers": 1},
    "convolutions": {"convolutions": Convolutions(2, 16)},
    "choice": {"selector": Selector(8, 6), "layers": 1},
    "DFlash2": {"convolutions": Convolutions(3, 8), "selector": Selector(8, 5), "draft_vocab": 61},
    "scaled": {"embedding_scale": 2.0, "logit_scale": 0.5, "softcap": 4.0, "layers": 1},
}


def network(*, causal: tuple[bool, ...] | None = None, **options: Any) -> BlockHead:
    head = random_block(TARGET.config, taps=(0, 1, 2), **{"block_size": 4, **options})
    return head if causal is None else replace(head, config=replace(head.config, causal=causal))


def rounded(head: BlockHead) -> BlockHead:
    """The head with weights that are exact in bf16: some networks carry their rounding far."""
    weights = {name: each.bfloat16().float() if ON_GPU else each for name, each in head.weights.items()}
    return replace(head, weights=weights)


def left_behind(logits: Tensor) -> Tensor:
    """Tell which logits are those of tokens that a selector did not choose from."""
    return logits < -BEHIND / 2


def features(head: BlockHead, count: int, *, seed: int = 3) -> Tensor:
    return torch.randn((count, head.config.width), generator=torch.Generator().manual_seed(seed))


def state_of(device: torch.device, lengths: tuple[int, ...] = LENGTHS) -> DeviceState:
    """Lanes with these committed tokens."""
    state = DeviceState(lanes=len(lengths), width=40, scratch_page=PAGES, device=device)
    for lane, (length, pages) in enumerate(zip(lengths, TABLES, strict=True)):
        state.tokens[lane] = torch.tensor((TEXTS[lane] + [0] * 8)[:40])
        state.lengths[lane] = length
        state.pages[lane, : len(pages)] = torch.tensor(pages)
    return state


class Blocks:
    """A block drafter on the kernels that has read the contexts of the lanes."""

    def __init__(self, head: BlockHead, *, contexts: bool = True) -> None:
        self.target = cuda_forward(TARGET, num_pages=PAGES)
        self.block = CudaBlock(replace(head, weights=dict(head.weights)), self.target.decoder, max_context=32)
        self.block.new_kv(PAGES, seats=len(SEATS))
        self.device = self.block.device
        self.head = head
        if contexts:
            self.read(*((lane, 0, length - 1) for lane, length in enumerate(LENGTHS) if length > 1))

    def read(self, *works: tuple[int, int, int], seed: int = 3) -> None:
        """Read positions [start, stop) of lanes."""
        batch = rows_of(*((TEXTS[lane], start, stop, TABLES[lane]) for lane, start, stop in works))
        states = features(self.head, len(batch.tokens), seed=seed).to(self.device, self.block.dtype)
        rows = self.target._placed(batch)
        padding = states.new_ones((len(rows.tokens) - len(states), states.shape[1]))
        self.block.read(rows, torch.cat([states, padding]))

    def drafted(self, seats: tuple[int, ...] = SEATS, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
        """Logits [turns, seats, …] of all drafted rows, each after the token `turn + 1`."""
        longest, state = self.head.config.longest, state_of(self.device, lengths)
        lanes = torch.tensor(seats, dtype=torch.int32, device=self.device)
        before = self.block.run(state, lanes, context=40, tokens=longest)
        told = []
        for turn in range(longest):
            told.append(self.block.logits_after(turn, before).clone())
            before = torch.full_like(before, turn + 1)
        return torch.stack(told)


def in_torch(head: BlockHead) -> Tensor:
    """The same logits [turns, real seats, …] in plain torch."""
    block = TorchBlock(head, TorchForward(TARGET.config, TARGET.weights, num_pages=PAGES), num_pages=PAGES)
    batch = rows_of(*((TEXTS[lane], 0, length - 1, TABLES[lane]) for lane, length in enumerate(LENGTHS) if length > 1))
    block(batch, features=features(head, len(batch.tokens)))
    longest, anchors = head.config.longest, []
    for lane in (SEATS[seat] for seat in REAL):
        last = LENGTHS[lane] - 1
        anchors.append(Anchor(TEXTS[lane][last], last, TABLES[lane][: -(-last // PAGE_SIZE)], longest))
    made = block.blocks(anchors)
    told = [
        [rows.logits(turn, turn or anchor.token)[0] for rows, anchor in zip(made, anchors, strict=True)]
        for turn in range(longest)
    ]
    return torch.stack([torch.stack(each) for each in told])


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_are_those_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of two turns are computed at once, beside a seat of the dummy lane."""
    monkeypatch.setattr(cuda_block, "MAX_OUTS", 2 * len(SEATS))
    head = rounded(network(**NETWORKS[name]))
    got, wanted = Blocks(head).drafted()[:, REAL].cpu(), in_torch(head)
    same = left_behind(got) == left_behind(wanted)  # a token that is chosen by a hair may be another in bf16
    assert (~same).sum() <= (0.05 if ON_GPU else 0) * (~left_behind(wanted)).sum()
    compare(got[same], wanted[same])


def test_a_block_does_not_depend_on_its_neighbours() -> None:
    """Alone, each has the pages of another seat, and the same bits."""
    made = Blocks(network(layers=1))
    together = made.drafted()
    for seat in REAL:
        assert torch.equal(made.drafted((SEATS[seat],))[:, 0], together[:, seat])


def test_a_block_writes_nothing_that_has_been_read() -> None:
    """Only what follows the context in its last page, and pages of its seat. A full last page is left alone."""
    made = Blocks(network(block_size=21, layers=1))
    kv = made.block.kv
    before = [memory.clone() for memory in (kv.keys, kv.values)]
    made.drafted()
    free = {(page, place) for page in range(PAGES + 1, PAGES + 1 + 2 * len(SEATS)) for place in range(PAGE_SIZE)}
    for length, pages in zip(LENGTHS, TABLES, strict=True):
        page, first = divmod(length - 1, PAGE_SIZE)
        free |= {(pages[page], place) for place in range(first, PAGE_SIZE) if first}
    for old, new in zip(before, (kv.keys, kv.values), strict=True):
        changed = (old != new).any(dim=(0, 2, 4)).nonzero().tolist()  # of [layers, pages, heads, places, dimensions]
        assert changed
        assert {(page, place) for page, place in changed} <= free


def test_rows_that_see_later_ones_keep_their_positions(device: torch.device) -> None:
    """The last row sees the same either way, also where no norm keeps attention from rotating by itself."""
    target = forward(device)
    rows = target._placed(rows_of(([3, 9, 4, 1, 5], 0, 5, [0])))
    alone = target.decoder.hidden(rows, target.kv).clone()
    together = target.decoder.hidden(replace(rows, lasts=torch.full_like(rows.positions, 4)), target.kv)
    assert torch.equal(together[4], alone[4])
    assert not torch.equal(together[0], alone[0])


def test_padding_of_what_is_read_meets_no_block() -> None:
    made = Blocks(network(layers=1), contexts=False)
    made.read((0, 0, 17))  # is padded
    own = made.block.kv.keys[:, PAGES + 1 :]
    assert made.block.kv.keys[:, PAGES].any(), "padding goes to the target's scratch page"
    assert not own.any()


def test_what_follows_a_block_is_read_over_it() -> None:
    after, (made, fresh) = tuple(length + 2 for length in LENGTHS), (Blocks(network(layers=1)) for _ in range(2))
    made.drafted()
    for each in (made, fresh):
        each.read(*((lane, length - 1, length + 1) for lane, length in enumerate(LENGTHS)), seed=4)
    assert torch.equal(made.drafted(lengths=after)[:, REAL], fresh.drafted(lengths=after)[:, REAL])


def test_the_largest_pass_allocates_every_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made = Blocks(network(markov=Markov("rnn", 8), layers=1), contexts=False)
    made.block.profile(20, 2 * len(SEATS))
    known = {name: [len(each) for each in sizes] for name, sizes in made.block._buffers.items()}
    made.block.new_kv(PAGES, seats=len(SEATS))
    made.read((0, 0, 17))
    made.drafted()
    assert {name: [len(each) for each in sizes] for name, sizes in made.block._buffers.items()} == known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 6, "causal": (True, False)}, "layers with a window whose rows see later ones"),
        ({"block_size": 65}, "blocks of 65 rows, more than 64"),
    ],
)
def test_networks_without_launches_are_refused(options: dict[str, Any], message: str) -> None:
    head = network(**options)
    ready = ReadyBlock(head, lambda: pytest.fail("its weights are read"), compiled=False, shared_bytes=0)
    target = cuda_forward(TARGET, num_pages=PAGES).decoder
    with pytest.raises(UnsupportedModel, match=f"has {message}.*run on a CPU only"):
        ready.on_cuda(target, max_context=32)


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"causal": (True, False)}, {"block_size": 64}])
def test_networks_with_launches(options: dict[str, Any]) -> None:
    check_on_cuda(network(**options).config)
