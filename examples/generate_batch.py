"""Many prompts at once: the engine batches them, and each is answered as if it were alone.

python examples/generate_batch.py
"""

from __future__ import annotations

from paceline import LLM, SamplingParams

PROMPTS = [
    "The three primary colours are",
    "A short list of fruits: apple, banana,",
    "def add(a, b):",
    "Monday, Tuesday, Wednesday,",
]


def main(max_tokens: int = 24) -> None:
    llm = LLM("smollm2", drafter="ngram")
    for prompt, answer in zip(
        PROMPTS, llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=max_tokens)), strict=True
    ):
        print(f"{prompt!r} → {answer.text!r} ({answer.samples[0].finish})")


if __name__ == "__main__":
    main()
