"""An answer as it comes, with the tokens that the drafter guessed right in green.

python examples/stream_in_colour.py
"""

from __future__ import annotations

from paceline import LLM, Origin, SamplingParams
from paceline.text.detokenizer import IncrementalDecoder

QUESTION = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."
GREEN, RESET = "\x1b[32m", "\x1b[0m"


def main(max_tokens: int = 64) -> None:
    llm = LLM("smollm2", drafter="ngram")
    prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
    decoder = IncrementalDecoder(llm.tokenizer, continuation=True)  # never gives half a character
    for event in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)):
        for token, origin in zip(event.tokens, event.origins, strict=True):
            text = decoder.push(token)
            print(f"{GREEN}{text}{RESET}" if text and origin is Origin.ACCEPTED else text, end="", flush=True)
        if event.stats is not None:  # on the last event
            print(f"\n{event.stats.tokens_per_step:.2f} tokens a step")


if __name__ == "__main__":
    main()
