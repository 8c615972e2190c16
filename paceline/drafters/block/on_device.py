"""A block drafter that drafts inside rounds on a device: one pass for all tokens of all drafts, no host in between.

A draft that has become doubtful gets no more tokens, so that verification does not pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.drafters.base import Drafter
from paceline.drafters.eagle.on_device import least_confidence
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.errors import InvalidRequest
from paceline.kernels.base import Forward
from paceline.runner.heads.protocol import ReadingHead
from paceline.runner.loading.blocks import ReadyBlock
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel
from paceline.runner.rounds.protocol import DeviceDrafter, DraftingRound, Seat
from paceline.runner.rounds.traits import held_beside_copies


class BlockOnDevice:
    """Implements DeviceDrafter."""

    finds_fewer = True
    ends_drafts = True
    reader = None

    def __init__(
        self, head: ReadingHead, *, taps: Sequence[int], max_draft: int, min_confidence: float | None = None
    ) -> None:
        """Drafts end below `min_confidence`; None: if one more token does not pay. A request's `p_min` replaces
        either."""
        if not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"min_confidence {min_confidence} must be in [0, 1]")
        self.head = head
        self.taps = taps
        self.max_draft = max_draft
        self._min_confidence = min_confidence

    def threshold(self, seat: Seat) -> float:
        return least_confidence(seat, self._min_confidence)

    def draft(self, round: DraftingRound) -> None:
        logits_after = round.block(self.head)
        for turn in range(round.longest):
            round.append(logits_after(turn), turn, ids=self.head.ids, doubting=True)


def on_gpu(name: str, ready: ReadyBlock, target: ReadyModel, options: Mapping[str, Any]) -> Recipe:
    """Make the recipe of a block drafter beside a target on a GPU, where only rounds run it."""
    config, decoder = ready.head.config, target.decoder
    assert decoder is not None, "the target runs on a CPU"
    head = ready.on_cuda(decoder, max_context=target.model.config.max_context)
    drafter = BlockOnDevice(head, taps=config.taps, **options)
    states = held_beside_copies(drafter, drafter.max_draft)

    def build(context: BuildContext) -> None:
        head.new_kv(context.pool.num_pages, seats=len(context.lanes.lengths))

    def on_device(built: Drafter | None, to: Forward) -> DeviceDrafter:
        return drafter

    def profile(rows: int, outs: int) -> None:
        with memory_for(f"a pass of {rows} tokens of the block drafter", "lower max_step_tokens or max_sequences"):
            head.profile(rows, outs)

    return Recipe(
        name=name,
        build=build,
        how=ready.why,
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        weight_bytes=ready.own_bytes,
        one_pass=True,
        lane_bytes=states * config.width * head.dtype.itemsize + head.pages_of_a_seat * ready.page_bytes,
        vocabulary=config.draft_vocab_size,
        on_device=on_device,
        profile=profile,
    )
