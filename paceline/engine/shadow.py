"""Shadow drafting: while the engine is idle, a drafter drafts again for texts that have ended, and is scored.

    text     prompt │ output ............................... │      known: nothing is verified, and no text is made
    replay          │ draft, compare, go on behind what was right, draft …

So acceptance and cost of a drafter are known before it gets a request. One round is replayed in each idle moment. A
request that comes ends the replay at once: its lane and pages are free before the request is taken.

A text with a grammar is left out: its drafts depend on the parser's state. A drafter that fails does so behind its
guard, as in a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask, Seen
from paceline.drafters.guard import Guard
from paceline.drafters.taps import columns
from paceline.engine.governor import Governor
from paceline.engine.probe import Probes
from paceline.engine.sequence import Sequence
from paceline.runner.batch import Share, build_batch
from paceline.sampling.sampler import Sampler
from paceline.types import Request

MAX_TEXTS = 16  # ended texts that are kept
MAX_OUTPUT = 96  # tokens of a text that are drafted again
MIN_OUTPUT = 4  # tokens of an output that is worth a replay


@dataclass(frozen=True, slots=True)
class Score:
    """Drafts of a drafter in the shadow."""

    texts: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of its calls

    def sums(self) -> dict[str, float]:
        names = ("texts", "rounds", "drafted", "accepted", "seconds")
        return {name: float(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class _Text:
    request: Request
    seed: int
    tokens: tuple[int, ...]


class Shadow:
    def __init__(
        self,
        probes: Probes,
        guards: Mapping[str, Guard],
        governor: Governor,
        clock: Callable[[], float],
        *,
        max_draft: int,
    ) -> None:
        self._max_draft = max_draft
        self.scores: Mapping[str, Score] = {}  # by drafter; replaced as a whole, for other threads to read
        self._probes, self._guards, self._governor, self._clock = probes, guards, governor, clock
        self._ended: deque[_Text] = deque(maxlen=MAX_TEXTS)
        self._queue: deque[tuple[str, _Text]] = deque()  # drafters, and the texts that they are to draft for
        self._watched: Seq[str] = ()
        self._most = 0  # texts for each drafter
        self._replay: Iterator[None] | None = None
        self._key = 0

    def watch(self, names: Seq[str], *, texts: int) -> None:
        """Score these drafters from now on, over so many texts each. May be called from any thread."""
        if [*names] != [*self._watched]:
            self.scores = {}
        self._watched, self._most = tuple(names), texts

    def keep(self, sequence: Sequence) -> None:
        """Remember the text of a sequence that has ended."""
        output, sampling = len(sequence.tokens) - sequence.prompt_length, sequence.request.sampling
        if output >= MIN_OUTPUT and sampling.grammar is None and sequence.request.pooling is None:
            self._ended.append(_Text(sequence.request, sequence.sampler.seed, tuple(sequence.tokens)))

    def improve(self) -> bool:
        """Replay one round. False: nothing is left to do. The engine must be idle."""
        if self._replay is None:
            self._replay = self._next()
        if self._replay is None:
            return False
        try:
            next(self._replay)
        except StopIteration:
            self._replay = None
        return True

    def leave(self) -> None:
        """End a replay, whose lane and pages are free then."""
        replay, self._replay = self._replay, None
        if replay is not None:
            replay.close()  # type: ignore[attr-defined]

    def _next(self) -> Iterator[None] | None:
        """Begin the next replay: all drafters draft for the same texts, one after the other."""
        watched = [name for name in self._watched if name in self._guards and self._guards[name].out is None]
        for text in reversed(self._ended):
            for name in watched:
                done = self.scores.get(name, Score()).texts
                if done < self._most and (name, text) not in self._queue and self._fits(name, text):
                    self._queue.append((name, text))
                    return self._rounds(name, text)
        if len(self._queue) > MAX_TEXTS * len(watched):
            self._queue.popleft()
        return None

    def _fits(self, name: str, text: _Text) -> bool:
        return len(text.tokens) + self._guards[name].max_draft + 1 <= self._probes.admission.max_context

    def _rounds(self, name: str, text: _Text) -> Iterator[None]:
        probes, guard, first = self._probes, self._guards[name], len(text.request.prompt)
        tokens, self._key = text.tokens[: first + MAX_OUTPUT], self._key - 1
        admission, sampling = probes.admission, text.request.sampling
        sampler = Sampler(sampling, seed=text.seed, vocab_size=admission.vocab_size, eos_ids=admission.eos_ids)
        sampler.see_prompt(text.request.prompt)
        with probes.seated(tokens, room=guard.max_draft + 1) as lane:
            replay = _Replay(self._key, lane, tokens, sampler, probes, guard)
            replay.begin(first + 1)
            try:
                while replay.position < len(tokens) - 1 and guard.out is None:
                    began = self._clock()
                    draft = replay.draft(self._ask(name, guard, replay))
                    self._count(name, rounds=1, seconds=self._clock() - began)
                    right = replay.advance(draft)
                    self._count(name, drafted=len(draft.tokens), accepted=right)
                    yield
                self._count(name, texts=1)
            finally:
                guard.stop(self._key)

    def _ask(self, name: str, guard: Guard, replay: _Replay) -> Ask:
        governor, left = self._governor, len(replay.tokens) - replay.position
        return Ask(
            key=replay.key,
            lane=replay.lane,
            tokens=self._probes.lanes.view(replay.lane, replay.position),
            max_draft=max(1, min(guard.max_draft, self._max_draft, left - 1)),
            sampler=replay.sampler,
            price=governor.price(name),
            row_price=governor.row_price,
            row_prices=governor.row_prices(1) if guard.ends_drafts else (),
            left=left,
            plain_speed=governor.plain_speed,
            plain_share=governor.plain_share,
        )

    def _count(self, name: str, **more: float) -> None:
        score = self.scores.get(name, Score())
        changed = {field: getattr(score, field) + value for field, value in more.items()}
        self.scores = {**self.scores, name: replace(score, **changed)}


class _Replay:
    """One text on a lane, and how far one drafter has come with it."""

    def __init__(
        self, key: int, lane: int, tokens: tuple[int, ...], sampler: Sampler, probes: Probes, guard: Guard
    ) -> None:
        self.key, self.lane, self.tokens, self.sampler = key, lane, tokens, sampler
        self.position = 0  # tokens that count as committed
        self._probes, self._guard = probes, guard
        self._fed = 0
        self._computed = 0  # tokens that the target has computed, for a drafter on its KV memory
        self._features = self._compute() if guard.taps else None

    def begin(self, position: int) -> None:
        self.sampler.advance(self.tokens[position - 1 : position])
        self._commit(position)
        self._guard.start(self.key, self.lane, self._probes.lanes.view(self.lane, position))
        self._feed()

    def draft(self, ask: Ask) -> Draft:
        [draft] = self._guard.propose([ask])
        return draft

    def advance(self, draft: Draft) -> int:
        """Go on behind what was right of a draft, and return how many tokens were."""
        right = count_right(draft, self.tokens[self.position :])
        end = min(self.position + right + 1, len(self.tokens))
        self.sampler.advance(self.tokens[self.position : end])
        self._commit(end)
        if draft.tokens and end == self.position and self._guard.out is None:
            self._guard.observe(self.key, self._probes.lanes.view(self.lane, end), right)
        self._feed()
        return right

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
