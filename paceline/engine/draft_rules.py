"""Rules over the drafts of a device's round: the judge that `runner.rounds.rules` asks.

Paceline's own rules run on the device, over all drafts at once, and nothing is read back. Unused rows of a draft form a
sequence of their own, so that shapes do not depend on how much was drafted. Rules of other packages run on the host,
each over its own drafts; one that fails leaves them to the coupled rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.accept.lossy import NEUTRAL
from paceline.accept.registry import judged_by
from paceline.accept.rows import Outcome, Rows
from paceline.kernels.noise import gumbel_noise
from paceline.kernels.round_reference import noise_keys, uniforms
from paceline.rules import BUILT_IN, Rule
from paceline.runner.rounds.rules import JudgedDrafts, probabilities
from paceline.sampling.sampler import Stream


def judge_drafts(drafts: JudgedDrafts) -> Tensor:
    """Judge each draft by its rule; see `Judge`."""
    verdicts = torch.full((len(drafts.rule), 2), -1, dtype=torch.int32, device=drafts.rule.device)
    given = DraftVerification(drafts)
    for index, rule in enumerate(drafts.rules):
        if rule.wants_probs and drafts.q is None:
            continue  # nobody knows what the tokens were drawn from
        mine = (drafts.rule == index) & (drafts.drafted > 0)
        decided = _judged_here(rule, given) if rule in BUILT_IN else _judged_on_host(rule, given, mine)
        verdicts = torch.where(mine[:, None], decided, verdicts)
    return verdicts


def _judged_here(rule: Rule, given: DraftVerification) -> Tensor:
    outcome = judged_by(rule, given)
    assert outcome is not None, "Paceline's own rules do not fail"
    count = len(given.drafts.rule)
    last = outcome.last[:count] - given.rows.roots[:count]
    return torch.stack((last, outcome.tokens[:count]), dim=1).int()


def _judged_on_host(rule: Rule, given: DraftVerification, mine: Tensor) -> Tensor:
    """Judge the drafts that are True in `mine` by a rule of another package. Waits for the device."""
    verdicts = torch.full((len(mine), 2), -1, dtype=torch.int32)
    places = mine.nonzero()[:, 0].tolist()
    if places:
        host = HostVerification(given, places)
        outcome = judged_by(rule, host)
        if outcome is not None:
            verdicts[places] = _accepted(host.rows, outcome)
    return verdicts.to(mine.device)


def _accepted(rows: Rows, outcome: Outcome) -> Tensor:
    """Return the last row of each path, counted from its root, and the token after it, int32 [sequences, 2]."""
    index = torch.arange(len(rows.tokens)) * outcome.alive
    last = rows.roots.scatter_reduce(0, rows.owners, index, "amax")
    return torch.stack((last - rows.roots, outcome.tokens), dim=1).int()


@dataclass
class DraftVerification:
    """Drafts as rules see them: implements `Verification` of paceline.accept, on the device.

    Sequences are the drafts, then one for the unused rows of each."""

    drafts: JudgedDrafts

    @cached_property
    def rows(self) -> Rows:
        drafted, (count, width) = self.drafts.drafted, self.drafts.tokens.shape
        draft = torch.arange(count, device=drafted.device)
        step = torch.arange(width, device=drafted.device)
        unused = step > drafted[:, None]  # [drafts, width]; at least the last row
        first = torch.where(unused, drafted[:, None] + 1, 0)
        above = (step - 1).clamp(min=0) if self.drafts.parents is None else self.drafts.parents
        tokens = torch.where((step > 0) & ~unused, self.drafts.tokens, 0)
        return Rows(
            tokens=tokens.flatten(),
            parents=(draft[:, None] * width + torch.where(unused, torch.maximum(step - 1, first), above)).flatten(),
            owners=torch.where(unused, count + draft[:, None], draft[:, None]).flatten(),
            roots=torch.cat((draft * width, draft * width + drafted + 1)),
            depth=width - 1,
        )

    @property
    def vocab_size(self) -> int:
        return self.drafts.logits.shape[-1]

    @property
    def targets(self) -> Tensor:
        return self.drafts.targets.flatten()

    @cached_property
    def likelihood(self) -> Tensor:
        return probabilities(self.drafts.logits, self._scale[:, None, None], self.drafts.floors[..., None]).flatten(
            0, 1
        )

    @cached_property
    def p(self) -> Tensor:
        best = torch.nn.functional.one_hot(self.drafts.logits.argmax(-1), self.vocab_size).float()
        greedy = self._scale[:, None, None] <= 0
        return torch.where(greedy, best, self.likelihood.view(best.shape)).flatten(0, 1)

    @property
    def q(self) -> Tensor:
        assert self.drafts.q is not None, "only a rule with wants_probs has distributions to ask for"
        return self.drafts.q.flatten(0, 1)

    @property
    def confidence(self) -> Tensor:
        if self.drafts.q is None:
            return torch.full_like(self.targets, NEUTRAL, dtype=torch.float32)
        return self.q.gather(1, self.rows.tokens[:, None])[:, 0]

    @property
    def coins(self) -> Tensor:
        return uniforms(self._seeds, self._positions - 1, Stream.ACCEPT).flatten()

    @property
    def round_coins(self) -> Tensor:
        return uniforms(self._seeds, (self._lengths << 32) + self._positions, Stream.ACCEPT).flatten()

    @cached_property
    def noise(self) -> Tensor:
        keys = noise_keys(self._seeds[:, 0], self._lengths[:, 0], Stream.RESIDUAL)
        return gumbel_noise(keys, self.vocab_size).repeat(2, 1)  # those of unused rows do not matter

    @property
    def thresholds(self) -> Any:  # a tensor: Paceline's own rules take it as it is
        return self.drafts.thresholds.repeat(2)

    @property
    def _scale(self) -> Tensor:
        return self.drafts.state.inverse_temperature[self.drafts.lanes]

    @property
    def _seeds(self) -> Tensor:
        return self.drafts.state.seed[self.drafts.lanes, None]

    @property
    def _lengths(self) -> Tensor:
        return self.drafts.state.lengths[self.drafts.lanes, None].long()

    @property
    def _positions(self) -> Tensor:
        return self.drafts.positions


class HostVerification:
    """Some drafts as a rule of another package sees them: implements `Verification`, on the host."""

    def __init__(self, given: DraftVerification, places: list[int]) -> None:
        self.vocab_size = given.vocab_size
        self._given = given
        self._places = places
        counts = [1 + int(count) for count in given.drafts.drafted[places].tolist()]
        width = given.drafts.tokens.shape[1]
        self._index = torch.cat([place * width + torch.arange(n) for place, n in zip(places, counts, strict=True)])
        starts = torch.tensor([0, *counts]).cumsum(0)
        roots = starts[:-1]
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self.rows = Rows(
            tokens=self._of(given.rows.tokens),
            parents=self._of(given.rows.parents) + (roots - width * torch.tensor(places))[owners],
            owners=owners,
            roots=roots,
            depth=max(counts) - 1,
        )

    def _of(self, values: Tensor) -> Tensor:
        """Select the rows of these drafts."""
        return values[self._index.to(values.device)].cpu()

    @cached_property
    def targets(self) -> Tensor:
        return self._of(self._given.targets)

    @cached_property
    def p(self) -> Tensor:
        return self._of(self._given.p)

    @cached_property
    def likelihood(self) -> Tensor:
        return self._of(self._given.likelihood)

    @cached_property
    def q(self) -> Tensor:
        return self._of(self._given.q)

    @cached_property
    def confidence(self) -> Tensor:
        return self._of(self._given.confidence)

    @cached_property
    def coins(self) -> Tensor:
        return self._of(self._given.coins)

    @cached_property
    def round_coins(self) -> Tensor:
        return self._of(self._given.round_coins)

    @cached_property
    def noise(self) -> Tensor:
        return self._given.noise[self._places].cpu()

    @cached_property
    def thresholds(self) -> list[float]:
        return [float(value) for value in self._given.drafts.thresholds[self._places].tolist()]
