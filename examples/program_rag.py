"""Retrieval: let the target select the passage that answers a question, then answer from it.

python examples/program_rag.py
"""

from __future__ import annotations

from paceline import LLM
from paceline.program import State, gen, program, select

PASSAGES = {
    "Paris": "Paris is the capital of France. It lies on the Seine and has about two million inhabitants.",
    "Photosynthesis": "Plants make sugar of light, water and carbon dioxide. This is called photosynthesis.",
    "Basketball": "A game of basketball has four quarters. A team has five players on the court.",
}
QUESTIONS = ["Which river flows through the capital of France?", "How many players does a basketball team have?"]


@program
def answer(s: State, question: str, max_tokens: int) -> None:
    s += "Question: Who painted the Mona Lisa?\nTopic: Painting\nQuestion: How deep is the sea?\nTopic: Ocean\n"
    s += f"Question: {question}\nTopic:" + select("topic", [f" {title}" for title in PASSAGES])
    title = s["topic"].strip()
    s += f"\nPassage: {PASSAGES[title]}\nAnswer:"
    s += gen("answer", max_tokens=max_tokens, temperature=0, stop="\n")


def main(max_tokens: int = 32) -> None:
    llm = LLM("smollm2", drafter="ngram")
    states = answer.run_batch([(question, max_tokens) for question in QUESTIONS], on=llm, seed=1)
    for question, state in zip(QUESTIONS, states, strict=True):
        print(f"{question}\nfrom{state['topic']}:{state['answer']}")


if __name__ == "__main__":
    main()
