"""Draft again for a text that is known: a drafter is told of it as of a sequence, as far as the caller goes.

    text     prompt │ output ............................... │      known: nothing is verified, and no text is made
    redraft         │ draft, go on, draft, go on …

The engine must be idle. The text has a lane and pages of its own (`Probes.seated`). If the drafter reads hidden states,
the target computes those of the whole text at the beginning. A drafter that fails does so behind its guard, as in a
step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Seen
from paceline.drafters.guard import Guard
from paceline.drafters.taps import columns
from paceline.engine.probe import Probes
from paceline.runner.batch import Share, build_batch
from paceline.sampling.sampler import Sampler


class Redraft:
    """One text on a lane, and how far one drafter has come with it."""

    def __init__(
        self, key: int, lane: int, tokens: tuple[int, ...], sampler: Sampler, probes: Probes, guard: Guard
    ) -> None:
        """`key`: nobody else's in this drafter. `sampler`: of the text's request, and told of its prompt alone."""
        self.key, self.lane, self.tokens, self.sampler = key, lane, tokens, sampler
        self.position = 0  # tokens that count as committed
        self._probes, self._guard = probes, guard
        self._fed = 0
        self._computed = 0  # tokens that the target has computed, for a drafter on its KV memory
        self._features = self._compute() if guard.taps else None

    @property
    def committed(self) -> np.ndarray:
        return self._probes.lanes.view(self.lane, self.position)

    def begin(self, position: int) -> None:
        """Start behind the first token of the output, which comes with the prompt."""
        self.sampler.advance(self.tokens[position - 1 : position])
        self._commit(position)
        self._guard.start(self.key, self.lane, self.committed)
        self._feed()

    def advance(self, count: int, *, right: int | None = None) -> None:
        """Commit the next tokens of the text, as many as it has. `right`: tokens of the latest draft that are among
        them; None: the drafter is not told, as after a plain step."""
        end = min(self.position + count, len(self.tokens))
        self.sampler.advance(self.tokens[self.position : end])
        self._commit(end)
        if right is not None and self._guard.out is None:
            self._guard.observe(self.key, self.committed, right)
        self._feed()

    def _commit(self, position: int) -> None:
        lanes = self._probes.lanes
        lanes.tokens_np[self.lane, : len(self.tokens)] = self.tokens  # a drafter writes its drafts behind the text
        lanes.lengths_np[self.lane] = self.position = position
        if self._guard.shares_kv:
            self._catch_up()

    def _catch_up(self) -> None:
        """Let the target compute all committed tokens but the last one, as in a step: drafts have written over some."""
        rows, end = self._probes.max_step_tokens, self.position - 1
        for start in range(self._computed, end, rows):
            share = Share(lane=self.lane, start=start, count=min(rows, end - start), outs=1)
            self._probes.forward(build_batch(self._probes.lanes, [share]))
        self._computed = end

    def _compute(self) -> Tensor:
        """Compute the hidden states of the whole text, float32 [tokens, taps * hidden]."""
        rows, parts = self._probes.max_step_tokens, []
        for start in range(0, len(self.tokens), rows):
            share = Share(lane=self.lane, start=start, count=min(rows, len(self.tokens) - start), outs=1)
            features = self._probes.forward(build_batch(self._probes.lanes, [share], features=True)).features
            assert features is not None, "the target keeps the hidden states of loaded drafters"
            parts.append(columns(self._guard.taps, self._probes.forward.taps)(features).clone())
        return torch.cat(parts)

    def _feed(self) -> None:
        """Hand over the hidden states of all positions but the last, which the target has not computed yet."""
        end = self.position - 1
        if self._features is not None and end > self._fed:
            seen = Seen(self.key, self._fed, range(self._fed, end))
            self._guard.feed(self._features, [seen], crowded=False)
            self._fed = end


def count_right(draft: Draft, said: Seq[int]) -> int:
    """Count the tokens of a draft that a text begins with, along its best path from the root."""
    parents = draft.parents or range(-1, len(draft.tokens) - 1)
    node, right = -1, 0
    for token in said:
        node = next((i for i, above in enumerate(parents) if above == node and draft.tokens[i] == token), -2)
        if node < 0:
            break
        right += 1
    return right
