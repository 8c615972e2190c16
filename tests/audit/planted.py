"""Bugs to be planted into the engine: each is one that speculation could really have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from torch import Tensor

from paceline.accept import registry
from paceline.accept.rows import Outcome, Rows
from paceline.draft import Draft
from paceline.engine import judge
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Work
from paceline.engine.stepper import Landing
from paceline.sampling.sampler import Sampler
from paceline.types import Verdict

Plant = Callable[[pytest.MonkeyPatch], None]


def accepts_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The first wrong token of a draft is let through."""

    def follow(draft: Draft, drawn: Sequence[int]) -> Verdict:
        right = [token == own for token, own in zip(draft.tokens, drawn, strict=False)]
        count = min(len(draft), [*right, False].index(False) + 1)
        return Verdict(path=tuple(range(count)), token=drawn[count])

    patch.setattr(judge, "accept_coupled", follow)


def penalties_stand_still(patch: pytest.MonkeyPatch) -> None:
    """Rows of a draft are penalised as if nothing had been drafted before them."""
    edit = Sampler.edit

    def still(self: Sampler, logits: Tensor, ancestors: Sequence[Sequence[int]]) -> Tensor:
        return edit(self, logits, [()] * len(ancestors))

    patch.setattr(Sampler, "edit", still)


def keeps_a_rejected_slot(patch: pytest.MonkeyPatch) -> None:
    """The keys and values of the first rejected token stay, in the place of the last that was accepted."""
    commit = Engine._commit

    def kept(self: Engine, landing: Landing) -> None:
        commit(self, landing)
        for work in landing.works:
            if work.verdict is not None and len(work.verdict.path) < work.drafted:
                assert work.sequence.span is not None
                end = work.start + work.count + len(work.verdict.path)
                slots = self._cache.slots(work.sequence.span, end - 1, end + 1)
                self._cache._memory.move(slots[1:], slots[:1])

    patch.setattr(Engine, "_commit", kept)


def noise_of_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """Rows of a draft are drawn with the noise that belongs one token further on."""
    positions = judge._positions

    def shifted(work: Work) -> np.ndarray:
        found = positions(work)
        return np.asarray(found + (np.arange(len(found)) > 0))

    patch.setattr(judge, "_positions", shifted)


def residual_is_everything(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn as if none had been."""
    from paceline.accept import rejection

    def rest(rows: Rows, p_last: Tensor, q: Tensor, last: Tensor) -> Tensor:
        return p_last

    patch.setattr(rejection, "_rest", rest)


def block_never_corrects(patch: pytest.MonkeyPatch) -> None:
    from paceline.accept import block

    accept = block.accept_block

    def careless(rows: Rows, p: Tensor, q: Tensor, coins: Tensor, noise: Tensor) -> Outcome:
        outcome = accept(rows, p, q, coins, noise)
        return Outcome(alive=outcome.alive, last=outcome.last, tokens=(p[outcome.last].log() + noise).argmax(-1))

    patch.setattr(registry, "accept_block", careless)


TOKENS: Mapping[str, Plant] = {  # found by comparing tokens
    "acceptance": accepts_one_too_many,
    "penalties": penalties_stand_still,
    "KV commit": keeps_a_rejected_slot,
    "noise key": noise_of_the_next_position,
}
DISTRIBUTIONS: Mapping[str, tuple[str, Plant]] = {  # found by tests
    "residual": ("rejection", residual_is_everything),
    "correction": ("block", block_never_corrects),
}
