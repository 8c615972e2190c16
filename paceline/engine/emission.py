"""Emission: turn the new tokens of a step into an event: the tokens that are kept, their text and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache

from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.sampling.grammar_state import DEAD_END
from paceline.types import Finish, Logprob, Origin, TokenEvent, Verdict

ACCEPTED, BONUS, PLAIN = Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN  # attribute lookup on an Enum is slow
ALL_PLAIN = (PLAIN,)  # origins of a round without a draft


def keep(sequence: Sequence, tokens: Seq[int]) -> tuple[Seq[int], str]:
    """Return the tokens up to the first that ends the sequence, and their text. Sets `finish` if one ends it."""
    room, grammar, stream = sequence.max_length - len(sequence.tokens), sequence.sampler.grammar, sequence.stream
    kept, shown, finish = (tokens, room, None) if len(tokens) < room else (tokens[:room], room, Finish.LENGTH)
    if grammar is not None:
        fitting, ending = grammar.fits(kept)
        kept, finish = kept[:fitting], ending or finish
        sequence.error = DEAD_END if ending is Finish.ERROR else None
    if not sequence.stop_ids.isdisjoint(kept):
        i = next(i for i, token in enumerate(kept) if token in sequence.stop_ids)
        sequence.stopped_by = kept[i]
        kept, shown, finish = kept[: i + 1], i + sequence.request.sampling.include_stop, Finish.STOP
    text = ""
    if stream is not None:
        before = stream.tokens
        text = stream.push(kept if shown >= len(kept) else kept[:shown])
        if stream.match is not None:
            kept, finish = kept[: stream.tokens - before], Finish.STOP
            sequence.stopped_by = stream.match.stop
        if finish is not None:
            text += stream.flush()
    sequence.finish = finish
    return kept, text


@cache
def origins(accepted: int, count: int) -> tuple[Origin, ...]:
    """Return the origins of the first `count` new tokens after a draft. The last one of all is the target's own."""
    return (*(ACCEPTED,) * accepted, BONUS)[:count]


def event(work: Work, verdict: Verdict, kept: Seq[int], text: str) -> TokenEvent:
    """Make the event of a work, with the tokens `kept`."""
    sequence, drafted = work.sequence, work.drafted
    return TokenEvent(
        sequence.request.id,
        sequence.sample,
        tuple(kept),
        origins(len(verdict.path), len(kept)) if drafted else ALL_PLAIN[: len(kept)],
        (work.member or work.draft.by or work.drafter) if drafted and not work.forced else None,
        drafted,
        len(verdict.path),
        text,
        tuple(work.scores[: len(kept)]) if work.scores else (),
        prompt_scores(sequence) if sequence.counters.steps == 1 else None,
    )


def take_prompt(work: Work) -> None:
    """Take from a work what it computed of the prompt: log-probabilities, and hidden states for the pool.

    A sequence that was preempted reads its prompt again; scores that are known are left out."""
    sequence, scores = work.sequence, work.sequence.prompt_logprobs
    if sequence.scores_prompt:
        scores += [None] * (work.start + 1 - len(scores))  # the first token has none, nor have cached ones
        scores += work.prompt_scores[len(scores) - 1 - work.start :]
    if sequence.pool is not None and work.states is not None:
        sequence.pool.add(work.start + work.count - len(work.states), work.states)


def prompt_scores(sequence: Sequence) -> tuple[Logprob | None, ...] | None:
    """Return log-probabilities of the prompt so far; None if the request does not ask for them."""
    if not sequence.wants_prompt_logprobs:
        return None
    first = sequence.request.scores_from  # whether more is known depends on the cache
    return (*(None,) * min(first, len(sequence.prompt_logprobs)), *sequence.prompt_logprobs[first:])
