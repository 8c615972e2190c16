"""Self-consistency: ask the same question several times at once, and let the answers vote.

python examples/program_vote.py
"""

from __future__ import annotations

from collections import Counter

from paceline import LLM
from paceline.program import State, assistant, gen, program, user

QUESTION = "A farmer has 3 boxes of 4 apples and eats 2 apples. How many apples are left?"


@program
def vote(s: State, question: str, max_tokens: int, forks: int = 8) -> str:
    s += user(question)
    answers = s.fork(forks)  # they share the question's keys and values, and run in one batch
    for fork in answers:
        fork += assistant("Let us count: ", gen("thought", max_tokens=max_tokens, temperature=0.8))
        fork += "\nSo the number is " + gen("number", regex="[0-9]{1,3}", temperature=0.8)
    s.join(answers)
    return Counter(s["number"]).most_common(1)[0][0]


def main(max_tokens: int = 48) -> None:
    llm = LLM("smollm2", drafter="ngram")
    state = vote.run(QUESTION, max_tokens, on=llm, seed=1)
    print(f"{QUESTION}\nvotes: {', '.join(state['number'])}\nmost say: {state.value}")
    cached = sum(call.usage.cached_tokens for call in state.run.calls)
    print(f"{len(state.run.calls)} calls; {cached} prompt tokens came from the prefix cache")


if __name__ == "__main__":
    main()
