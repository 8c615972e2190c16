"""Judge the draft of each sequence from the logits of its verification: draw the target's tokens, apply the rules.

Drafts under the coupled rule are judged here, in plain Python. Any other rule gets its works as `VerifiedWorks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from paceline.accept.coupled import DrawnTokens, accept_coupled
from paceline.accept.lossy import NEUTRAL
from paceline.accept.registry import judged_by
from paceline.accept.rows import Outcome, Rows
from paceline.engine.scheduler import Work
from paceline.kernels.base import Output
from paceline.kernels.noise import gumbel_noise
from paceline.rules import Rule
from paceline.sampling.sampler import Pick, RowGroup, Stream, noise_keys, sample, uniforms
from paceline.types import Verdict

COUPLED = Rule.COUPLED  # a local name: looked up for every work


def judge(works: Sequence[Work], output: Output, pick: Pick) -> dict[int, Verdict]:
    """Judge all works. Returns verdicts by sequence key; without a draft a verdict is the target's token alone."""
    verdicts: dict[int, Verdict] = {}
    left = []
    for work in works:
        if work.drawn and output.drawn is not None:
            sampler, own = work.sequence.sampler, output.drawn[work.root : work.root + 1 + len(work.draft.tokens)]
            checked = sampler.filters or sampler.grammar is not None
            drawn = CheckedTokens(work, own, output, pick) if checked else own
            verdicts[work.sequence.key] = accept_coupled(work.draft, drawn)
        else:
            left.append(work)
    return verdicts | _judge_here(left, output, pick) if left else verdicts


def _judge_here(works: Sequence[Work], output: Output, pick: Pick) -> dict[int, Verdict]:
    """Judge works whose tokens the pass did not draw."""
    drawn = _draw(works, output, pick)
    verdicts = {}
    others: dict[Rule, list[Work]] = {}
    for work in works:
        rule = rule_of(work)
        if rule is COUPLED:
            verdicts[work.sequence.key] = accept_coupled(work.draft, drawn[_outs(work)])
        else:
            others.setdefault(rule, []).append(work)
    for rule, mine in others.items():
        outcome = judged_by(rule, VerifiedWorks(mine, output, drawn))
        if outcome is None:
            verdicts |= {work.sequence.key: accept_coupled(work.draft, drawn[_outs(work)]) for work in mine}
        else:
            verdicts |= _verdicts(mine, outcome)
    return verdicts


def _draw(works: Sequence[Work], output: Output, pick: Pick) -> list[int]:
    """Return the target's own token after each row of the works; rows of other works get their best token."""
    tokens: list[int] = sample(output.logits, output.argmax, [_row_group(work) for work in works], pick).tolist()
    return tokens


class CheckedTokens:
    """The target's tokens after the rows of a work, by `DrawnTokens`, from those that the pass drew with noise alone.

    Filters keep the best token of a row, and a token that a grammar allows is drawn with its mask, too. So where the
    pass drew such a token, it stays: no floor has to be found, and no mask to be computed. Another token is drawn
    again. Behind a token that the pass did not draw, its noisy tokens mean nothing; its best tokens always do."""

    def __init__(self, work: Work, drawn: DrawnTokens, output: Output, pick: Pick) -> None:
        self._work, self._drawn, self._output, self._pick = work, drawn, output, pick
        self._valid = True  # False: behind a token that the pass did not draw
        self._path: list[int] = []  # tokens up to the next row

    def __getitem__(self, row: int, /) -> int:
        token = self._drawn[row]
        if not (self._valid and self._stays(row, token)):
            drawn = self._draw_again(row)
            self._valid = self._valid and (drawn == token or self._work.sequence.sampler.greedy)
            token = drawn
        self._path.append(token)
        return token

    def _stays(self, row: int, token: int) -> bool:
        sampler = self._work.sequence.sampler
        if sampler.filters and token != int(self._output.argmax[self._work.root + row]):
            return False
        return sampler.grammar is None or sampler.grammar.fitting((*self._path, token)) > len(self._path)

    def _draw_again(self, row: int) -> int:
        sampler, out = self._work.sequence.sampler, self._work.root + row
        logits = sampler.edit(self._output.logits[out : out + 1], [self._path])
        return int(sampler.draw(logits, _positions(self._work)[row : row + 1], self._pick)[0])


def rule_of(work: Work) -> Rule:
    """Return the rule that judges a work: the request's; coupled if there is no draft, or if `probs` are missing."""
    wanted, draft = work.sequence.request.speculation.rule, work.draft
    if wanted is COUPLED or not draft.tokens or (draft.probs is None and wanted.wants_probs):
        return COUPLED
    return wanted


class VerifiedWorks:
    """Drafts of some works as their rule sees them: the `Verification` of `paceline.accept`."""

    def __init__(self, works: Sequence[Work], output: Output, drawn: Sequence[int]) -> None:
        self.vocab_size = output.logits.shape[-1]
        self._works = works
        self._output = output
        self._drawn = drawn

    @cached_property
    def rows(self) -> Rows:
        return _rows(self._works)

    @cached_property
    def targets(self) -> Tensor:
        return torch.tensor([token for work in self._works for token in self._drawn[_outs(work)]])

    @cached_property
    def p(self) -> Tensor:
        edited = zip(self._works, self._edited, strict=True)
        return torch.cat([work.sequence.sampler.probs(logits) for work, logits in edited])

    @cached_property
    def likelihood(self) -> Tensor:
        # At temperature 0 the best token would have probability 1: use the distribution at temperature 1 instead.
        samplers = [work.sequence.sampler for work in self._works]
        edited = zip(samplers, self._edited, strict=True)
        return torch.cat([torch.softmax(each, dim=-1) if s.greedy else s.probs(each) for s, each in edited])

    @cached_property
    def q(self) -> Tensor:
        parts = []
        for work in self._works:
            assert work.draft.probs is not None, "only a rule with wants_probs has distributions to ask for"
            parts.append(torch.nn.functional.pad(work.draft.probs, (0, 0, 1, 0)))  # the root has no distribution
        return torch.cat(parts)

    @cached_property
    def confidence(self) -> Tensor:
        each = [work.draft.own_confidence or [NEUTRAL] * len(work.draft) for work in self._works]
        return torch.tensor([value for own in each for value in (NEUTRAL, *own)])

    @cached_property
    def coins(self) -> Tensor:
        # The token of row r is at positions[r] - 1, and its coin is keyed by that position. So each coin is used once:
        # a rule uses no coin beyond the first rejection, and tokens before it are never judged again.
        return torch.cat([uniforms(w.sequence.sampler.seed, _positions(w) - 1, Stream.ACCEPT) for w in self._works])

    @cached_property
    def round_coins(self) -> Tensor:
        # The key of a coin includes the length of the sequence, which identifies the round.
        places = [(len(work.sequence.tokens) << 32) + _positions(work) for work in self._works]
        seeds = [work.sequence.sampler.seed for work in self._works]
        return torch.cat([uniforms(seed, place, Stream.ACCEPT) for seed, place in zip(seeds, places, strict=True)])

    @cached_property
    def noise(self) -> Tensor:
        # One noise vector per sequence is enough, because one token is drawn, after the last accepted row.
        keys = [noise_keys(w.sequence.sampler.seed, _positions(w)[:1], Stream.RESIDUAL) for w in self._works]
        return gumbel_noise(torch.from_numpy(np.concatenate(keys)), self.vocab_size)

    @property
    def thresholds(self) -> list[float]:
        return [work.sequence.request.speculation.min_likelihood for work in self._works]

    @cached_property
    def _edited(self) -> list[Tensor]:
        """Logits [rows, vocab] of each work, with penalties, bias and masks."""
        logits = self._output.logits
        return [work.sequence.sampler.edit(logits[_outs(work)], [(), *work.draft.paths]) for work in self._works]


def _verdicts(works: Sequence[Work], outcome: Outcome) -> dict[int, Verdict]:
    alive, tokens = outcome.alive.tolist(), outcome.tokens.tolist()
    verdicts, row = {}, 0
    for work, token in zip(works, tokens, strict=True):
        path = tuple(node for node in range(len(work.draft)) if alive[row + 1 + node])
        verdicts[work.sequence.key] = Verdict(path=path, token=token)
        row += 1 + len(work.draft)
    return verdicts


def _rows(works: Sequence[Work]) -> Rows:
    tokens: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    roots: list[int] = []
    for owner, work in enumerate(works):
        root = len(tokens)
        above = work.draft.parents or range(-1, len(work.draft) - 1)
        roots.append(root)
        tokens += [0, *work.draft.tokens]
        parents += [root, *(root + 1 + parent for parent in above)]
        owners += [owner] * (1 + len(work.draft))
    return Rows(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        owners=torch.tensor(owners),
        roots=torch.tensor(roots),
        depth=max(len(work.draft) for work in works),
    )


def _outs(work: Work) -> slice:
    """Return the slice of a work's root and draft among the rows with logits."""
    return slice(work.root, work.root + 1 + len(work.draft.tokens))


def _row_group(work: Work) -> RowGroup:
    sampler = work.sequence.sampler
    ancestors = [(), *work.draft.paths] if sampler.params.edits_logits else ()
    return RowGroup(sampler, _outs(work), _positions(work), ancestors)


def _positions(work: Work) -> np.ndarray:
    """Return the positions of the tokens that follow the root and each drafted token."""
    positions = [len(work.sequence.tokens)]
    for parent in work.draft.parents or range(-1, len(work.draft) - 1):
        positions.append(positions[parent + 1] + 1)
    return np.array(positions)
