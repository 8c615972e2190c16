"""A block drafter that drafts: DFlash, DSpark or DFlash2, one pass for all tokens of all drafts.

It keeps its keys and values under the target's page ids. `drafters.eagle.reading` feeds and reads hidden states, as for
an EAGLE head; `drafters.block.drafting` drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.block.drafting import BlockDrafting
from paceline.drafters.block.on_device import on_gpu
from paceline.drafters.eagle.drafter import SHAPE
from paceline.drafters.eagle.drafting import DOUBTFUL_CONFIDENCE, Draws
from paceline.drafters.eagle.head_drafter import STATE_BYTES, HeadDrafter
from paceline.drafters.eagle.reading import HeadReading
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.shipped import head_directory
from paceline.drafters.tree_drafting import Thresholds
from paceline.errors import InvalidRequest
from paceline.kv.pages import PagePool
from paceline.models.weights import Progress
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.protocol import BlockForward
from paceline.runner.lanes import Lanes
from paceline.runner.loading.blocks import read_block, shape_of_block
from paceline.runner.loading.models import ReadyModel
from paceline.sampling.sampler import Pick


class BlockDrafter(HeadDrafter):
    name = "block"

    def __init__(
        self,
        head: BlockForward,
        *,
        taps: Sequence[int],
        width: int,
        max_draft: int,
        lanes: Lanes,
        pool: PagePool,
        vocab_size: int,
        pick: Pick,
        chunk: int = 256,
        state_bytes: int = STATE_BYTES,
        min_confidence: float | None = None,
    ) -> None:
        """`width`: columns of the features, all taps together. `vocab_size`, `pick`: the target's. `chunk`: rows of one
        reading pass. `state_bytes`: memory for hidden states. A token whose confidence is below `min_confidence` is not
        drafted; None: one that does not pay for its row. A request's `p_min` replaces either."""
        if not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"min_confidence {min_confidence} must be in [0, 1]")
        sizes = {"width": width, "chunk": chunk, "state_bytes": state_bytes}
        super().__init__(HeadReading(head, name=self.name, lanes=lanes, pool=pool, **sizes))
        self.taps = taps
        self.max_draft = max_draft
        self._head = head
        self._lanes = lanes
        draws = Draws(head, lanes=lanes, vocab_size=vocab_size, pick=pick)
        thresholds = Thresholds(min_confidence, next_acceptance=DOUBTFUL_CONFIDENCE)
        self._drafting = BlockDrafting(head, lanes=lanes, draws=draws, thresholds=thresholds)

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        self._head(build_batch(self._lanes, shares), features=features)
        return self._drafting.draft([ask.within(self.max_draft) for ask in asks])


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    name, _, rest = options.partition(",")
    given = parse_options(BlockDrafter.name, rest, {"max_draft": int, "min_confidence": float})
    ready = shape_of_block(target) if name == SHAPE else read_block(head_directory(name), target)
    config = ready.head.config
    longest = given.pop("max_draft", config.longest)
    if not 1 <= longest <= config.longest:
        raise InvalidRequest(
            f"max_draft {longest} must be 1 to {config.longest}, the tokens of one block of {name:.200}"
        )

    if target.decoder is not None:
        return on_gpu(BlockDrafter.name, ready, target, {"max_draft": longest, **given})

    def build(context: BuildContext) -> Drafter:
        return BlockDrafter(
            ready.forward(
                context.target,
                num_pages=context.pool.num_pages,
                max_context=context.max_context,
                threads=context.threads,
            ),
            taps=config.taps,
            width=config.width,
            max_draft=longest,
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            pick=context.target.pick,
            chunk=context.max_step_tokens,
            **given,
        )

    return Recipe(
        name=BlockDrafter.name,
        build=build,
        how=ready.why,
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        weight_bytes=ready.own_bytes,
        one_pass=True,
        taps=config.taps,
        vocabulary=config.draft_vocab_size,
    )
