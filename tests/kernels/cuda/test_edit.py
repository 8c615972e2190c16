"""Penalties, bias and masks on a device: to the last bit those of the reference, and of the host's sampler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels import edit_reference, round_reference
from paceline.kernels.cuda import edit
from paceline.kernels.edit_reference import Edits, RowMasks
from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.runner.rounds.upload import MaskTable, Upload
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.tiny_models import ON_GPU

WIDTH, PROMPT, DRAFT = 60, 9, 5
ASKED: Sequence[dict[str, Any]] = (
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.6, "frequency_penalty": -0.3},
    {"frequency_penalty": 1.7},
    {"presence_penalty": -2.1},
    {"min_tokens": 6, "stop_ids": (3, 4, 5)},
    {"min_tokens": 900, "max_tokens": 1000, "stop_ids": (7,), "repetition_penalty": 3.0},
    {"logit_bias": {0: 0.1, 1: -7.5, 8: 2.0}},
    {"allowed_tokens": tuple(range(1, 90, 3)), "presence_penalty": 0.1},
    {"min_tokens": 3, "stop_ids": (1, 2), "logit_bias": {1: 5.0}, "frequency_penalty": 0.3, "temperature": 0},
)


def sampler(params: dict[str, Any], vocab: int) -> Sampler:
    return Sampler(SamplingParams.of(**params), seed=1, vocab_size=vocab, eos_ids=(2,))


def started(device: torch.device, vocab: int) -> tuple[DeviceState, list[Sampler], np.ndarray]:
    """A lane for each of ASKED, with a prompt, some output, and a draft behind it."""
    random = np.random.default_rng(vocab)
    state = DeviceState(lanes=len(ASKED), width=WIDTH, scratch_page=3, device=device)
    changes, samplers = Changes(state, vocab_size=vocab), []
    tokens = random.integers(0, min(vocab, 12), (len(ASKED), WIDTH), dtype=np.int32)
    for lane, params in enumerate(ASKED):
        samplers.append(sampler(params, vocab))
        samplers[lane].see_prompt(tokens[lane, :PROMPT].tolist())
        samplers[lane].advance(tokens[lane, PROMPT : PROMPT + lane].tolist())
        changes.write(lane, tokens[lane, : PROMPT + lane], samplers[lane])
    changes.apply(Upload(device))
    state.tokens[:-1] = torch.from_numpy(tokens).to(device)
    return state, samplers, tokens


def random_logits(rows: int, vocab: int, device: torch.device, *, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (4 * torch.randn((rows, vocab), generator=random)).to(device)


def chain_rows(state: DeviceState, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of the last committed token of each lane, and of all its drafted ones: lanes and positions."""
    lanes = torch.arange(state.dummy + 1, dtype=torch.int32).repeat_interleave(1 + DRAFT).to(device)
    steps = torch.arange(1 + DRAFT, dtype=torch.int32).repeat(state.dummy + 1).to(device)
    return lanes, (state.lengths[lanes.long()] - 1 + steps).int()


@pytest.mark.parametrize("vocab", [97, 2048, 5001, *([128_256] if ON_GPU else [])])
def test_as_the_reference_and_the_host(vocab: int, device: torch.device) -> None:
    state, samplers, tokens = started(device, vocab)
    lanes, positions = chain_rows(state, device)
    logits = random_logits(len(lanes), vocab, device)
    mine, other, raw, kept = logits.clone(), logits.clone(), torch.zeros_like(logits), torch.zeros_like(logits)
    edit.edit(mine, state, lanes=lanes, positions=positions, offset=1, raw=raw, pdl=ON_GPU)
    edit_reference.edit(other, state, lanes=lanes, positions=positions, offset=1, raw=kept)
    assert torch.equal(mine, other)
    assert torch.equal(raw, kept)
    for lane, by in enumerate(samplers):
        rows = slice(lane * (1 + DRAFT), (lane + 1) * (1 + DRAFT))
        length = PROMPT + lane
        wanted = by.edit(logits[rows].cpu(), [tokens[lane, length : length + i].tolist() for i in range(1 + DRAFT)])
        assert torch.equal(mine[rows].cpu(), wanted), ASKED[lane]
        assert torch.equal(raw[rows], logits[rows] if state.edits[lane] else torch.zeros_like(logits[rows]))


def test_ancestors_of_a_tree(device: torch.device) -> None:
    """The same rows with their ancestors in a table, in any order."""
    state, _, tokens = started(device, 97)
    lanes, positions = chain_rows(state, device)
    table = torch.full((len(lanes), DRAFT + 2), -1, dtype=torch.int32)
    for row, lane in enumerate(lanes.tolist()):
        step, length = row % (1 + DRAFT), PROMPT + lane
        if lane < state.dummy:
            table[row, :step] = torch.from_numpy(tokens[lane, length : length + step][::-1].copy())
    results = [random_logits(len(lanes), 97, device) for _ in range(3)]
    options: dict[str, Any] = {"lanes": lanes, "positions": positions, "offset": 1}
    edit.edit(results[0], state, **options, ancestors=table.to(device), pdl=ON_GPU)
    edit_reference.edit(results[1], state, **options, ancestors=table.to(device))
    edit.edit(results[2], state, **options, pdl=ON_GPU)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_of_a_draft_pass(device: torch.device) -> None:
    """Placed by the lane's length, in a vocabulary that is narrower, inside a wider tensor."""
    state, _, _ = started(device, 97)
    lanes = torch.tensor([8, 2, state.dummy, 5], dtype=torch.int32, device=device)
    for turn in (0, 3):
        wide = random_logits(4, 128, device)
        mine, other = wide.clone(), wide.clone()
        edit.edit(mine[:, :80], state, lanes=lanes, offset=turn, pdl=ON_GPU)
        edit_reference.edit(other[:, :80], state, lanes=lanes, offset=turn)
        assert torch.equal(mine, other)
        assert torch.equal(mine[2], wide[2])
        assert torch.equal(mine[:, 80:], wide[:, 80:])


def test_columns_of_a_head_are_tokens_of_the_target(device: torch.device) -> None:
    """Edits of some columns are those of the same tokens among all."""
    state, _, _ = started(device, 97)
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(3))[:40].int().to(device)
    lanes = torch.arange(state.dummy + 1, dtype=torch.int32, device=device)
    for turn in (0, 1, 3):
        few = random_logits(len(lanes), 40, device)
        mine, other, whole = few.clone(), few.clone(), round_reference.spread(few, ids, vocab=97)
        edit.edit(mine, state, lanes=lanes, offset=turn, ids=ids, pdl=ON_GPU)
        edit_reference.edit(other, state, lanes=lanes, offset=turn, ids=ids)
        edit_reference.edit(whole, state, lanes=lanes, offset=turn)
        assert torch.equal(mine, other)
        assert torch.equal(mine, whole[:, ids.long()])


def test_a_row_draws_what_its_mask_has(device: torch.device) -> None:
    """And its mask decides about stop tokens, too. Rows without a mask are edited as ever."""
    vocab, random = 97, np.random.default_rng(5)
    state, _, _ = started(device, vocab)
    lanes, positions = chain_rows(state, device)
    rows = [5 * (1 + DRAFT), 5 * (1 + DRAFT) + 2, 7 * (1 + DRAFT) + 1]
    state.edits[[5, 7]] |= Edits.MASKS
    bits = random.integers(0, 2**32, (3, 4), dtype=np.uint32)
    bits[:, -1] &= 1  # of the last token alone
    memory = MaskTable(len(lanes), vocab, device)
    sheet = memory.sheet()
    sheet.put(rows, bits)
    sheet.settle()
    table = RowMasks(*(part.to(device) for part in memory.masks))
    logits = random_logits(len(lanes), vocab, device)
    mine, other, without = (logits.clone() for _ in range(3))
    options: dict[str, Any] = {"lanes": lanes, "positions": positions, "offset": 1}
    edit.edit(mine, state, **options, masks=memory.masks, pdl=ON_GPU)  # in the host's memory
    edit_reference.edit(other, state, **options, masks=table)
    edit.edit(without, state, **options, pdl=ON_GPU)
    assert torch.equal(mine, other)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    for row, mask in zip(rows, allowed, strict=True):
        assert (mine[row].cpu().isfinite().numpy() == mask).all()
    others = [row for row in range(len(lanes)) if row not in rows]
    assert torch.equal(mine[others], without[others])


@pytest.mark.parametrize("roots", [False, True])
def test_new_tokens_are_counted(roots: bool, device: torch.device) -> None:
    """Twice if they come twice; the marks are then those of a sequence that has just been written."""
    vocab = 97
    state, samplers, _ = started(device, vocab)
    longest = 0 if roots else DRAFT
    seats = torch.tensor([3, 1, state.dummy, 7, 8], dtype=torch.int32, device=device)
    outcomes = torch.zeros((5, 2 + 2 * (longest + 1)), dtype=torch.int32, device=device)
    accepted = [0] * 5 if roots else [0, 5, 0, 2, 4]
    targets = torch.tensor([9] * 30, dtype=torch.int32, device=device)
    starts = torch.arange(6, dtype=torch.int32, device=device) * (1 + longest)
    for i, count in enumerate(accepted):
        lane, length = int(seats[i]), int(state.lengths[seats[i].long()])
        begin = i * (1 + longest)
        targets[begin : begin + count] = state.tokens[lane, length : length + count]
        targets[begin + count] = (state.tokens[lane, length + count] + 1) % 12
    round_reference.accept(
        state,
        seats=seats,
        targets=targets,
        out=outcomes,
        **({"roots": starts[:-1]} if roots else {"row_starts": starts}),
    )
    other = copy.copy(state)
    other.marks = state.marks.clone()
    edit.count(state, seats=seats, outcomes=outcomes, pdl=ON_GPU)
    edit_reference.count(other, seats=seats, outcomes=outcomes)
    assert torch.equal(state.marks, other.marks)
    fresh = DeviceState(lanes=len(ASKED), width=WIDTH, scratch_page=3, device=device)
    changes = Changes(fresh, vocab_size=vocab)
    for i, lane in enumerate((3, 1, None, 7, 8)):
        if lane is not None:
            samplers[lane].advance(outcomes[i, 2 : 3 + accepted[i]].tolist())
            changes.write(lane, state.tokens[lane, : int(state.lengths[lane])].cpu().numpy(), samplers[lane])
    changes.apply(Upload(device))
    for lane in (3, 1, 8):
        assert torch.equal(state.marks[lane], fresh.marks[lane])
