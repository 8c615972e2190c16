"""What the target thinks after some tokens, computed anew: the judge of two answers that differ.

A friend of the engine, for audits. It shares no page with anybody, remembers none, and runs only while nothing else
does; the prompt is read in chunks as any prompt is, and nothing is ever drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.errors import ContextTooLong
from paceline.runner.batch import Share, build_batch
from paceline.sampling import Sampler
from paceline.types import Request


@dataclass(frozen=True, slots=True)
class Probe:
    """The place after `prompt` and `output` of a request."""

    sampler: Sampler  # as if `output` had been committed
    logits: Tensor  # float32 [vocab], before any sampling parameter
    position: int  # of the token that comes here
    token: int  # which one that is


def probe(engine: Engine, request: Request, output: Seq[int]) -> Probe:
    assert not engine.has_work, "a probe needs the engine to be idle"
    sampler = engine._admission.sequences(request, now=0.0)[0].sampler
    sampler.advance(output)
    tokens = [*request.prompt, *output]
    logits = logits_after(engine, tokens)
    edited = sampler.edit(logits[None], [()])
    token = sampler.draw(edited, np.array([len(tokens)]), engine._forward.pick)
    return Probe(sampler=sampler, logits=logits, position=len(tokens), token=int(token[0]))


def logits_after(engine: Engine, tokens: Seq[int], *, chunk: int | None = None) -> Tensor:
    """float32 [vocab]. `chunk`: rows of a pass; the engine's own limit where it is not said."""
    lanes, cache, count = engine._lanes, engine._cache, len(tokens)
    if count > engine._admission.max_context:
        raise ContextTooLong(f"{count} tokens, and the context holds {engine._admission.max_context}: give fewer")
    lane = lanes.take()
    span = cache.open(np.asarray(tokens, dtype=np.int32), salt="", reuse=False)
    try:
        cache.reserve(span, count)
        lanes.tokens_np[lane, :count] = tokens
        lanes.pages_np[lane, : len(span.pages)] = span.pages
        rows = chunk or engine._scheduler._config.max_step_tokens
        for start in range(0, count, rows):
            share = Share(lane=lane, start=start, count=min(rows, count - start), outs=1)
            output = engine._forward(build_batch(lanes, [share]))
        return output.logits[0].clone()
    finally:
        cache.close(span)
        lanes.give_back(lane)
