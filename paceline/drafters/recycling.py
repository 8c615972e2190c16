"""Token recycling: draft from what the target thought likely after the same token before (Luo et al. 2024).

A table holds the likeliest tokens after each token, as of the last row that read it. Every verified row fills it, also
rows of rejected tokens: their logits are computed anyway. A draft is a tree: the successors of the last token, their
successors, and so on, the likeliest first. How likely a successor of each rank is, is counted while drafts are judged.

    last token   the ─▶ cat dog man …       table rows, the likeliest successor first
    tree         the ── cat ── sat
                     │     └── is
                     └─ dog ── is

Nothing is trained and nothing is computed. Every salt of requests has a table of its own, of which the latest used are
kept. Logits stay on a GPU, so only the host's steps fill a table: a CPU runs this drafter.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, Verified
from paceline.drafters.options import parse_options
from paceline.drafters.paying import paying, row_prices
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.errors import InvalidRequest
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel

NAME = "recycling"
MAX_DRAFT = 64  # tokens of a draft, at most
MAX_SUCCESSORS = 32
BLOCK = 256  # logits that are searched together
MAX_SALTS = 8  # tables that are kept
PRIOR_RATE, PRIOR_FALL, PRIOR_TOKENS = 0.4, 0.4, 32.0  # chance of the first rank, of each next one, and their weight
DECAY = 0.998  # weight of the past at each judged token


class Rates:
    """How often the token that came was the successor of each rank."""

    def __init__(self, ranks: int) -> None:
        self._right = [PRIOR_TOKENS * PRIOR_RATE * PRIOR_FALL**rank for rank in range(ranks)]
        self._judged = PRIOR_TOKENS

    def learn(self, rank: int | None) -> None:
        """Count a token that came, by its rank; None: it was none of the successors."""
        self._judged = DECAY * self._judged + 1
        self._right = [DECAY * right + (place == rank) for place, right in enumerate(self._right)]

    def chances(self) -> list[float]:
        return [right / self._judged for right in self._right]


class RecyclingDrafter(Drafter):
    name = NAME
    ends_drafts = True
    hears_logits = True

    def __init__(self, *, vocab_size: int, max_draft: int = 12, successors: int = 8) -> None:
        """`successors`: tokens that are kept for each token."""
        if not 1 <= max_draft <= MAX_DRAFT or not 1 <= successors <= MAX_SUCCESSORS:
            raise InvalidRequest(
                f"{NAME}: max_draft {max_draft} must be 1 to {MAX_DRAFT}, successors {successors} 1 to {MAX_SUCCESSORS}"
            )
        self.max_draft = max_draft
        self._shape = vocab_size, min(successors, vocab_size)
        self._tables: OrderedDict[str, np.ndarray] = OrderedDict()  # salt → int32 [vocab, successors], -1: unknown
        self._salts: dict[int, str] = {}  # sequence → salt
        self._rates = Rates(self._shape[1])

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        """Count the ranks of the tokens that came. The table is still as it was when they were drafted."""
        table, said = self._tables.get(self._salts.get(key, "")), tokens[-accepted - 2 :].tolist()
        for before, token in pairwise(said):
            known = [] if table is None else table[before].tolist()
            if known and known[0] >= 0:
                self._rates.learn(known.index(token) if token in known else None)

    def hear(self, verified: Sequence[Verified]) -> None:
        """Fill the table. A plain step costs time only where its token is new to the table."""
        for each in verified:
            table = self._table(each.salt)
            if each.draft.tokens or table[each.token, 0] < 0:
                table[[each.token, *each.draft.tokens]] = likeliest(each.logits, self._shape[1]).numpy()

    def stop(self, key: int) -> None:
        self._salts.pop(key, None)

    def _table(self, salt: str) -> np.ndarray:
        """Return the table of a salt, a new one if there is none, and forget the one that was not used for longest."""
        table = self._tables.pop(salt, None)
        self._tables[salt] = np.full(self._shape, -1, dtype=np.int32) if table is None else table
        if len(self._tables) > MAX_SALTS:
            self._tables.popitem(last=False)
        return self._tables[salt]

    def _draft(self, ask: Ask) -> Draft:
        self._salts[ask.key] = ask.salt
        table = self._tables.get(ask.salt)
        if table is None:
            return EMPTY
        tokens, parents, confidence = self._tree(table, int(ask.tokens[-1]), ask.max_draft)
        nodes, _ = paying(confidence, row_prices(ask), limit=ask.max_draft, floor=ask.p_min or 0.0)
        count = len(nodes)  # the likeliest nodes were added first
        return Draft(tuple(tokens[:count]), tuple(parents[:count]), passes=0, confidence=tuple(confidence[:count]))

    def _tree(self, table: np.ndarray, last: int, count: int) -> tuple[list[int], list[int], list[float]]:
        """Return the `count` likeliest nodes behind the token `last`, the likeliest first."""
        chances = [*accumulate(self._rates.chances(), min)]  # a rank never goes before a better one
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        waiting: list[
            tuple[float, int, int]
        ] = []  # (-confidence, parent, rank): the best of each parent's that are left
        successors = {-1: table[last].tolist()}

        def offer(parent: int, rank: int) -> None:
            if rank < len(chances) and successors[parent][rank] >= 0:
                above = confidence[parent] if parent >= 0 else 1.0
                heapq.heappush(waiting, (-above * chances[rank], parent, rank))

        offer(-1, 0)
        while waiting and len(tokens) < count:
            negative, parent, rank = heapq.heappop(waiting)
            tokens.append(successors[parent][rank])
            parents.append(parent)
            confidence.append(-negative)
            successors[len(tokens) - 1] = table[tokens[-1]].tolist()
            offer(len(tokens) - 1, 0)
            offer(parent, rank + 1)
        return tokens, parents, confidence


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the likeliest tokens, int64 [rows, count], by logits [rows, vocab].

    They lie in the `count` blocks with the highest best tokens: only those are sorted, which takes a fraction of the
    time of a whole row."""
    rows, vocab = logits.shape
    whole = vocab // BLOCK * BLOCK
    if whole <= count * BLOCK:
        return torch.topk(logits, count, dim=1).indices
    blocks = torch.topk(logits[:, :whole].view(rows, -1, BLOCK).amax(2), count, dim=1).indices  # [rows, count]
    inside = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).view(rows, -1)
    places = torch.cat((inside, torch.arange(whole, vocab).expand(rows, -1)), dim=1)
    return places.gather(1, torch.topk(logits.gather(1, places), count, dim=1).indices)


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    given = parse_options(NAME, options, {"max_draft": int, "successors": int})
    RecyclingDrafter(vocab_size=1, **given)  # refuses options before any weights are read

    def build(context: BuildContext) -> Drafter:
        return RecyclingDrafter(vocab_size=context.vocab_size, **given)

    return Recipe(name=NAME, build=build, how="recycles the target's likeliest tokens, computes nothing")
