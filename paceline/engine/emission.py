"""Emission: turn the new tokens of a step into an event: the tokens that are kept, their text and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.kernels.base import Output
from paceline.sampling.grammar import DEAD_END
from paceline.sampling.sampler import logprobs_of
from paceline.types import Finish, Logprob, Origin, TokenEvent, Verdict

ACCEPTED, BONUS, PLAIN = Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN  # attribute lookup on an Enum is slow


def keep(sequence: Sequence, tokens: Seq[int]) -> tuple[list[int], str]:
    """Return the tokens up to the first that ends the sequence, and their text. Sets `finish` if one ends it."""
    room = sequence.max_length - len(sequence.tokens)
    kept, shown, finish = list(tokens[:room]), room, Finish.LENGTH if len(tokens) >= room else None
    if sequence.sampler.grammar is not None:
        fitting, ending = sequence.sampler.grammar.fits(kept)
        kept, finish = kept[:fitting], ending or finish
        sequence.error = DEAD_END if ending is Finish.ERROR else None
    if not sequence.stop_ids.isdisjoint(kept):
        i = next(i for i, token in enumerate(kept) if token in sequence.stop_ids)
        sequence.stopped_by = kept[i]
        kept, shown, finish = kept[: i + 1], i + sequence.request.sampling.include_stop, Finish.STOP
    text = ""
    if sequence.stream is not None:
        before = sequence.stream.tokens
        text = sequence.stream.push(kept[:shown])
        if sequence.stream.match is not None:
            kept, finish = kept[: sequence.stream.tokens - before], Finish.STOP
            sequence.stopped_by = sequence.stream.match.stop
        if finish is not None:
            text += sequence.stream.flush()
    sequence.finish = finish
    return kept, text


def origins(work: Work, verdict: Verdict, count: int) -> tuple[Origin, ...]:
    """Return the origins of the first `count` new tokens. The last token of a verdict is always the target's own."""
    own = BONUS if work.draft.tokens else PLAIN
    return (*[ACCEPTED] * len(verdict.path), own)[:count]


def event(work: Work, verdict: Verdict, kept: list[int], text: str, logprobs: tuple[Logprob, ...]) -> TokenEvent:
    """Make the event of a work, with the tokens `kept`."""
    sequence, drafted = work.sequence, len(work.draft.tokens)
    return TokenEvent(
        request_id=sequence.request.id,
        sample=sequence.sample,
        tokens=tuple(kept),
        origins=origins(work, verdict, len(kept)),
        drafter=work.drafter if drafted and not work.forced else None,
        drafted=drafted,
        accepted=len(verdict.path),
        text=text,
        logprobs=logprobs,
        prompt_logprobs=prompt_scores(sequence) if sequence.counters.steps == 1 else None,
    )


def score(work: Work, verdict: Verdict, tokens: list[int], output: Output) -> tuple[Logprob, ...]:
    """Return log-probabilities of the new tokens; empty if the request asks for none."""
    top = work.sequence.request.sampling.logprobs
    if top is None:
        return ()
    rows = [work.root, *(work.root + 1 + node for node in verdict.path)]
    return tuple(logprobs_of(output.logits[rows[: len(tokens)]], tokens, top))


def score_prompt(work: Work, output: Output) -> None:
    """Append log-probabilities of prompt tokens. The row at position i - 1 scores token i; the first token has none."""
    sequence, scores = work.sequence, work.sequence.prompt_logprobs
    if not scores:
        scores.append(None)
    first, last = len(scores), min(work.start + work.count, sequence.prompt_length - 1)
    if first <= last:
        rows = slice(work.first_out + first - 1 - work.start, work.first_out + last - work.start)
        top = sequence.request.sampling.prompt_logprobs or 0
        scores += logprobs_of(output.logits[rows], sequence.tokens[first : last + 1], top)


def pool_prompt(work: Work, output: Output) -> None:
    """Add the hidden states of this step's rows to the pool of the sequence."""
    assert work.sequence.pool is not None, "a sequence without pooling"
    assert output.states is not None, "a pass without states for a sequence with pooling"
    work.sequence.pool.add(work.start, output.states[work.first_row : work.first_row + work.count])


def prompt_scores(sequence: Sequence) -> tuple[Logprob | None, ...] | None:
    """Return log-probabilities of the prompt so far; None if the request does not ask for them."""
    return tuple(sequence.prompt_logprobs) if sequence.wants_prompt_logprobs else None
