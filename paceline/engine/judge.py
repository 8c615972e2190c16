"""From the logits of a verification to a verdict for each sequence: draw the target's tokens, apply the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.accept.block import accept_block
from paceline.accept.coupled import accept_coupled
from paceline.accept.lossy import accept_likely, typical_floors
from paceline.accept.rejection import accept_rejection
from paceline.accept.rows import Outcome, Rows
from paceline.draft import Draft
from paceline.engine.scheduler import Work
from paceline.kernels.base import Output
from paceline.kernels.noise import gumbel_noise
from paceline.sampling.sampler import Pick, RowGroup, Stream, noise_keys, sample, uniforms
from paceline.types import THRESHOLDS, Rule, Verdict

COUPLED = Rule.COUPLED  # to look a member up costs more than to compare it


def judge(works: Sequence[Work], output: Output, pick: Pick) -> dict[int, Verdict]:
    """Verdicts by sequence key. A work without a draft gets the target's token: plain decoding."""
    drawn = _drawn(works, output, pick)
    verdicts = {}
    others: dict[Rule, list[Work]] = {}
    for work in works:
        rule = rule_of(work)
        if rule is COUPLED:
            own = drawn[work.root : work.root + 1 + len(work.draft.tokens)]
            verdicts[work.sequence.key] = accept_coupled(work.draft, own)
        else:
            others.setdefault(rule, []).append(work)
    for rule, mine in others.items():
        verdicts.update(_verdicts(mine, JUDGES[rule](mine, output, torch.tensor(drawn))))
    return verdicts


def _drawn(works: Sequence[Work], output: Output, pick: Pick) -> list[int]:
    """What the target draws after each row with logits: in the pass where it can, else here."""
    if output.drawn is None:
        drawn = output.argmax.tolist()
        left = [work for work in works if not work.sequence.sampler.is_argmax]
    else:
        drawn = [*output.drawn]
        left = [work for work in works if not work.drawn]
    if left:
        groups = [_row_group(work) for work in left]
        targets = sample(output.logits, output.argmax, groups, pick)
        for group in groups:
            drawn[group.rows] = targets[group.rows].tolist()
    return drawn


def rule_of(work: Work) -> Rule:
    """The request's; but without a draft, or without distributions where it asks for them, it is the coupled one."""
    wanted, draft = work.sequence.request.speculation.rule, work.draft
    if wanted is COUPLED or not draft.tokens or (draft.probs is None and wanted.wants_probs):
        return COUPLED
    return wanted


def _judge_rejection(works: Sequence[Work], output: Output, targets: Tensor) -> Outcome:
    # Row r holds the token at positions[r] - 1, whose coin is keyed by its own position: none beyond the first
    # rejection is looked at, and those before it are of tokens that are never judged again.
    coins = torch.cat([uniforms(w.sequence.sampler.seed, _positions(w) - 1, Stream.ACCEPT) for w in works])
    return accept_rejection(_rows(works), *_distributions(works, output), coins, _noise(works, output))


def _judge_block(works: Sequence[Work], output: Output, targets: Tensor) -> Outcome:
    # All coins are looked at, so each belongs to a round, which is known by the length it begins with.
    places = [(len(work.sequence.tokens) << 32) + _positions(work) for work in works]
    seeds = [work.sequence.sampler.seed for work in works]
    coins = [uniforms(seed, place, Stream.ACCEPT) for seed, place in zip(seeds, places, strict=True)]
    return accept_block(_rows(works), *_distributions(works, output), torch.cat(coins), _noise(works, output))


def _judge_lossy(works: Sequence[Work], output: Output, targets: Tensor) -> Outcome:
    p, floors = [], []
    for work in works:
        sampler, speculation = work.sequence.sampler, work.sequence.request.speculation
        edited = sampler.edit(_logits(work, output), _ancestors(work.draft))
        # At temperature 0 nothing but the best token would be likely: there it is the temperature 1 that counts.
        p.append(torch.softmax(edited, dim=-1) if sampler.greedy else sampler.probs(edited))
        threshold = speculation.threshold or THRESHOLDS[speculation.rule]
        typical = speculation.rule is Rule.TYPICAL
        floors.append(typical_floors(p[-1], threshold) if typical else torch.full((len(edited),), threshold))
    return accept_likely(_rows(works), targets[_outs(works)], torch.cat(p), torch.cat(floors))


JUDGES: Mapping[Rule, Callable[[Sequence[Work], Output, Tensor], Outcome]] = {
    Rule.REJECTION: _judge_rejection,
    Rule.BLOCK: _judge_block,
    Rule.THRESHOLD: _judge_lossy,
    Rule.TYPICAL: _judge_lossy,
}


def _distributions(works: Sequence[Work], output: Output) -> tuple[Tensor, Tensor]:
    """p [rows, vocab]: the target's after each row; q: the drafter's that each row was drawn from."""
    p, q = [], []
    for work in works:
        sampler = work.sequence.sampler
        assert work.draft.probs is not None
        p.append(sampler.probs(sampler.edit(_logits(work, output), _ancestors(work.draft))))
        q.append(torch.nn.functional.pad(work.draft.probs, (0, 0, 1, 0)))  # nothing for the root
    return torch.cat(p), torch.cat(q)


def _noise(works: Sequence[Work], output: Output) -> Tensor:
    """[seqs, vocab] for the token after the last accepted one: one noise serves whichever row that is, because only one
    token is drawn."""
    keys = [noise_keys(w.sequence.sampler.seed, _positions(w)[:1], Stream.RESIDUAL) for w in works]
    return gumbel_noise(torch.from_numpy(np.concatenate(keys)), output.logits.shape[-1])


def _logits(work: Work, output: Output) -> Tensor:
    return output.logits[work.root : work.root + 1 + len(work.draft)]


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


def _outs(works: Sequence[Work]) -> Tensor:
    return torch.tensor([work.root + row for work in works for row in range(1 + len(work.draft))])


def _row_group(work: Work) -> RowGroup:
    rows, sampler = slice(work.root, work.root + 1 + len(work.draft)), work.sequence.sampler
    return RowGroup(sampler, rows, _positions(work), _ancestors(work.draft) if sampler.params.edits_logits else ())


def _positions(work: Work) -> np.ndarray:
    """Of the tokens that follow the root and each drafted token."""
    positions = [len(work.sequence.tokens)]
    for parent in work.draft.parents or range(-1, len(work.draft) - 1):
        positions.append(positions[parent + 1] + 1)
    return np.array(positions)


def _ancestors(draft: Draft) -> list[tuple[int, ...]]:
    """The drafted tokens up to and including each row; none for the root."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(draft.parents or range(-1, len(draft) - 1), draft.tokens, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths
