"""A conversation: keep the messages, and let the prefix cache keep what was computed for them.

python examples/chat.py
"""

from __future__ import annotations

from paceline import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "And of Italy?"]


def main(max_tokens: int = 32) -> None:
    llm = LLM("smollm2", drafter="ngram")
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens))
        messages.append({"role": "assistant", "content": answer.text})
        reused = f"{answer.stats.cached_tokens} of {answer.stats.prompt_tokens} prompt tokens were already computed"
        print(f"{question}\n{answer.text}\n({reused})")


if __name__ == "__main__":
    main()
