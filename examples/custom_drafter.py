"""A drafter of your own: it guesses that a phrase you know by heart goes on.

A drafter can be wrong, slow or broken; that costs speed, never text.

    python examples/custom_drafter.py
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline import LLM, OFF, SamplingParams, Speculation
from paceline.drafters import EMPTY, Ask, Draft, Drafter, Progress, ReadyModel, Recipe, register

PHRASE = " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday,"


class PhraseDrafter(Drafter):
    """Once two tokens of the phrase have been said, drafts the rest of it."""

    name = "phrase"

    def __init__(self, phrase: Sequence[int]) -> None:
        self._phrase = tuple(phrase)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._propose(tuple(ask.tokens[-2:].tolist()), ask.max_draft) for ask in asks]

    def _propose(self, last: tuple[int, ...], max_draft: int) -> Draft:
        for i in range(len(self._phrase) - 2):
            if self._phrase[i : i + 2] == last:
                return Draft(tokens=self._phrase[i + 2 :][:max_draft])
        return EMPTY


def phrase(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    """`LLM(drafter="phrase")`, or `"phrase:any other phrase"`."""
    drafter = PhraseDrafter(target.tokenizer.encode(options or PHRASE, add_bos=False))
    return Recipe(name=PhraseDrafter.name, build=lambda context: drafter)


register(PhraseDrafter.name, phrase, on_gpu="host")


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
