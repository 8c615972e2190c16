"""Speculation is chosen per request: the same prompt plain, with short drafts and with long ones, in one batch.

python examples/per_request.py
"""

from __future__ import annotations

from paceline import LLM, OFF, SamplingParams, Speculation

TEXT = "Write the numbers from one to twenty, in words: one, two, three, one, two, three, one, two, three,"
WAYS = {"plain": OFF, "up to 2": Speculation(max_draft=2), "up to 16": Speculation(max_draft=16)}


def main(max_tokens: int = 48) -> None:
    llm = LLM("smollm2", drafter="ngram")
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens)
    answers = llm.generate([TEXT] * len(WAYS), sampling, speculation=list(WAYS.values()))
    for way, answer in zip(WAYS, answers, strict=True):
        stats = answer.stats
        print(f"{way:<9} {stats.steps:3} steps, {stats.accepted:3} of {stats.drafted:3} drafted tokens accepted")
    same = len({answer.text for answer in answers}) == 1
    print(f"same text: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
