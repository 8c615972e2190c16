"""Decides who drafts how long in a step, and says why where nobody does.

Three things limit a draft: what the user set, the sequence's own pace, and what a drafted token costs on this machine
(`engine.cost`) against how likely it is right. The scheduler only asks `draft_lengths`; the engine only reports
`learn` and `measure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.cost import CostModel
from paceline.engine.sequence import Sequence


class Governor:
    def __init__(self, config: EngineConfig, drafters: Mapping[str, Guard]) -> None:
        self.cost = CostModel()
        self._config = config
        self._drafters = drafters

    def draft_lengths(self, sequences: Seq[Sequence], *, running: int, rows: int) -> list[int]:
        """Longest draft worth asking for, one a sequence, of at most `rows` tokens in all; leaves the reason in
        `off_reason` where it is 0."""
        wishes = [self._wish(sequence, running) for sequence in sequences]
        total = min(rows, self._config.max_draft_tokens)
        lengths = fair_split(wishes, total)
        for sequence, wish, length in zip(sequences, wishes, lengths, strict=True):
            if wish and not length:
                sequence.off_reason = f"no room: {total} drafted tokens in a step of {len(wishes)} decoding sequences"
        return lengths

    def learn(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        output = len(sequence.tokens) - sequence.prompt_length
        sequence.pace.learn(drafted, accepted, output_tokens=output, config=self._config)

    def _wish(self, sequence: Sequence, running: int) -> int:
        # A round gives one token more than it accepts: the last token allowed never needs a draft.
        useful = sequence.max_length - len(sequence.tokens) - 1
        if sequence.drafter is None or not useful:
            return 0
        sequence.off_reason = self._reason_against(sequence, running)
        if sequence.off_reason is not None:
            return 0
        affordable = self._affordable(sequence)
        if affordable == 0:
            return 0
        limits = [useful, self._config.max_draft, self._drafters[sequence.drafter].max_draft, sequence.pace.length]
        if affordable is not None:
            limits.append(affordable)
        if sequence.request.speculation.max_draft is not None:
            limits.append(sequence.request.speculation.max_draft)
        return min(limits)

    def _affordable(self, sequence: Sequence) -> int | None:
        """The longest draft that pays; where none does the sequence pauses, and says why."""
        if not self._config.measure_cost:
            return None
        drafter, pace = sequence.drafter or "", sequence.pace
        entry = self.cost.entry(drafter)
        length = pace.affordable(entry=entry, price=self.cost.price(drafter))
        if length == 0:
            reason = f"paused: a drafted token was right with {pace.rate:.0%}, with {entry:.0%} it would pay"
            output_tokens = len(sequence.tokens) - sequence.prompt_length
            pace.pause(reason, output_tokens=output_tokens, tokens=self._config.pause_tokens // 4 + 1)
            sequence.off_reason = reason
        return length

    def _reason_against(self, sequence: Sequence, running: int) -> str | None:
        config, drafter = self._config, self._drafters[sequence.drafter or ""]
        if drafter.out is not None:
            return drafter.out
        if running > config.max_draft_batch:
            return f"{running} sequences run, more than max_draft_batch {config.max_draft_batch}"
        if len(sequence.tokens) > config.max_draft_context:
            return f"{len(sequence.tokens)} tokens of context, more than max_draft_context {config.max_draft_context}"
        if sequence.pace.paused(len(sequence.tokens) - sequence.prompt_length):
            return sequence.pace.reason
        return None


def fair_split(wishes: Seq[int], total: int) -> list[int]:
    """Give each what it wishes as far as `total` goes; where it does not, nobody gets more than a bigger wisher."""
    shares = [0] * len(wishes)
    order = sorted(range(len(wishes)), key=lambda i: wishes[i])
    for place, i in enumerate(order):
        shares[i] = min(wishes[i], total // (len(order) - place))
        total -= shares[i]
    return shares
