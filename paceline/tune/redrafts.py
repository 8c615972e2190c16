"""Heads and models over recorded answers: one longest draft behind every token, from which all shorter ones follow.

    answer   a  b  c  d  e …
    drafts   └─ b  c  x              behind a: two tokens are right
                └─ c  d  e           behind b, whatever became of the draft before

Under the coupled rule the text does not depend on drafts, and the right part of a draft not on its length. So a chain
of k tokens is the beginning of the longest one. A tree of k nodes has the k most confident nodes of the largest one:
exactly, where the drafter grows trees by confidence, which the compiled ones do up to ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.guard import Guard
from paceline.engine.probe import Probes
from paceline.engine.redraft import Redraft, count_right
from paceline.errors import PacelineError
from paceline.sampling.sampler import Sampler
from paceline.tune.traces import Recorded, Round

_keys = count(-1, -1)  # names of texts; an engine's sequences have none below 0


class Scored(NamedTuple):
    """The drafts of each length behind one token."""

    right: tuple[int, ...]  # tokens that are right, by length
    drafted: tuple[int, ...]


def redraft(
    guard: Guard,
    probes: Probes,
    answers: Sequence[Recorded],
    samplers: Sequence[Sampler],
    *,
    lengths: Sequence[int],
    at_once: int,
) -> Iterator[list[list[Round]]]:
    """Yield the rounds of each answer, by length, after every `at_once` answers."""
    for start in range(0, len(answers), at_once):
        some = answers[start : start + at_once]
        found = _scored(guard, probes, some, samplers[start : start + at_once], lengths)
        for scored, answer in zip(found, some, strict=True):
            yield [walked(scored, answer, place) for place in range(len(lengths))]


def _scored(
    guard: Guard, probes: Probes, answers: Sequence[Recorded], samplers: Sequence[Sampler], lengths: Sequence[int]
) -> list[list[Scored]]:
    """Draft behind every token of these answers but the last one."""
    texts = [(*answer.prompt, *answer.answer) for answer in answers]
    room = min(max(lengths) + 1, probes.admission.max_context - max(map(len, texts)))
    found: list[list[Scored]] = [[] for _ in answers]
    with probes.seated_together(texts, room=room) as lanes:
        drafts = [
            Redraft(next(_keys), lane, tokens, sampler, probes, guard)
            for lane, tokens, sampler in zip(lanes, texts, samplers, strict=True)
        ]
        for text, answer in zip(drafts, answers, strict=True):
            text.begin(len(answer.prompt) + 1)
        going = [*zip(drafts, answers, found, strict=True)]
        while going := [each for each in going if each[0].position < len(each[0].tokens)]:
            _step(guard, going, lengths)
        for text in drafts:
            guard.stop(text.key)
    return found


def _step(guard: Guard, going: Sequence[tuple[Redraft, Recorded, list[Scored]]], lengths: Sequence[int]) -> None:
    """Draft once for each text, and go one token on."""
    asks = [ask for text, answer, _ in going if (ask := _ask(text, answer, max(lengths))) is not None]
    drafts = dict(zip([ask.key for ask in asks], guard.propose(asks) if asks else (), strict=True))
    if guard.out is not None:
        raise PacelineError(guard.out)
    for text, _, found in going:
        said, draft = text.tokens[text.position :], drafts.get(text.key, Draft())
        cut = [most_confident(draft, length) for length in lengths]
        found.append(Scored(tuple(count_right(each, said) for each in cut), tuple(map(len, cut))))
        text.advance(1)


def _ask(text: Redraft, answer: Recorded, longest: int) -> Ask | None:
    useful = answer.useful(text.position - len(answer.prompt))
    if useful < 1:
        return None
    return Ask(text.key, text.lane, text.committed, min(longest, useful), sampler=text.sampler, left=useful + 1)


def most_confident(draft: Draft, most: int) -> Draft:
    """Return the draft of at most `most` tokens that a drafter would have made in place of this one."""
    if len(draft) <= most:
        return draft
    if draft.is_chain:
        return Draft(draft.tokens[:most])
    sure = draft.confidence or range(len(draft), 0, -1)  # a parent comes first, and is as confident as its children
    kept = sorted(sorted(range(len(draft)), key=lambda node: -sure[node])[:most])
    places = {-1: -1, **{node: place for place, node in enumerate(kept)}}
    return Draft(tuple(draft.tokens[i] for i in kept), tuple(places[draft.parents[i]] for i in kept))


def walked(scored: Sequence[Scored], answer: Recorded, length: int) -> list[Round]:
    """Return the rounds of an answer with drafts of the length at this place."""
    rounds, place = [], 0
    while place < len(answer.answer) - 1:
        new = min(scored[place].right[length] + 1, len(answer.answer) - 1 - place)
        rounds.append(Round(new, scored[place].drafted[length]))
        place += new
    return rounds
