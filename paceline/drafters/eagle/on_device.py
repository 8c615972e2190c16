"""An EAGLE head that drafts inside rounds on a device: one pass a token or a level of a tree, no host in between.

The first pass reads the hidden states that rounds hold, further ones the head's own output. All seats of a round run
every pass; a draft that has become doubtful gets no more tokens, so that verification does not pay for it. A tree has a
node for each token that is worth its row. Few sequences get trees, more of them chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.drafters.base import Drafter
from paceline.drafters.eagle.drafting import DOUBTFUL_CONFIDENCE
from paceline.drafters.recipe import Recipe
from paceline.errors import InvalidRequest
from paceline.kernels.base import Forward
from paceline.runner.heads.protocol import Head
from paceline.runner.loading.heads import ReadyHead
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel
from paceline.runner.rounds.protocol import DeviceDrafter, DraftingRound, Seat
from paceline.runner.rounds.traits import held_beside_copies

MAX_DRAFT = 5  # tokens of a chain
MAX_NODES = 8  # tokens of a tree
MAX_BRANCHES = 4  # children of a node
BRANCHES = 3  # children of a node, unless the user says otherwise
# Sequences of a round up to which drafts are trees, unless the user says otherwise: a power of two, as the seats of
# rounds with sampling parameters. SmolLM2's tokens per second with trees, by those with chains, on an H200: 1.05 for
# one sequence, 1.08 for two, 0.90 for four, 0.71 for eight and 0.81 for sixteen.
TREE_SEATS = 2
MAX_LEVELS = 6  # passes of the head for a tree


class EagleOnDevice:
    """Implements DeviceDrafter."""

    finds_fewer = True
    ends_drafts = True
    reader = None

    def __init__(
        self,
        head: Head,
        *,
        taps: Sequence[int],
        max_draft: int | None = None,
        min_confidence: float | None = None,
        branches: int = 1,
    ) -> None:
        """Drafts end below `min_confidence`; None: if one more token does not pay. A request's `p_min` replaces
        either. With several `branches` drafts are trees, of nodes with as many children."""
        max_draft = _longest(branches) if max_draft is None else max_draft
        assert branches == 1 or head.mask is None, "a P-EAGLE head drafts chains"
        if not 1 <= branches <= MAX_BRANCHES:
            raise InvalidRequest(f"branches {branches} must be between 1 and {MAX_BRANCHES}")
        if max_draft < 1 or not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        self.head = head
        self.taps = taps
        self.max_draft = max_draft
        self.tree = branches > 1
        self._branches = branches
        self._min_confidence = min_confidence

    def threshold(self, seat: Seat) -> float:
        return least_confidence(seat, self._min_confidence, tree=self.tree)

    def draft(self, round: DraftingRound) -> None:
        if self.tree:
            self._draft_trees(round)
            return
        for turn in range(round.longest):
            round.append(round.guess(self.head, turn), turn, ids=self.head.ids, doubting=True)

    def levels(self, count: int) -> int:
        """Return the levels of a draft of at most `count` tokens."""
        return min(MAX_LEVELS, 1 + (count + 1) // self._branches) if self.tree else count

    def _draft_trees(self, round: DraftingRound) -> None:
        levels = self.levels(round.longest)
        round.plant(width=self._branches, levels=levels)
        for level in range(levels):
            round.branch(round.guess(self.head, level), level, ids=self.head.ids)
        round.prune()


class EagleBySeats:
    """Implements DeviceDrafter with one head that drafts trees for few sequences, and chains for more.

    Rows of a tree that turn out wrong are nearly free where few are verified, and cost time where many are."""

    finds_fewer = True
    ends_drafts = True
    reader = None

    def __init__(self, chains: EagleOnDevice, trees: EagleOnDevice) -> None:
        self.head, self.taps = chains.head, chains.taps
        self.max_draft = max(chains.max_draft, trees.max_draft)
        self._chains = chains
        self._trees = trees

    def sized(self, seats: int, most: int) -> EagleOnDevice:
        """Return the drafter of rounds with so many seats. Trees of fewer nodes than they may have are no better than
        chains."""
        return self._trees if seats <= TREE_SEATS and most >= self._trees.max_draft else self._chains

    def levels(self, count: int) -> int:
        """Return the levels of the deepest draft of at most `count` tokens."""
        return max(min(count, self._chains.max_draft), self._trees.levels(count))

    def draft(self, round: DraftingRound) -> None:
        self.sized(len(round.lanes), round.longest).draft(round)


def drafter_of_head(head: Head, taps: Sequence[int], options: Mapping[str, Any]) -> EagleOnDevice | EagleBySeats:
    """Make the drafter of a head. Its drafts depend on the number of sequences, unless the user has chosen them."""
    if "branches" in options or "max_draft" in options or head.mask is not None:
        return EagleOnDevice(head, taps=taps, **options)
    trees = EagleOnDevice(head, taps=taps, branches=BRANCHES, **options)
    return EagleBySeats(EagleOnDevice(head, taps=taps, **options), trees)


def least_confidence(seat: Seat, given: float | None, *, tree: bool = False) -> float:
    """Return the confidence below which a draft ends: of the request, else the one `given` for the drafter, else that
    at which one more token does not pay."""
    given = given if seat.p_min is None else seat.p_min
    if given is not None:
        return given
    return seat.price if tree else seat.price / DOUBTFUL_CONFIDENCE


def _longest(branches: int) -> int:
    """Return the tokens of the longest draft, unless the user says otherwise."""
    return MAX_NODES if branches > 1 else MAX_DRAFT


def on_gpu(name: str, ready: ReadyHead, target: ReadyModel, options: Mapping[str, Any]) -> Recipe:
    """Make the recipe of a head beside a target on a GPU, where only rounds run it. `name`: the kind of drafter."""
    config, decoder = ready.head.config, target.decoder
    assert decoder is not None, "the target runs on a CPU"
    given = {key: value for key, value in options.items() if key in ("max_draft", "min_confidence", "branches")}
    head = ready.on_cuda(decoder, max_context=target.model.config.max_context)
    states = held_beside_copies(drafter_of_head(head, config.taps, given), given.get("max_draft", MAX_NODES))

    def on_device(built: Drafter | None, to: Forward) -> DeviceDrafter:
        head.new_kv(to.kv.num_pages)
        return drafter_of_head(head, config.taps, given)

    def profile(rows: int, outs: int) -> None:
        with memory_for(f"a pass of {rows} tokens of the head", "lower max_step_tokens or max_sequences"):
            head.profile(rows, outs)

    return Recipe(
        name=name,
        build=lambda context: None,
        how=ready.why,
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        weight_bytes=ready.own_bytes,
        lane_bytes=states * config.width * head.dtype.itemsize,
        vocabulary=config.draft_vocab_size,
        on_device=on_device,
        profile=profile,
    )
