"""A head's first pass is prefetched while the host still looks at the target's tokens: drafts stay the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.accept.coupled import accept_coupled
from paceline.draft import Draft
from paceline.kernels.base import Batch
from paceline.models.heads import EagleHead
from paceline.runner.batch import Share, build_batch
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.protocol import Tree, TreeRequest
from paceline.runner.lanes import Lanes
from tests.heads import random_eagle
from tests.kernels.tiny_forward import RUNNABLE
from tests.runner.heads.test_sketch import head_with
from tests.runner.heads.test_torch import CONFIG, INTEGERS

PAGES, PROMPT = 15, 19
WANTED = TreeRequest(6, 0.0, 0.0)


@dataclass
class Pair:
    """A target and a head that have both read the prompts of some sequences."""

    target: CompiledForward
    head: CompiledHead
    lanes: Lanes
    inverse_temperature: float

    @classmethod
    def of(cls, head: EagleHead, *, sequences: int = 1, inverse_temperature: float = 1.0, threads: int = 2) -> Pair:
        target = CompiledForward(CONFIG, dict(INTEGERS), num_pages=PAGES, threads=threads, taps=(0, 1, 2))
        made = CompiledHead(head, target, num_pages=PAGES, max_context=64)
        lanes = Lanes(count=sequences, max_context=64, max_draft=8)
        random = torch.Generator().manual_seed(2)
        lanes.tokens_np[:] = torch.randint(0, CONFIG.vocab_size, lanes.tokens_np.shape, generator=random).numpy()
        lanes.pages_np[:] = torch.arange(sequences * 5).view(sequences, 5).numpy()
        found = cls(target, made, lanes, inverse_temperature)
        shares = [Share(lane, 0, PROMPT) for lane in range(sequences)]
        features = target(build_batch(lanes, shares)).features
        assert features is not None
        made(build_batch(lanes, [replace(share, outs=0) for share in shares], ahead=1), features=features)
        return found

    def verify(self, drafts: list[Draft]) -> tuple[list[Share], Tensor]:
        """Let the target read the token after the prompt and the drafts; return the head's next rows and features."""
        shares = [
            Share(lane, PROMPT, 1, draft=draft, seed=7 + lane, inverse_temperature=self.inverse_temperature)
            for lane, draft in enumerate(drafts)
        ]
        for lane, draft in enumerate(drafts):
            self.lanes.write(lane, PROMPT + 1, draft.tokens)
        output = self.target(build_batch(self.lanes, shares))
        assert output.features is not None
        assert output.drawn is not None
        drawn, first, rows, wanted = [*output.drawn], 0, list[int](), []
        for lane, draft in enumerate(drafts):
            verdict = accept_coupled(draft, drawn[first : first + 1 + len(draft)])
            kept = [*(draft.tokens[node] for node in verdict.path), verdict.token]
            self.lanes.write(lane, PROMPT + 1, kept)
            rows += [first, *(first + 1 + node for node in verdict.path)]
            wanted.append(Share(lane, PROMPT, len(kept), seed=7 + lane, inverse_temperature=self.inverse_temperature))
            first += 1 + len(draft)
        return wanted, output.features[rows]

    def batch(self, shares: list[Share]) -> Batch:
        return build_batch(self.lanes, shares, ahead=1, beyond=WANTED.limit)

    def draft(self, shares: list[Share], features: Tensor) -> list[Tree]:
        return self.head.draft(self.batch(shares), features, [WANTED] * len(shares), width=3)


def drafts_of(pair: Pair) -> list[Draft]:
    """Trees that hold the target's own next two tokens as a path, and other tokens around it."""
    chains = [list[int]() for _ in range(len(pair.lanes.lengths))]
    for _ in range(2):
        tried = [Draft((*chain, 1)) for chain in chains]
        shares, _ = pair.verify(tried)
        for chain, share in zip(chains, shares, strict=True):
            chain.append(int(pair.lanes.tokens_np[share.lane, PROMPT + 1 + len(chain)]))
    wrong = [[token for token in range(9) if token not in chain] for chain in chains]
    return [Draft((x, a, y, b, z), (-1, -1, 0, 1, 2)) for (a, b), (x, y, z, *_) in zip(chains, wrong, strict=True)]


def small() -> EagleHead:
    """A head that computes all of its outputs."""
    return random_eagle(CONFIG, draft_vocab=40).in_format("int8")


def large() -> EagleHead:
    """A head with enough outputs to make shortlists."""
    return head_with(decay=0.96).in_format("int8")


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(
    ("inverse_temperature", "sequences", "head"), [(0.0, 1, small), (1.0, 1, large), (0.0, 3, large), (1.0, 3, small)]
)
def test_a_prefetched_draft_is_the_same_draft(
    variant: str,
    inverse_temperature: float,
    sequences: int,
    head: Callable[[], EagleHead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    pair, alone = (
        Pair.of(head(), sequences=sequences, inverse_temperature=inverse_temperature, threads=n) for n in (2, 1)
    )
    drafts = drafts_of(pair)
    shares, features = pair.verify(drafts)
    assert [share.count for share in shares] == [3] * sequences  # the root and the two accepted nodes
    found = pair.draft(shares, features)
    assert pair.head.prefetched == 1
    alone.verify(drafts)
    assert found == alone.draft(shares, features)
    assert alone.head.prefetched == 0  # a pool of one thread has no helpers


def test_later_drafts_see_the_keys_and_values_of_a_prefetched_pass() -> None:
    found = []
    for threads in (2, 1):
        pair = Pair.of(small(), threads=threads)
        shares, features = pair.verify(drafts_of(pair))
        pair.draft(shares, features)
        more = [Share(0, PROMPT + 3, 2, seed=3, inverse_temperature=1.0)]
        found.append(pair.draft(more, torch.ones((2, features.shape[1]))))
    assert found[0] == found[1]


CHANGES: dict[str, Any] = {
    "fewer rows": lambda shares, features: ([replace(shares[0], count=2)], features[:2]),
    "another place": lambda shares, features: ([replace(shares[0], start=PROMPT - 1)], features),
    "other hidden states": lambda shares, features: (shares, features + 1e-3),
    "another seed": lambda shares, features: ([replace(shares[0], seed=99)], features),
    "another temperature": lambda shares, features: ([replace(shares[0], inverse_temperature=0.5)], features),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_different_request_is_computed_anew(change: str) -> None:
    found = []
    for threads in (2, 1):
        pair = Pair.of(small(), threads=threads)
        shares, features = CHANGES[change](*pair.verify(drafts_of(pair)))
        found.append(pair.draft(shares, features))
        assert pair.head.prefetched == 0
    assert found[0] == found[1]


def test_a_different_token_is_computed_anew() -> None:
    found = []
    for threads in (2, 1):
        pair = Pair.of(small(), threads=threads)
        shares, features = pair.verify(drafts_of(pair))
        pair.lanes.tokens_np[0, PROMPT + 2] ^= 1
        found.append(pair.draft(shares, features))
        assert pair.head.prefetched == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("head", [small, large])
def test_a_pass_with_logits_has_all_of_them_after_a_prefetched_shortlist(head: Callable[[], EagleHead]) -> None:
    """The head finishes the prefetched pass before it does anything else."""
    pair, alone = Pair.of(head()), Pair.of(head(), threads=1)
    shares, features = pair.verify(drafts_of(pair))
    alone.verify(drafts_of(alone))
    one, other = (each.head(each.batch(shares), features=features) for each in (pair, alone))
    assert torch.equal(one.logits, other.logits)
    assert pair.head.prefetched == 0


def test_prefetching_pauses_after_misses_and_comes_back() -> None:
    """Ten passes that are never asked for; then drafts ask again, and are prefetched again after at most 32 passes."""
    pair = Pair.of(small())
    drafts = drafts_of(pair)
    asked = 0
    for turn in range(80):
        shares, features = pair.verify(drafts)
        if turn >= 10:
            pair.draft(shares, features)
            asked += 1
    assert 70 - 32 <= pair.head.prefetched < asked


@pytest.mark.parametrize("first", ["target", "head"])
def test_target_and_head_may_be_freed_in_any_order(first: str) -> None:
    pair = Pair.of(small())
    pair.verify(drafts_of(pair))
    target, head = pair.target, pair.head
    head._target = None  # type: ignore[assignment]  # the caller alone holds the target
    del pair
    if first == "target":
        del target
    else:
        del head
        other = Pair.of(small())
        other.verify(drafts_of(other))


def test_a_replaced_head_may_be_freed_while_its_prefetched_pass_runs() -> None:
    for _ in range(8):
        pair = Pair.of(small())
        drafts = drafts_of(pair)
        pair.verify(drafts)
        pair.head = CompiledHead(small(), pair.target, num_pages=PAGES, max_context=64)
        for _ in range(2):  # the first draft of a new head makes its memory grow, which drops the prefetched pass
            shares, features = pair.verify(drafts)
            pair.draft(shares, features)
        assert pair.head.prefetched == 1


def test_a_forked_child_computes_the_pass_that_its_parent_prefetched() -> None:
    pair, alone = Pair.of(small()), Pair.of(small(), threads=1)
    shares, features = pair.verify(drafts_of(pair))
    alone.verify(drafts_of(alone))
    expected = alone.draft(shares, features)
    child = os.fork()
    if not child:
        os._exit(0 if pair.draft(shares, features) == expected and pair.head.prefetched == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pair.draft(shares, features) == expected
    assert pair.head.prefetched == 1
