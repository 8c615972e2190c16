"""An EAGLE head that drafts: a few layers over the target's own hidden states, one pass for each level of a draft.

It keeps its keys and values under the target's page ids. `drafters.eagle.reading` feeds and reads hidden states,
`drafters.eagle.drafting` drafts from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.eagle.drafting import DOUBTFUL_CONFIDENCE, ChainDrafting, Draws, ParallelDrafting
from paceline.drafters.eagle.head_drafter import STATE_BYTES, HeadDrafter
from paceline.drafters.eagle.on_device import on_gpu
from paceline.drafters.eagle.reading import HeadReading
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.shipped import head_options
from paceline.drafters.tree_drafting import Thresholds, TreeDrafting, is_simple
from paceline.errors import InvalidRequest
from paceline.kernels.base import Batch
from paceline.kernels.cpu.abi import WIDTH_MAX
from paceline.kv.pages import PagePool
from paceline.models.weights import Progress
from paceline.runner.batch import Share, build_batch
from paceline.runner.heads.protocol import HeadForward, TreeHead
from paceline.runner.lanes import Lanes
from paceline.runner.loading.heads import ReadyHead, read_eagle, shape_of_eagle
from paceline.runner.loading.models import ReadyModel
from paceline.sampling.sampler import Pick

SHAPE, SHAPE_VOCAB = "shape", 32_000  # options of a head with random weights, and its draft vocabulary


class EagleDrafter(HeadDrafter):
    name = "eagle"

    def __init__(
        self,
        head: HeadForward,
        *,
        name: str = name,
        taps: Sequence[int],
        width: int,
        lanes: Lanes,
        pool: PagePool,
        vocab_size: int,
        pick: Pick,
        chunk: int = 256,
        state_bytes: int = STATE_BYTES,
        max_draft: int = 7,
        branches: int = 4,
        min_confidence: float | None = None,
    ) -> None:
        """`name`: the kind of head. `width`: columns of the features, all taps together. `vocab_size`, `pick`: the
        target's. `chunk`: rows of one reading pass. `state_bytes`: memory for hidden states; more is used if a step
        needs it. `branches`: most children of a node in a tree. Tokens below `min_confidence` are not drafted; None:
        tokens that do not pay are not drafted. A request's `p_min` replaces either."""
        if max_draft < 1 or not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        if not 1 <= branches <= WIDTH_MAX:
            raise InvalidRequest(f"branches {branches} must be 1, for chains, to {WIDTH_MAX}")
        sizes = {"width": width, "chunk": chunk, "state_bytes": state_bytes}
        super().__init__(HeadReading(head, name=name, lanes=lanes, pool=pool, **sizes))
        self.name = name
        self.taps = taps
        self.max_draft = max_draft
        thresholds = Thresholds(min_confidence, next_acceptance=DOUBTFUL_CONFIDENCE)
        draws = Draws(head, lanes=lanes, vocab_size=vocab_size, pick=pick)
        self._chains: ChainDrafting | ParallelDrafting
        self._chains = ChainDrafting(head, lanes=lanes, thresholds=thresholds, draws=draws)
        self._trees = None
        if head.mask is not None:
            self._chains = ParallelDrafting(head, head.mask, lanes=lanes, thresholds=thresholds, draws=draws)
        elif isinstance(head, TreeHead):
            make_batch = partial(_first_batch, lanes)
            self._trees = TreeDrafting(head, make_batch, thresholds=thresholds, branches=branches)

    def draft(self, asks: Sequence[Ask], shares: Sequence[Share], features: Tensor) -> list[Draft]:
        by: TreeDrafting | ChainDrafting | ParallelDrafting
        by = self._trees if self._trees is not None and all(map(is_simple, asks)) else self._chains
        return by.draft(asks, shares, features)


def _first_batch(lanes: Lanes, shares: Sequence[Share], beyond: int) -> Batch:
    return build_batch(lanes, shares, ahead=1, beyond=beyond)


def _check_options(ready: ReadyHead, target: ReadyModel, given: Mapping[str, Any]) -> None:
    """Refuse options that the head cannot follow."""
    config = ready.head.config
    if config.mask_token is not None and given.get("branches", 1) != 1:
        raise InvalidRequest(
            f"branches {given['branches']}: a P-EAGLE head drafts chains, so it must be 1; leave it out"
        )
    if given.get("branches", 1) > 1 and target.decoder is None and not ready.compiled:
        raise InvalidRequest(
            f"branches {given['branches']}: beside {target.name} the head runs in torch, and its drafts have branches "
            "only where it is compiled, or on a GPU; leave it out, or give 1 for chains"
        )
    if given.get("max_draft", 1) > config.decoder.max_context:
        raise InvalidRequest(
            f"max_draft {given['max_draft']}: a draft must fit the head's max_position_embeddings of "
            f"{config.decoder.max_context}"
        )


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    name, _, rest = options.partition(",")
    if name == SHAPE:
        ready = shape_of_eagle(target, draft_vocab=SHAPE_VOCAB)
        given = parse_options(EagleDrafter.name, rest, {"max_draft": int, "min_confidence": float})
    else:
        directory, format, given = head_options(EagleDrafter.name, options, {"branches": int})
        ready = read_eagle(directory, target, format=format)
    return recipe_of(EagleDrafter.name, ready, target, given)


def recipe_of(name: str, ready: ReadyHead, target: ReadyModel, given: Mapping[str, Any]) -> Recipe:
    """Make the recipe of a head. `name`: the kind of drafter. `given`: options that the user has set."""
    config = ready.head.config
    _check_options(ready, target, given)
    if target.decoder is not None:
        return on_gpu(name, ready, target, given)

    def build(context: BuildContext) -> Drafter:
        head = ready.forward(
            context.target,
            num_pages=context.pool.num_pages,
            max_context=context.max_context,
            threads=context.threads,
            prefetch=not context.hot,
        )
        return EagleDrafter(
            head,
            name=name,
            taps=config.taps,
            width=config.width,
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            pick=context.target.pick,
            chunk=context.max_step_tokens,
            **given,
        )

    return Recipe(
        name=name,
        build=build,
        how=ready.why,
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        weight_bytes=ready.own_bytes,
        one_pass=config.mask_token is not None,
        taps=config.taps,
        vocabulary=config.draft_vocab_size,
    )
