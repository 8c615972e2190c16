"""From the logits of a verification to a verdict for each sequence: draw the target's tokens, apply the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.accept.coupled import accept_coupled
from paceline.accept.rejection import accept_rejection
from paceline.accept.rows import Outcome, Rows
from paceline.draft import Draft
from paceline.engine.scheduler import Work
from paceline.kernels.base import Output
from paceline.kernels.noise import gumbel_noise
from paceline.sampling import Pick, RowGroup, Stream, noise_keys, sample, uniforms
from paceline.types import Rule, Verdict


def judge(works: Sequence[Work], output: Output, pick: Pick) -> dict[int, Verdict]:
    """Verdicts by sequence key. A work without a draft gets the target's token: plain decoding."""
    groups = [_row_group(work) for work in works if not work.sequence.sampler.is_argmax]
    targets = sample(output.logits, output.argmax, groups, pick)
    drafted = [work for work in works if work.draft]
    verdicts = {}
    if len(drafted) < len(works):
        drawn = targets.tolist()
        verdicts = {work.sequence.key: Verdict((), drawn[work.root]) for work in works if not work.draft}
    for rule in (_judge_coupled, _judge_rejection):
        mine = [work for work in drafted if _rule(work) is rule]
        if mine:
            outcome = rule(mine, output, targets)
            verdicts.update(_verdicts(mine, outcome))
    return verdicts


def _rule(work: Work) -> Callable[[Sequence[Work], Output, Tensor], Outcome]:
    """The request's, except that rejection without distributions is the coupled rule."""
    wanted = work.sequence.request.speculation.rule
    return _judge_rejection if wanted is Rule.REJECTION and work.draft.probs is not None else _judge_coupled


def _judge_coupled(works: Sequence[Work], output: Output, targets: Tensor) -> Outcome:
    return accept_coupled(_rows(works), targets[_outs(works)])


def _judge_rejection(works: Sequence[Work], output: Output, targets: Tensor) -> Outcome:
    p, q, coins, noise = [], [], [], []
    for work in works:
        sampler, positions = work.sequence.sampler, _positions(work)
        logits = output.logits[work.root : work.root + 1 + len(work.draft)]
        assert work.draft.probs is not None
        p.append(sampler.probs(sampler.edit(logits, _ancestors(work.draft))))
        q.append(torch.nn.functional.pad(work.draft.probs, (0, 0, 1, 0)))  # nothing for the root
        # Row r holds the token at positions[r] - 1, whose coin is keyed by its own position.
        coins.append(uniforms(sampler.seed, positions - 1, Stream.ACCEPT))
        # One noise serves whichever row turns out to be the last: only one token is drawn.
        keys = torch.from_numpy(noise_keys(sampler.seed, positions[:1], Stream.RESIDUAL))
        noise.append(gumbel_noise(keys, logits.shape[-1]))
    return accept_rejection(_rows(works), torch.cat(p), torch.cat(q), torch.cat(coins), torch.cat(noise))


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
    rows = slice(work.root, work.root + 1 + len(work.draft))
    return RowGroup(work.sequence.sampler, rows, _positions(work), _ancestors(work.draft))


def _positions(work: Work) -> np.ndarray:
    """Of the tokens that follow the root and each drafted token."""
    return len(work.sequence.tokens) + np.array([len(before) for before in _ancestors(work.draft)])


def _ancestors(draft: Draft) -> list[tuple[int, ...]]:
    """The drafted tokens up to and including each row; none for the root."""
    paths: list[tuple[int, ...]] = [()]
    for node, token in enumerate(draft.tokens):
        parent = draft.parents[node] if draft.parents else node - 1
        paths.append((*paths[parent + 1], token))
    return paths
