"""Drawing tokens on a device: to the last bit what the reference draws."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import round_reference
from paceline.kernels.cuda import noise, sample
from paceline.kernels.noise import gumbel_noise
from paceline.runner.rounds.device_state import DeviceState
from paceline.sampling.sampler import Stream

# inverse temperature, top_k, top_p, min_p
ASKED = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.4, 1, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.7, 20, 0.95, 0.0),
    (0.5, 0, 1.0, 0.05),
    (1.0, 40, 0.5, 0.01),
    (1.0, 10**6, 1e-6, 0.0),
    (0.0, 5, 0.5, 0.1),
    (0.2, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 1e-6),
]


def asking(device: torch.device, *, width: int = 64) -> DeviceState:
    """A lane for each of ASKED."""
    state = DeviceState(lanes=len(ASKED), width=width, scratch_page=7, device=device)
    columns = (state.inverse_temperature, state.top_k, state.top_p, state.min_p)
    for column, values in zip(columns, zip(*ASKED, strict=True), strict=True):
        column[:-1] = torch.tensor(values, device=device, dtype=column.dtype)
    random = torch.Generator().manual_seed(11)
    state.seed.copy_(torch.randint(-(2**63), 2**63 - 1, state.seed.shape, generator=random))
    state.lengths.copy_(torch.randint(1, 60, state.lengths.shape, generator=random))
    return state


def check(logits: Tensor, *, lanes: list[int] | None = None) -> Tensor:
    """Draws with every lane of ASKED, or the given ones, and compares with the reference."""
    device, rows = logits.device, len(logits)
    state = asking(device)
    owners = torch.tensor(lanes or [i % len(ASKED) for i in range(rows)], dtype=torch.int32, device=device)
    positions = (torch.arange(rows, dtype=torch.int32) * 7919 % 131072).to(device)
    drawn = torch.full((rows,), -7, dtype=torch.int32, device=device)
    wanted = torch.full_like(drawn, -8)
    sample.draw(logits, state, lanes=owners, positions=positions, offset=1, out=drawn, pdl=logits.is_cuda)
    round_reference.draw(logits, state, lanes=owners, positions=positions, offset=1, out=wanted)
    assert drawn.tolist() == wanted.tolist()
    return drawn


def test_drafts_with_noise_of_their_own(device: torch.device) -> None:
    """Rows that are free draw with the noise of a drafter; and each row says what its filters leave."""
    state, logits = asking(device), random_logits(2 * len(ASKED), 1000, device, spread=2.0)
    lanes = torch.arange(2 * len(ASKED), dtype=torch.int32, device=device) % len(ASKED)
    results = []
    for free in (None, torch.tensor([0, 1] * len(ASKED), dtype=torch.int32, device=device)):
        mine, other = (torch.zeros_like(lanes) for _ in range(2))
        floors, wanted = (torch.zeros(len(lanes), device=device) for _ in range(2))
        sample.draw(logits, state, lanes=lanes, offset=2, out=mine, free=free, floors=floors, pdl=logits.is_cuda)
        round_reference.draw(logits, state, lanes=lanes, offset=2, out=other, free=free, floors=wanted)
        assert mine.tolist() == other.tolist()
        results.append(mine)
        kept, left = (
            torch.stack([row >= floor for row, floor in zip(scaled(state, logits, lanes), each, strict=True)])
            for each in (floors, wanted)
        )
        assert torch.equal(kept, left)
        assert 0 < floors.isinf().sum() < len(floors)
    assert torch.equal(results[0][::2], results[1][::2])
    assert (results[0][1::2] != results[1][1::2]).sum() >= 6


def scaled(state: DeviceState, logits: Tensor, lanes: Tensor) -> Tensor:
    scale = state.inverse_temperature[lanes.long(), None]
    return logits * torch.where(scale > 0, scale, 1.0)


def random_logits(rows: int, vocab: int, device: torch.device, *, spread: float, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (spread * torch.randn((rows, vocab), generator=random)).to(device)


def test_as_the_reference(device: torch.device) -> None:
    check(random_logits(len(ASKED), 1000, device, spread=3.0))


def test_programs_that_gather_several_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "GATHERERS", 3)
    check(random_logits(3, 12_289, device, spread=2.0, seed=5), lanes=[6, 1, 5])


@pytest.mark.parametrize("vocab", [1, 2, 257, 9001])
def test_any_vocabulary(vocab: int, device: torch.device) -> None:
    check(random_logits(5, vocab, device, spread=3.0, seed=vocab), lanes=[0, 1, 4, 6, 9])


def test_plain_draws(device: torch.device) -> None:
    """Without filters: many, since nothing else shows that rough noise never hides the best token."""
    rows = 400 if device.type == "cuda" else 20
    check(random_logits(rows, 5000, device, spread=0.5), lanes=[1, 2] * (rows // 2))


@triton.jit
def noise_of(exact, rough, high, low, FAST: tl.constexpr):
    token = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    high, low = high.to(tl.uint32), low.to(tl.uint32)
    tl.store(exact + token, noise.gumbel(token, high, low))
    tl.store(rough + token, noise.rough_gumbel(token, high, low, FAST))


@pytest.mark.parametrize("keys", [(5, 9), (2**32 - 1, 2**31), (2**32 - 3, 0)])
def test_noise_is_the_same_to_the_last_bit(keys: tuple[int, int], device: torch.device) -> None:
    count = 16 if device.type == "cpu" else 2048
    exact, rough = torch.zeros((2, count * 4096), device=device)
    noise_of[(count,)](exact, rough, *keys, FAST=device.type == "cuda", enable_fp_fusion=False)
    wanted = gumbel_noise(torch.tensor([keys], device=device), count * 4096)[0]
    assert torch.equal(exact, wanted)
    assert wanted.max() > 10
    assert (rough - wanted).abs().max() < noise.ROUGHLY / 2


def test_a_full_batch(device: torch.device) -> None:
    """Large vocabularies and, on a GPU, many rows: programs run in any order."""
    rows, vocab = (321, 128_257) if device.type == "cuda" else (3, 12_289)
    check(random_logits(rows, vocab, device, spread=2.0), lanes=[6, 1, 5] * (rows // 3))


def test_flat_logits_outgrow_the_list(device: torch.device) -> None:
    check(random_logits(4, 9001, device, spread=0.1), lanes=[4, 5, 6, 7])


def test_peaked_logits(device: torch.device) -> None:
    logits = random_logits(len(ASKED), 1000, device, spread=1.0)
    logits[:, 800] += 30
    assert (check(logits) == 800).sum() >= 10


def test_a_tail_with_most_of_the_mass(device: torch.device) -> None:
    """One logit stands out, yet top-p and a faint min-p leave what lies further below than the list of top-p goes."""
    logits = random_logits(2, 20_001, device, spread=0.01)
    logits[:, 17] = 10.05
    assert (check(logits, lanes=[5, 5]) != 17).any()
    assert (check(logits, lanes=[12, 12]) != 17).any()


def test_close_calls(device: torch.device) -> None:
    """Logits that undo the noise but for a hair: rough noise alone cannot tell which token is best."""
    state, rows = asking(device), 6
    positions = torch.arange(rows, dtype=torch.int32, device=device) * 7919 + 1
    keys = round_reference.noise_keys(state.seed[torch.ones(rows, dtype=torch.int64)], positions, Stream.TOKEN)
    check(random_logits(rows, 5000, device, spread=1e-5) - gumbel_noise(keys, 5000), lanes=[1] * rows)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, about inf - inf
def test_ties_and_infinities(device: torch.device) -> None:
    lanes = [0, 1, 6, 8]
    logits = random_logits(24, 500, device, spread=2.0)
    rows = logits.view(6, 4, 500)
    rows[0] = rows[0].round()
    rows[1, :, 3:] = -torch.inf
    rows[2] = -torch.inf
    rows[3] = 0.0
    rows[4, :, ::2] = torch.nan
    rows[5] = torch.nan
    drawn = check(logits, lanes=lanes * 6).view(6, 4)
    assert (drawn[2] == 0).all()
    assert (drawn[4] % 2 == 1).all()
    assert drawn[3, 0] == 0


def test_bf16_and_rows_apart(device: torch.device) -> None:
    """Logits as a model gives them, inside a wider tensor."""
    wide = random_logits(4, 900, device, spread=3.0).bfloat16()
    check(wide[:, :700], lanes=[0, 1, 6, 7])


def test_neighbours_do_not_matter(device: torch.device) -> None:
    logits = random_logits(3, 5000, device, spread=2.0)
    state = asking(device)
    lanes = torch.tensor([0, 1, 6], dtype=torch.int32, device=device)
    together, alone = torch.zeros_like(lanes), torch.zeros_like(lanes)
    sample.draw(logits, state, lanes=lanes, out=together)
    for i in range(3):
        one = slice(i, i + 1)
        sample.draw(logits[one], state, lanes=lanes[one], out=alone[one])
    assert together.tolist() == alone.tolist()


def test_draws_push(device: torch.device) -> None:
    state, expected = asking(device), asking(device)
    logits = random_logits(4, 5000, device, spread=2.0)
    lanes = torch.tensor([0, 2, 1, state.dummy], dtype=torch.int32, device=device)
    drawn, wanted = torch.zeros_like(lanes), torch.zeros_like(lanes)
    sample.draw(logits, state, lanes=lanes, offset=3, out=drawn, push=True)
    round_reference.draw(logits, expected, lanes=lanes, offset=3, out=wanted, push=True)
    assert drawn.tolist() == wanted.tolist()
    assert torch.equal(state.tokens, expected.tokens)
    assert state.tokens.count_nonzero() > 0


def test_a_position_past_the_width_is_not_written(device: torch.device) -> None:
    state = asking(device, width=60)
    state.lengths[1] = 59
    lanes = torch.tensor([1], dtype=torch.int32, device=device)
    out = torch.zeros_like(lanes)
    sample.draw(random_logits(1, 500, device, spread=1.0), state, lanes=lanes, offset=1, out=out, push=True)
    assert state.tokens.count_nonzero() == 0


def test_a_vocabulary_of_its_own_and_doubt(device: torch.device) -> None:
    """Columns get the noise of the tokens that they stand for; doubtful drafts get no more tokens."""
    lanes = torch.tensor([0, 1, 2, 1, 0, 5, 8], dtype=torch.int32, device=device)
    rows, vocab = len(lanes), 5000
    logits = random_logits(rows, vocab, device, spread=3.0)
    ids = (torch.randperm(60000, generator=torch.Generator().manual_seed(1))[:vocab]).sort().values.int().to(device)
    found, tokens = [], []
    for draw in (sample.draw, round_reference.draw):
        state = asking(device)
        doubt = round_reference.Doubt(
            confidence=torch.tensor([1.0, 1.0, 1.0, -1.0, 0.3, 1.0, 0.5], device=device),
            thresholds=torch.tensor([0.0, 0.9, 0.0, 0.0, 0.4, 0.2, 0.1], device=device),
            limits=torch.tensor([4, 4, 2, 4, 4, 4, 4], dtype=torch.int32, device=device),
            found=torch.tensor([2, 2, 2, 0, 1, 2, 2], dtype=torch.int32, device=device),
            turn=2,
        )
        out = torch.zeros(rows, dtype=torch.int32, device=device)
        draw(logits, state, lanes=lanes, offset=2, out=out, push=True, ids=ids, doubt=doubt)
        found.append(doubt)
        alone = [lane for lane in lanes.tolist() if lanes.tolist().count(lane) == 1]  # others write to the same place
        tokens.append((out.tolist(), state.tokens[alone].tolist()))
    assert tokens[0] == tokens[1]
    assert set(tokens[0][0]) <= set(ids.tolist())
    assert found[0].found.tolist() == found[1].found.tolist() == [3, 3, 2, 0, 1, 3, 3]
    assert torch.allclose(found[0].confidence, found[1].confidence, rtol=1e-4)
