"""Hidden states at taps, and heads that read them: compiled ones compared with plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch, Forward
from paceline.kernels.quant import Weight, dequantise, quantise
from paceline.models.heads import EagleHead
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.medusa import CompiledMedusa, TorchMedusa
from paceline.runner.heads.protocol import Tree, TreeRequest
from paceline.runner.heads.torch import TorchHead
from paceline.sampling.filters import filter_floor
from paceline.sampling.sampler import Stream, noise_keys
from tests.heads import random_eagle, random_medusa
from tests.kernels.tiny_forward import RUNNABLE
from tests.tiny_models import TARGET

CONFIG = TARGET.config
PAGES = 12
TABLES = ((0, 2, 4), (1, 3, 5), (6, 8, 10))  # pages of three sequences
INTEGERS: dict[str, Weight] = {name: quantise(w) if w.dim() == 2 else w for name, w in TARGET.weights.items()}
FLOATS = {name: weight if isinstance(weight, Tensor) else dequantise(weight) for name, weight in INTEGERS.items()}


def compiled(taps: Sequence[int] = (), threads: int = 2) -> CompiledForward:
    return CompiledForward(CONFIG, dict(INTEGERS), num_pages=PAGES, threads=threads, taps=taps)


def rows(starts: Sequence[int], counts: Sequence[int], tokens: Sequence[int], sequences: Sequence[int]) -> Batch:
    """Make a batch of `counts` rows of each sequence from its position on, with logits of the last rows."""
    parts = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    slots = [
        TABLES[sequence][place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        for sequence, part in zip(sequences, parts, strict=True)
        for place in part
    ]
    ends = np.cumsum(counts).tolist()

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Batch(
        tokens=ints(tokens),
        positions=ints([place for part in parts for place in part]),
        slots=ints(slots),
        row_starts=ints([0, *ends]),
        bases=ints([part.stop for part in parts]),
        page_table=ints([TABLES[sequence] for sequence in sequences]),
        logit_rows=ints([end - 1 for end in ends]),
    )


COUNTS = (4, 1, 17)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, sum(COUNTS)).tolist()
FIRST = rows((0, 0, 0), COUNTS, TOKENS, (0, 1, 2))
FEATURES = torch.randn((sum(COUNTS), 3 * CONFIG.hidden_size), generator=torch.Generator().manual_seed(1))


# ── taps ──


@pytest.mark.parametrize("taps", [(0, 1, 2, 3), (1,), (2,), (3,)])
def test_hidden_states_are_those_of_plain_torch(taps: Sequence[int]) -> None:
    forwards: list[Forward] = [compiled(taps), TorchForward(CONFIG, FLOATS, num_pages=PAGES, taps=taps)]
    outputs = [forward(FIRST) for forward in forwards]
    for output in outputs:
        assert output.features is not None
        assert tuple(output.features.shape) == (len(TOKENS), len(taps) * CONFIG.hidden_size)
        assert output.features.dtype == torch.float32
        expected = outputs[1].features
        assert expected is not None
        assert float((output.features - expected).abs().max()) < 0.1 * float(expected.abs().max())


def test_each_tap_is_its_own_place() -> None:
    """A tap has the stream that enters its layer; the last tap has the state after the final norm."""
    whole = TorchForward(CONFIG, FLOATS, num_pages=PAGES, taps=(0, 1, 2))
    output = whole(FIRST)
    assert output.features is not None
    entering, _, last = output.features.chunk(3, dim=1)
    assert torch.equal(entering, whole.embed(FIRST.tokens))
    logits = torch.nn.functional.linear(last[FIRST.logit_rows.long()], FLOATS["head"])
    assert torch.allclose(logits, output.logits, atol=1e-5)


def test_whoever_keeps_nothing_gets_the_same_bits() -> None:
    with_taps, without = compiled((0, 2))(FIRST), compiled()(FIRST)
    assert without.features is None
    assert torch.equal(with_taps.logits, without.logits)


@torch.inference_mode()
def test_a_batch_that_wants_no_hidden_states_gets_none() -> None:
    for forward in (compiled((0, 2)), TorchForward(CONFIG, FLOATS, num_pages=PAGES, taps=(0, 2))):
        with_states = forward(FIRST)
        assert with_states.features is not None
        logits = with_states.logits.clone()
        with_states.features.fill_(7)
        without = forward(replace(FIRST, features=False))
        assert without.features is None
        assert bool((with_states.features == 7).all())  # nor are they written anywhere
        assert torch.equal(without.logits, logits)


def test_hidden_states_do_not_depend_on_other_rows() -> None:
    forward = compiled((1, 2))
    together = forward(FIRST).features
    assert together is not None
    together = together.clone()
    alone = compiled((1, 2), threads=1)(rows((0,), (COUNTS[2],), TOKENS[-COUNTS[2] :], (2,))).features
    assert alone is not None
    assert torch.equal(alone, together[-COUNTS[2] :])


def test_embeddings() -> None:
    tokens = torch.tensor([0, 5, 96], dtype=torch.int32)
    wanted = FLOATS["embed"][tokens.long()]
    assert torch.allclose(compiled().embed(tokens), wanted, atol=1e-6)
    assert torch.equal(TorchForward(CONFIG, FLOATS, num_pages=1).embed(tokens), wanted)
    with pytest.raises(AssertionError, match="rows outside of a matrix of 97"):
        compiled().embed(torch.tensor([97], dtype=torch.int32))


# ── the EAGLE-3 head ──

HEADS = {
    "plain": random_eagle(CONFIG, draft_vocab=40),
    "norm first": random_eagle(CONFIG, draft_vocab=40, norm_first=True, seed=1),
    "own size": random_eagle(CONFIG, draft_vocab=50, hidden=32, seed=2),
    "whole vocabulary": random_eagle(CONFIG, seed=3),
    "the target's output layer": random_eagle(CONFIG, seed=3, without=("head",)),
    "norms of features, output, q and k": random_eagle(
        CONFIG, draft_vocab=40, feature_norms=3, norm_output=True, qk_norm=True, seed=4
    ),
    "three layers with windows": random_eagle(CONFIG, draft_vocab=40, layers=3, window=5, feature_norms=1, seed=5),
    "biases": random_eagle(CONFIG, draft_vocab=40, qkv_bias=True, seed=6),
}
OTHERS = {
    "P-EAGLE": random_eagle(CONFIG, draft_vocab=40, kind="P-EAGLE", mask_token=3, layers=2, seed=7),
    "EAGLE-1": random_eagle(CONFIG, taps=(2,), kind="EAGLE-1", without=("head",), seed=8),
    "MTP": random_eagle(CONFIG, taps=(2,), kind="MTP", norm_output=True, qkv_bias=True, without=("head",), seed=9),
}


def both(head: EagleHead, format: str = "int8") -> tuple[CompiledHead, TorchHead]:
    small, target = head.in_format(format), compiled()
    fast = CompiledHead(small, target, num_pages=PAGES, max_context=48)
    return fast, TorchHead(small, target, num_pages=PAGES)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_a_compiled_head_is_the_one_of_plain_torch(name: str, format: str) -> None:
    """Passes read the target's hidden states, then the head's own output, while sequences leave one by one."""
    made = {**HEADS, **OTHERS}[name]
    heads = both(made, format)
    outputs = [head(FIRST, features=FEATURES[:, : made.config.width].contiguous()) for head in heads]
    last, positions = [4 - 1, 5 - 1, 22 - 1], [4, 1, 17]
    for sequences in ([0, 1, 2], [0, 2], [2]):
        wanted = outputs[1].logits
        assert float((outputs[0].logits - wanted).abs().max()) < 0.1 * float(wanted.abs().max())
        carry = [last[sequence] for sequence in sequences]
        following = rows([positions[s] for s in sequences], [1] * len(sequences), [7 + s for s in sequences], sequences)
        outputs = [head(following, carry=carry) for head in heads]
        for row, sequence in enumerate(sequences):
            last[sequence], positions[sequence] = row, positions[sequence] + 1


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 4},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.5, "min_p": 0.01},
    ],
)
def test_filters_of_a_draft_are_nearly_the_targets(
    variant: str, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floor of a filter may be off by 1/16 of a natural logarithm."""
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    fast, _ = both(HEADS["plain"])
    scaled = 0.8 * fast(FIRST, features=FEATURES).logits  # [3, vocab]
    line = torch.from_numpy(filter_floor(scaled, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    best = scaled.amax(1, keepdim=True)
    sets = [scaled.where(scaled >= torch.minimum(line + off, best), -torch.inf) for off in (-1.01 / 16, 1.01 / 16)]
    places = {token: place for place, token in enumerate(fast.ids.tolist())}
    sure = 0
    for seed in range(60):
        keys = torch.from_numpy(noise_keys(seed, np.array(COUNTS) + 1, Stream.TOKEN))
        drawn = tokens_of(
            fast.draft(drawing([seed] * 3, 0.8), FEATURES, [TreeRequest(1, 0.0, 0.0, **filters)] * 3, width=1)
        )
        most, least = (fast.pick(kept, torch.ones(3), keys).tolist() for kept in sets)
        for row, [token] in enumerate(drawn):
            assert sets[0][row, places[token]] > -torch.inf
            assert places[token] == most[row] or most[row] != least[row]
            sure += most[row] == least[row]
    assert sure > 0.4 * 180


def test_filters_that_leave_everything_change_nothing() -> None:
    fast, _ = both(HEADS["plain"])
    batch = drawing([5, 6, 7], 1.0)
    for width in (1, 3):

        def draft(width: int = width, **filters: Any) -> list[Tree]:
            return fast.draft(batch, FEATURES, [TreeRequest(8, 0.0, 0.0, **filters)] * 3, width=width)

        plain = draft()
        for wide in ({"top_k": 1 << 30}, {"top_p": 0.9999999}, {"min_p": 1e-30}):
            assert draft(**wide) == plain
        assert draft(top_k=2) != plain


def drawing(seeds: Sequence[int], *inverse_temperatures: float, batch: Batch = FIRST) -> Batch:
    """Make a batch with seeds and inverse temperatures, one for all sequences or one for each."""
    each = torch.tensor(
        inverse_temperatures if len(inverse_temperatures) > 1 else inverse_temperatures * len(seeds),
        dtype=torch.float32,
    )
    return replace(batch, seeds=torch.tensor(seeds), inverse_temperatures=each)


def tokens_of(drafts: Sequence[Tree]) -> list[list[int]]:
    return [draft.tokens for draft in drafts]


def test_a_long_chain_crosses_pages() -> None:
    fast, _ = both(HEADS["plain"])
    wanted = [TreeRequest(1, 0.0, 0.0), TreeRequest(40, 0.0, 0.0), TreeRequest(9, 0.0, 0.0)]
    drafts = fast.draft(drawing([0] * 3, 0.0), FEATURES, wanted, width=1)
    assert [draft.parents for draft in drafts] == [[*range(-1, size - 1)] for size in (1, 16, 9)]  # no deeper than 16


@pytest.mark.parametrize("row", [-1, len(TOKENS)])
def test_a_draft_begins_only_at_a_row_that_is_there(row: int) -> None:
    fast, _ = both(HEADS["plain"])
    batch = replace(drawing([0] * 3, 1.0), logit_rows=torch.tensor([3, row, 21], dtype=torch.int32))
    with pytest.raises(AssertionError, match="rows that do not add up"):
        fast.draft(batch, FEATURES, [TreeRequest(4, 0.0, 0.0)] * 3, width=2)


def test_a_head_goes_on_only_from_rows_that_were_there() -> None:
    fast, _ = both(HEADS["plain"])
    one = rows((4,), (1,), (7,), (0,))
    with pytest.raises(AssertionError, match="rows that do not add up"):
        fast(one, carry=[0])
    fast(FIRST, features=FEATURES)
    with pytest.raises(AssertionError, match="rows that do not add up"):
        fast(one, carry=[len(TOKENS)])
    both_ways = []
    for carry in ([3, 4], [4, 3], [3, 3]):
        fast(FIRST, features=FEATURES)
        both_ways.append(fast(rows((4, 1), (1, 1), (7, 7), (0, 1)), carry=carry).logits.clone())
    assert torch.equal(both_ways[2][0], both_ways[0][0])
    assert torch.equal(both_ways[2][1], both_ways[1][1])
    assert not torch.equal(both_ways[1][0], both_ways[0][0])


def test_a_draft_that_cannot_go_on_says_so() -> None:
    fast, _ = both(HEADS["plain"])
    narrow = drawing([0] * 3, 0.0, batch=replace(FIRST, page_table=FIRST.page_table[:, :2].contiguous()))
    with pytest.raises(AssertionError, match="a KV slot that does not exist"):
        fast.draft(narrow, FEATURES, [TreeRequest(200, 0.0, 0.0)] * 3, width=4)


def test_features_must_be_those_of_the_rows() -> None:
    fast, _ = both(HEADS["plain"])
    with pytest.raises(AssertionError, match="features of 21 rows for 22"):
        fast(FIRST, features=FEATURES[:21])
    with pytest.raises(AssertionError, match="side by side"):
        fast(FIRST, features=torch.cat([FEATURES, FEATURES], dim=1)[:, :192])


def test_large_hidden_states_do_not_drown_small_ones() -> None:
    """One dimension in a hundred is a thousand times larger: in 8 bits its neighbours would become zero."""
    head = HEADS["plain"].in_format("int8")
    peaks = FEATURES.clone()
    peaks[:, ::96] *= 1000
    weights = dict(head.weights)
    fc = weights["fc"]
    assert isinstance(fc, Tensor)
    weights["fc"] = fc.clone()
    weights["fc"][:, ::96] /= 1000
    exact, _ = both(replace(head, weights=weights))
    plain, _ = both(head)
    wanted = plain(FIRST, features=FEATURES).logits.clone()
    assert float((exact(FIRST, features=peaks).logits - wanted).abs().max()) < 0.05 * float(wanted.abs().max())


# ── Medusa ──


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_compiled_medusa_heads_are_those_of_plain_torch(layers: int) -> None:
    heads = [head.in_format("int8") for head in random_medusa(CONFIG, layers=layers)]
    fast, plain = CompiledMedusa(heads, threads=2), TorchMedusa(heads)
    for count in (1, 3):
        states = FEATURES[:count, : CONFIG.hidden_size]
        wanted = plain(states)
        assert tuple(wanted.shape) == (3, count, CONFIG.vocab_size)
        assert float((fast(states) - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())


def test_rows_without_logits_are_read_for_their_keys_alone() -> None:
    """Rows without logits leave their keys and values, and the last rows are then computed as in one pass.

    A pass cannot carry on from one that ended before the output."""
    whole, _ = both(HEADS["plain"])
    parts, _ = both(HEADS["plain"])
    wanted = whole(FIRST, features=FEATURES).logits
    ends = np.cumsum(COUNTS).tolist()
    last = torch.tensor([end - 1 for end in ends])
    silent = replace(FIRST, logit_rows=torch.empty(0, dtype=torch.int32))
    parts(silent, features=FEATURES)
    with pytest.raises(AssertionError, match="rows that do not add up"):
        parts(rows((4,), (1,), (7,), (0,)), carry=[0])
    final = rows([count - 1 for count in COUNTS], [1, 1, 1], [int(FIRST.tokens[row]) for row in last], (0, 1, 2))
    assert torch.equal(parts(final, features=FEATURES[last].contiguous()).logits, wanted)
