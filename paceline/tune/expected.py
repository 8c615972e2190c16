"""Figures that come with Paceline: what each kind of drafter was measured to bring, on which target and machine.

They are shown before anything is measured here. For the target and drafter that they are of they are measured; for
others they say what to expect at best. Tokens per step are counts, and hold on any machine. Sources are sections of the
documentation.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = 'docs/benchmarks.md, "Speculation against plain, same run"'
MEASURED = 'docs/drafters.md, "Measured"'
SMOLLM2 = "smollm2"
ZEN_5 = "two cores of a Zen 5"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement of one drafter."""

    drafter: str  # as --drafter takes it
    target: str
    text: str
    source: str
    machine: str = "two cores of a Zen 4"


ON_CPU = {  # kind of drafter → beside a target on a CPU
    "eagle": Figure(
        "eagle:smollm2",
        SMOLLM2,
        "2.26 times plain speed on mt_bench greedy (answers of 192 tokens that loop), 1.72 at temperature 1",
        PLAIN,
    ),
    "ngram": Figure("ngram", SMOLLM2, "1.99 times plain speed on edits of code, 1.45 on summaries", PLAIN),
    "suffix": Figure(
        "suffix",
        SMOLLM2,
        "1.02 to 1.19 times the tokens per step of ngram",
        'docs/drafters.md, "`suffix`"',
    ),
    "model": Figure(
        "model:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "1.46 times plain speed on humaneval",
        PLAIN,
    ),
    "block": Figure(
        "block",
        SMOLLM2,
        "3.28 tokens per round on mt_bench, 3.95 on humaneval",
        'docs/training.md, "A block drafter"',
        machine="answers that were replayed",
    ),
    "self": Figure("self:int4", SMOLLM2, "0.97 to 1.07 times plain speed beside int8, by the prompts", MEASURED, ZEN_5),
    "recycling": Figure("recycling", SMOLLM2, "0.89 to 1.16 times plain speed, by the prompts", MEASURED, ZEN_5),
    "lookahead": Figure("lookahead", SMOLLM2, "0.78 to 0.97 times plain speed, by the prompts", MEASURED, ZEN_5),
    "layers": Figure(
        "layers:auto",
        SMOLLM2,
        "no number of layers pays, so it drafts nothing",
        'docs/experiments.md, "Early layers of SmolLM2"',
    ),
}
ON_GPU = {  # kind of drafter → beside a target on a GPU
    "eagle": Figure(
        "eagle:smollm2",
        SMOLLM2,
        "2.04 times plain speed on mt_bench greedy for one request, 1.83 for 16",
        'docs/benchmarks.md, "On a GPU"',
        machine="an H200",
    ),
}


def figure_of(drafter: str, target: str, *, device: str) -> tuple[str, ...]:
    """Return what is known of a drafter, named as --drafter takes it, before anything is measured; () if nothing is."""
    figure = (ON_CPU if device == "cpu" else ON_GPU).get(drafter.partition(":")[0])
    if figure is None:
        return ()
    if (figure.drafter, figure.target) == (drafter, target):
        return (f"measured on {figure.machine}: {figure.text} ({figure.source})",)
    return (f"expected: {figure.target} with {figure.drafter} on {figure.machine} had {figure.text} ({figure.source})",)
