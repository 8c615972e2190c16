"""Tree of thought: continue a plan in several ways, keep the likeliest ones, and go on from there.

python examples/program_tree.py
"""

from __future__ import annotations

from paceline import LLM
from paceline.program import State, gen, program, select

TASK = "A plan for a small herb garden on a balcony, step by step.\n"


@program
def rate(s: State) -> float:
    """Judge the text so far by how likely the target finds a good word for it."""
    s += "\nIs this a good plan? The answer is"
    s += select("verdict", [" yes", " no"])
    scores = s.scores("verdict")
    return scores[" yes"] - scores[" no"]


@program
def tree(s: State, task: str, max_tokens: int, depth: int = 2, width: int = 3, kept: int = 2) -> str:
    s += task
    best = [s]
    for level in range(1, depth + 1):
        thoughts = [fork for state in best for fork in state.fork(width)]
        for thought in thoughts:
            thought += f"{level}." + gen(f"step{level}", max_tokens=max_tokens, temperature=0.9, stop="\n") + "\n"
        trials = [thought.fork(1)[0] for thought in thoughts]  # so that the question is no part of the plan
        ratings = [rate(trial).value for trial in trials]
        ranked = sorted(zip(ratings, range(len(thoughts)), strict=True), reverse=True)
        best = [thoughts[i] for _, i in ranked[:kept]]
    return best[0].text


def main(max_tokens: int = 24) -> None:
    llm = LLM("smollm2", drafter="ngram")
    state = tree.run(TASK, max_tokens, on=llm, seed=1)
    print(state.value)
    selects = sum(call.name == "verdict" for call in state.run.calls)
    print(f"{len(state.run.calls)} calls, {selects} of them ratings")


if __name__ == "__main__":
    main()
