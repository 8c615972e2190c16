"""A model and a drafter on paper: the engine's own scheduler, cache and governor run with them, in simulated time.

`PaperForward` computes nothing. It knows the text of every sequence, draws the next token of it, and moves the clock on
by what such a pass takes. `PaperDrafter` drafts as many right tokens as a measured round had. A sequence is found by
its seed, which is the number of its arrival; 0 is nobody's, and stands for passes that the engine makes to time them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.replay.arrivals import Arrival
from paceline.replay.drafts import Drafts, Round
from paceline.replay.step_times import PassShape, StepTimes

VOCABULARY = 1 << 20  # tokens on paper: large, so that made-up pages do not coincide
SPARE = 2  # tokens behind the end of a text, which the last rows of a draft may ask for
NOTHING = torch.zeros(0)


class PaperClock:
    """Simulated time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._owed = 0.0

    def __call__(self) -> float:
        """Return the time. What was owed passes right after this reading."""
        now, self.now, self._owed = self.now, self.now + self._owed, 0.0
        return now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def owe(self, seconds: float) -> None:
        """Let time pass after the next reading: the end of a forward pass is read before the host's work begins."""
        self._owed += seconds


@dataclass(slots=True)
class Script:
    """The text of one sequence, made up: equal names of pages give equal tokens."""

    arrival: Arrival
    tokens: list[int]
    rng: random.Random

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.arrival.request.length])


def script(arrival: Arrival, *, max_draft: int, seed: int) -> Script:
    names = (*arrival.request.pages, *arrival.answer.pages)
    wanted = arrival.total + max_draft + SPARE
    tokens = [token for name in names for token in _page(name)][:wanted]
    for page in range(-(-(wanted - len(tokens)) // PAGE_SIZE)):
        tokens += _page(f"{arrival.id}/{page}")
    return Script(arrival, tokens[:wanted], random.Random(f"{seed}/{arrival.id}"))


def _page(name: str) -> list[int]:
    data = hashlib.blake2b(name.encode(), digest_size=4 * PAGE_SIZE).digest()
    return [value % VOCABULARY for value in np.frombuffer(data, dtype=np.uint32).tolist()]


class PaperMemory:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        return

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("no keys and values are on paper")


class PaperForward:
    """Implements Forward."""

    vocab_size = VOCABULARY
    bitwise = True
    taps: Sequence[int] = ()

    def __init__(self, scripts: Mapping[int, Script], *, num_pages: int, times: StepTimes, clock: PaperClock) -> None:
        self.kv: KVMemory = PaperMemory(num_pages)
        self._scripts = scripts
        self._times = times
        self._clock = clock

    def __call__(self, batch: Batch) -> Output:
        shape, drawn = self._shape(batch), self._drawn(batch)
        self._clock.advance(self._times.pass_seconds(shape))
        self._clock.owe(self._times.host_seconds(sequences=shape.drawing, prompt_rows=shape.rows - shape.outs))
        return Output(NOTHING, NOTHING, drawn=drawn)

    def embed(self, tokens: Tensor) -> Tensor:
        raise AssertionError("no embeddings are on paper")

    def project(self, states: Tensor) -> Tensor:
        raise AssertionError("no logits are on paper")

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        raise AssertionError("tokens on paper are drawn by the pass")

    def _shape(self, batch: Batch) -> PassShape:
        positions, starts = batch.positions.numpy(), batch.row_starts.numpy()
        drawing = len(np.unique(self._owners(batch)))
        rows, outs = len(positions), len(batch.logit_rows)
        return PassShape(
            rows=rows,
            outs=outs,
            read=int(positions[starts[1:] - 1].sum()) + len(starts) - 1,
            attended=int(positions.sum()) + rows,
            drawing=drawing,
            drafted=outs > drawing,
        )

    def _drawn(self, batch: Batch) -> list[int]:
        assert batch.seeds is not None, "a pass on paper finds texts by their seeds"
        seeds = batch.seeds.numpy()[self._owners(batch)].tolist()
        places = batch.positions.numpy()[batch.logit_rows.numpy()].tolist()
        return [self._scripts[seed].tokens[at + 1] if seed else 0 for seed, at in zip(seeds, places, strict=True)]

    def _owners(self, batch: Batch) -> np.ndarray:
        """Return the sequence of each row with logits."""
        owners: np.ndarray = np.searchsorted(batch.row_starts.numpy(), batch.logit_rows.numpy(), side="right") - 1
        return owners


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """Traits, known to the governor, of the drafter that a `PaperDrafter` stands for."""

    name: str
    max_draft: int
    ends_drafts: bool
    weighs_cost: bool


class PaperDrafter(Drafter):
    def __init__(
        self, traits: DrafterTraits, scripts: Mapping[int, Script], drafts: Drafts, times: StepTimes, clock: PaperClock
    ) -> None:
        self.name, self.max_draft = traits.name, traits.max_draft
        self.ends_drafts, self.weighs_cost = traits.ends_drafts, traits.weighs_cost
        self._scripts = scripts
        self._drafts = drafts
        self._times = times
        self._clock = clock
        self._unread: set[int] = set()  # sequences that it was not asked about yet

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._unread.add(key)

    def stop(self, key: int) -> None:
        self._unread.discard(key)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        mine = [self._scripts[ask.sampler.seed] for ask in asks]
        rounds = [
            self._drafts.draw(each.arrival, batch=len(asks), limit=ask.max_draft, rng=each.rng)
            for each, ask in zip(mine, asks, strict=True)
        ]
        fresh = sum(len(ask.tokens) for ask in asks if ask.key in self._unread)
        self._unread.difference_update(ask.key for ask in asks)
        passes = sum(found.passes for found in rounds)
        self._clock.advance(self._times.draft_seconds(asks=len(asks), passes=passes, fresh=fresh))
        return [
            _draft(found, each.tokens[len(ask.tokens) :]) for found, each, ask in zip(rounds, mine, asks, strict=True)
        ]


def _draft(found: Round, ahead: Sequence[int]) -> Draft:
    """Make a draft whose first `found.accepted` tokens are right: a chain, and wrong siblings of its first token."""
    if not found.tokens:
        return EMPTY
    chain = [*ahead[: found.accepted], *(_other(token, 1) for token in ahead[found.accepted : found.depth])]
    beside = [_other(ahead[0], 2 + i) for i in range(found.tokens - found.depth)]
    parents = (*range(-1, found.depth - 1), *[-1] * len(beside)) if beside else ()
    return Draft(tokens=(*chain, *beside), parents=parents, passes=found.passes)


def _other(token: int, offset: int) -> int:
    return (token + offset) % VOCABULARY
