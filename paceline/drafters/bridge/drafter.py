"""A draft model that reads and writes other tokens than the target does.

It has a text, pages and a prefix cache of its own, because its text has another length. After each step its context is
translated anew from the last word on. What it has read before stays, as far as the tokens are the same:

    read      … the  cat  s   at           tokens whose keys and values are in its KV memory, the last draft's included
    context   … the  cat  sat  on          first pass: from "sat" on
                ^ settled and read: remembered for other sequences with the same beginning and salt

Its drafts are chains, drawn token by token in the target's vocabulary (`drafters.chain_drafting`). Then the drafted
text is translated as a whole, since the target may write it with other tokens. Under a rule that wants distributions or
confidence each drafted token stands for itself. A sequence that is too long for its context or its pages has no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.bridge.context import DrafterContext
from paceline.drafters.bridge.logits import TargetLogits
from paceline.drafters.chain_drafting import ChainDrafting, divide_rows
from paceline.drafters.draft_in_progress import DraftInProgress
from paceline.drafters.tree_drafting import Thresholds
from paceline.errors import InvalidRequest
from paceline.kernels.base import Forward, Output
from paceline.kv.cache import KVCache, Span
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.trees import OF_MODEL
from paceline.runner.lanes import Lanes
from paceline.runner.vocabulary import fit_tokens
from paceline.text.bridge import VocabularyBridge


@dataclass(slots=True)
class _Text:
    """A sequence, as the drafter knows it."""

    context: DrafterContext
    span: Span | None = None  # None: it was never asked for a draft
    read: list[int] = field(default_factory=list)  # tokens whose keys and values are in its pages


class BridgedDrafter(Drafter):
    name = "model"

    def __init__(
        self,
        forward: Forward,
        bridge: VocabularyBridge,
        *,
        sequences: int,
        max_context: int,
        vocab_size: int,
        chunk: int,
        share_prefixes: bool = True,
        max_draft: int = 8,
        min_confidence: float | None = None,
    ) -> None:
        """`max_context`: tokens of the drafter; `vocab_size`: the target's. For others see `ModelDrafter`."""
        if max_draft < 1 or not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        self.max_draft = max_draft
        self.ends_drafts = min_confidence is None
        self.forward = forward
        self._bridge = bridge
        self._logits = TargetLogits.of(bridge.to_target, model_vocab_size=forward.vocab_size, vocab_size=vocab_size)
        self._lanes = Lanes(count=sequences, max_context=max_context, max_draft=max_draft)
        self._cache = KVCache(forward.kv, share_prefixes=share_prefixes)
        self._thresholds = Thresholds(min_confidence, next_acceptance=OF_MODEL.child_acceptance)
        self._max_context = max_context
        self._chunk = chunk
        self._texts: dict[int, _Text] = {}

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._texts[key] = _Text(DrafterContext(self._bridge))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        ready, behind = divide_rows(asks, [self._missing(ask) for ask in asks], room=self._chunk)
        if behind:
            self.compute([share for _, share in behind])
        for ask, share in behind:
            self._note_read(ask, self._texts[ask.key].context.tokens[: share.start + share.count])
        drafts = self._drafts(*map(list, zip(*ready, strict=True))) if ready else {}
        return [drafts.get(ask.key, EMPTY) for ask in asks]

    def stop(self, key: int) -> None:
        text = self._texts.pop(key)
        if text.span is not None:
            self._cache.close(text.span)

    def _drafts(self, asks: list[Ask], shares: list[Share]) -> dict[int, Draft]:
        found = ChainDrafting(self, self.forward.pick, self._thresholds).begin(asks, shares)
        for one in found:
            self._note_read(one.ask, [*self._texts[one.ask.key].context.tokens, *one.own[:-1]])
        return {one.ask.key: one.finished() for one in found}

    # ── its text, and what it has read of it ──

    def _missing(self, ask: Ask) -> range:
        """Bring the drafter's text up to date. Return the positions to read before it can draft; none: it cannot."""
        text = self._texts[ask.key]
        text.context.follow(ask.tokens)
        tokens = text.context.tokens
        end = len(tokens) + ask.max_draft
        if not tokens or end > self._max_context:
            return range(0)
        span = text.span or self._open(text, ask)
        if not self._cache.can_reserve(span, end):
            return range(0)
        self._cache.reserve(span, end)
        self._lanes.pages_np[ask.lane, : len(span.pages)] = span.pages
        same = common_length(text.read, tokens, span.committed)
        self._lanes.tokens_np[ask.lane, same : len(tokens)] = tokens[same:]
        return range(min(same, len(tokens) - 1), len(tokens))

    def _note_read(self, ask: Ask, tokens: list[int]) -> None:
        """Note that tokens were read. Those that are settled are remembered for texts with the same beginning."""
        text = self._texts[ask.key]
        assert text.span is not None, "a text without pages"
        text.read = tokens
        fresh = min(len(tokens), text.context.settled) - text.span.committed
        if fresh > 0:
            self._cache.extend(text.span, self._lanes.texts[ask.lane], fresh)

    def _open(self, text: _Text, ask: Ask) -> Span:
        """Take the pages of the longest beginning that was read before."""
        settled = text.context.tokens[: text.context.settled]
        text.span = span = self._cache.open(np.array(settled, dtype=np.int32), salt=ask.salt)
        text.read = settled[: span.committed]
        self._lanes.tokens_np[ask.lane, : span.committed] = text.read
        return span

    # ── for `ChainDrafting` ──

    def compute(self, shares: Sequence[Share]) -> Output:
        batch = build_batch(self._lanes, shares)
        known = self._bridge.drafter.vocab_size
        return self.forward(fit_tokens(batch, vocab_size=known, model_vocab_size=self.forward.vocab_size))

    def in_target_vocabulary(self, output: Output) -> tuple[Tensor, Tensor]:
        logits = self._logits(output.logits)
        return logits, logits.argmax(-1)

    def append(self, draft: DraftInProgress, token: int, logits: Tensor) -> None:
        own, most = self._logits.source(token, logits), draft.ask.max_draft
        if own is None or not _is_possible(draft, token):
            draft.stuck = True
            del draft.probs[len(draft.tokens) :], draft.told[len(draft.tokens) :]
            return
        self._lanes.texts[draft.ask.lane][self._end(draft)] = own
        draft.own.append(own)
        if draft.free or draft.ask.rule.wants_confidence:
            self._append_exactly(draft, self._logits.meanings[own])
        else:
            draft.tokens[:] = self._bridge.to_target.text(draft.own)[:most]
        draft.stuck = len(draft.own) == most  # its pages hold no more

    def _append_exactly(self, draft: DraftInProgress, tokens: Sequence[int]) -> None:
        """Append a token of the drafter: its first token was drawn, and the others follow from it."""
        tokens = tokens[: draft.ask.max_draft - len(draft.tokens)]
        draft.tokens += tokens
        for token in tokens[1:]:
            if draft.probs:
                draft.probs.append(torch.nn.functional.one_hot(torch.tensor(token), len(draft.probs[0])).float())
            if draft.told:
                draft.told.append(draft.told[-1])

    def last_row(self, draft: DraftInProgress) -> Share:
        return Share(lane=draft.ask.lane, start=self._end(draft) - 1, count=1)

    def _end(self, draft: DraftInProgress) -> int:
        """Return the position behind the drafter's text and draft."""
        return len(self._texts[draft.ask.key].context.tokens) + len(draft.own)


def common_length(one: Sequence[int], other: Sequence[int], known: int) -> int:
    """Count the leading tokens that two texts have in common; the first `known` ones are."""
    pairs = zip(one[known:], other[known:], strict=False)
    return known + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_possible(draft: DraftInProgress, token: int) -> bool:
    """Tell whether a token was drawn from what the request allows: it may allow none that the drafter has."""
    return (not draft.free or float(draft.probs[-1][token]) > 0) and (not draft.told or draft.told[-1] >= 0)
