"""Lookup drafters over recorded answers: the drafts that they would have made, without a pass of any model.

The drafter is told of sequences, asked and told what was accepted in the order of an engine's calls, with the asks that
`fixed_draft` gives it. So it drafts what it would have drafted, past answers and trust included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from paceline.accept.coupled import accept_coupled
from paceline.draft import Draft
from paceline.drafters.base import Ask, Ended
from paceline.drafters.guard import Guard
from paceline.sampling.sampler import Sampler
from paceline.tune.traces import Recorded, Round

END = -1  # stands for the token after the end of an answer: nothing drafts it
_keys = count(-1, -1)  # names of replayed sequences; an engine's are not negative


@dataclass(slots=True)
class _Text:
    """A recorded answer, read up to some token."""

    of: Recorded
    sampler: Sampler
    tokens: np.ndarray  # int32: prompt and answer
    read: int  # tokens that count as committed
    key: int = field(default_factory=lambda: next(_keys))
    rounds: list[Round] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.read >= len(self.tokens)

    @property
    def committed(self) -> np.ndarray:
        return self.tokens[: self.read]

    @property
    def useful(self) -> int:
        """Tokens that a draft may have."""
        return self.of.useful(self.read - len(self.of.prompt))


class _Drawn:
    """Implements DrawnTokens: the tokens of the text, one after the other."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = iter(tokens)

    def __getitem__(self, row: int) -> int:
        return next(self._left, END)


def replay_lookup(
    guard: Guard, answers: Sequence[Recorded], samplers: Sequence[Sampler], *, draft: int, batch: int, salt: str
) -> list[list[Round]]:
    """Return the rounds of each answer, with drafts of at most `draft` tokens, `batch` answers at once.

    `salt`: nobody else's, or the drafter would find answers of another replay."""
    found: list[list[Round]] = []
    limit = min(draft, guard.max_draft)
    for start in range(0, len(answers), batch):
        pairs = zip(answers[start : start + batch], samplers[start : start + batch], strict=True)
        texts = [_opened(guard, answer, sampler) for answer, sampler in pairs]
        going = [text for text in texts if not _close(guard, text, salt)]
        while going:
            _step(guard, going, limit, salt)
            going = [text for text in going if not _close(guard, text, salt)]
        found += [text.rounds for text in texts]
    return found


def _opened(guard: Guard, answer: Recorded, sampler: Sampler) -> _Text:
    tokens = np.asarray((*answer.prompt, *answer.answer), dtype=np.int32)
    tokens.flags.writeable = False
    text = _Text(answer, sampler, tokens, read=len(answer.prompt))
    guard.start(text.key, 0, text.committed)
    text.read = min(text.read + 1, len(tokens))  # the first token comes with the prompt
    return text


def _close(guard: Guard, text: _Text, salt: str) -> bool:
    if text.ended:
        guard.learn(Ended(text.tokens, len(text.of.prompt), salt))
        guard.stop(text.key)
    return text.ended


def _step(guard: Guard, texts: Sequence[_Text], limit: int, salt: str) -> None:
    asking = [text for text in texts if text.useful > 0]
    asks = [
        Ask(
            key=text.key,
            lane=0,
            tokens=text.committed,
            max_draft=min(limit, text.useful),
            sampler=text.sampler,
            left=text.useful + 1,
            salt=salt,
        )
        for text in asking
    ]
    drafts = dict(zip([text.key for text in asking], guard.propose(asks) if asks else (), strict=True))
    for text in texts:
        _advance(guard, text, drafts.get(text.key, Draft()))


def _advance(guard: Guard, text: _Text, draft: Draft) -> None:
    """Commit what the recorded answer has of a draft, and the token after it."""
    verdict = accept_coupled(draft, _Drawn(text.tokens[text.read :].tolist()))
    new = min(len(verdict.path) + 1, len(text.tokens) - text.read)
    text.read += new
    text.rounds.append(Round(new, len(draft.tokens)))
    if draft.tokens and not text.ended:
        guard.observe(text.key, text.committed, new - 1)
