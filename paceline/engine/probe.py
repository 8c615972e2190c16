"""Probes: recompute the target's logits after given tokens, to compare two answers that differ.

For audits and measurements. A probe shares no page with a sequence or another probe, and runs only while the engine
is idle. It reads the prompt in chunks, as the engine reads any prompt, and never drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.engine.admission import Admission
from paceline.errors import ContextTooLong
from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.kv.cache import KVCache
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Sampler
from paceline.types import Request


@dataclass(frozen=True, slots=True)
class Probe:
    """The place after `prompt` and `output` of a request."""

    sampler: Sampler  # as if `output` had been committed
    logits: Tensor  # float32 [vocab], before any sampling parameter
    position: int  # position of the token that comes next
    token: int  # token that the target draws at this position


@dataclass(frozen=True, slots=True)
class Probes:
    """Make probes with the parts of an idle engine."""

    forward: Forward
    lanes: Lanes
    cache: KVCache
    admission: Admission
    max_step_tokens: int

    def at(self, request: Request, output: Seq[int]) -> Probe:
        self.admission.check(request)
        sampler = self.admission.sequences(request, now=0.0)[0].sampler
        sampler.advance(output)
        tokens = [*request.prompt, *output]
        logits = self.logits_after(tokens)
        edited = sampler.edit(logits[None], [()])
        token = sampler.draw(edited, np.array([len(tokens)]), self.forward.pick)
        return Probe(sampler=sampler, logits=logits, position=len(tokens), token=int(token[0]))

    def logits_after(self, tokens: Seq[int], *, chunk: int | None = None) -> Tensor:
        """Logits float32 [vocab] after the tokens. `chunk`: rows of a pass; None: the engine's own limit."""
        with self.seated(tokens) as lane:
            return self.read(lane, len(tokens), chunk=chunk)

    def read(self, lane: int, count: int, *, chunk: int | None = None) -> Tensor:
        """Compute the first `count` tokens of a lane from `seated`; return logits float32 [vocab] after the last."""
        rows = chunk or self.max_step_tokens
        for start in range(0, count, rows):
            share = Share(lane=lane, start=start, count=min(rows, count - start), outs=1)
            output = self.forward(build_batch(self.lanes, [share]))
        return output.logits[0].clone()

    def touch(self, tokens: int) -> None:
        """Write to the memory of the first `tokens` keys and values, which stay as they are: no later step waits for
        the system to provide it."""
        kv = self.forward.kv
        slots = [page * PAGE_SIZE for page in range(min(-(-tokens // PAGE_SIZE), kv.num_pages))]
        kv.move(slots, slots)

    @contextmanager
    def seated(self, tokens: Seq[int], *, room: int = 0) -> Iterator[int]:
        """Yield a lane with these tokens, not computed yet, and with pages for them and `room` more."""
        with self.seated_together([tokens], room=room) as [lane]:
            yield lane

    @contextmanager
    def seated_together(self, texts: Seq[Seq[int]], *, room: int) -> Iterator[list[int]]:
        """Yield a lane for each text, as `seated` does."""
        assert self.lanes.free == len(self.lanes.lengths), "a probe needs the engine to be idle"
        with ExitStack() as stack:
            yield [stack.enter_context(self._seat(tokens, room)) for tokens in texts]

    @contextmanager
    def _seat(self, tokens: Seq[int], room: int) -> Iterator[int]:
        lanes, cache, count = self.lanes, self.cache, len(tokens)
        if count + room > self.admission.max_context:
            raise ContextTooLong(
                f"{count + room} tokens, and the context holds {self.admission.max_context}: give fewer"
            )
        lane = lanes.take()
        span = cache.open(np.asarray(tokens, dtype=np.int32), salt="", reuse=0)
        try:
            cache.reserve(span, count + room)
            lanes.tokens_np[lane, :count] = tokens
            lanes.pages_np[lane, : len(span.pages)] = span.pages
            yield lane
        finally:
            cache.close(span)
            lanes.give_back(lane)
