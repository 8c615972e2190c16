"""A drafter of your own: it guesses that a phrase you know by heart goes on.

A drafter can be wrong, slow or broken; that costs speed, never text.

    python examples/custom_drafter.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline import LLM, OFF, SamplingParams, Speculation
from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask
from paceline.drafters.registry import Recipe, register
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel

PHRASE = " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday,"


class PhraseDrafter:
    """Once two tokens of the phrase have been said, drafts the rest of it."""

    name = "phrase"
    max_draft = 16
    inline = True  # it answers at once, so it may run on the engine's thread

    def __init__(self, phrase: Sequence[int]) -> None:
        self._phrase = tuple(phrase)

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        pass  # it keeps nothing about a sequence

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._propose(tuple(ask.tokens[-2:].tolist()), ask.max_draft) for ask in asks]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        pass

    def stop(self, key: int) -> None:
        pass

    def _propose(self, last: tuple[int, ...], max_draft: int) -> Draft:
        for i in range(len(self._phrase) - 2):
            if self._phrase[i : i + 2] == last:
                return Draft(tokens=self._phrase[i + 2 :][:max_draft])
        return EMPTY


def phrase_kind(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    """`LLM(drafter="phrase")`, or `"phrase:any other phrase"`."""
    drafter = PhraseDrafter(target.tokenizer.encode(options or PHRASE, add_bos=False))
    return Recipe(name="phrase", build=lambda setting: drafter)


register("phrase", phrase_kind)


def main(max_tokens: int = 24) -> None:
    llm = LLM("smollm2", drafter="phrase")
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompt = "The days of the week are Monday, Tuesday,"
    plain, drafted = llm.generate([prompt] * 2, sampling, speculation=[OFF, Speculation(drafter="phrase")])
    print(drafted.text)
    print(f"{drafted.stats.accepted} of {drafted.stats.drafted} drafted tokens accepted")
    print(f"same text: {'yes' if drafted.text == plain.text else 'no'}")


if __name__ == "__main__":
    main()
