"""Laws 1 and 2 with real weights on a GPU: a hundred prompts, greedy and seeded, the same text whoever drafts.

PACELINE_SMOLLM2 names the model's file where the package that holds it is not installed.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

from paceline.types import OFF, SamplingParams, Speculation
from tests.tiny_models import ON_GPU

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

MODEL = os.environ.get("PACELINE_SMOLLM2", "smollm2")
FORMS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}, one a line, each beginning with a number.",
    "Repeat this sentence three times, then change one word: I like {} more than anything else.",
)
TOPICS = (
    "the sea", "volcanoes", "old clocks", "a lost dog", "trains", "honey bees", "the moon", "bread", "winter", "maps",
    "football", "the human heart", "castles", "rivers", "computers", "tea", "mountains", "music", "ants", "bridges",
    "glass", "elections", "sleep", "dinosaurs", "bicycles",
)  # fmt: skip  # a field a line would hide what belongs together
PROMPTS = [form.format(topic) for topic, form in itertools.product(TOPICS, FORMS)]
PARAMS = {
    "greedy": [SamplingParams(temperature=0, max_tokens=96) for _ in PROMPTS],
    "seeded": [SamplingParams(temperature=1, top_p=0.95, seed=i, max_tokens=96) for i in range(len(PROMPTS))],
}
ALWAYS: dict[str, Any] = {"measure_cost": False, "min_acceptance": 0.0}  # draft whether it pays or not


def answers(llm: Any, params: list[SamplingParams], speculation: Speculation) -> list[list[int]]:
    prompts = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    return [answer.tokens for answer in llm.generate(prompts, params, speculation=speculation)]


@pytest.mark.parametrize(
    ("format", "drafter"),
    [
        ("bf16", "ngram"),
        ("bf16", f"model:{MODEL},format=int4-all"),
        ("bf16", "self:fp8"),
    ],
)
def test_a_hundred_prompts(format: Any, drafter: str) -> None:
    from paceline.llm import LLM

    llm = LLM(MODEL, drafter=drafter, format=format, device="cuda", max_context=512, max_draft=6, **ALWAYS)
    assert llm.parts.bitwise
    for name, params in PARAMS.items():
        plain = answers(llm, params, OFF)
        before = llm.engine.stats.accepted
        drafted = answers(llm, params, Speculation())
        same = sum(a == b for a, b in zip(plain, drafted, strict=True))
        accepted = llm.engine.stats.accepted - before
        print(
            f"{format}, {drafter.partition(':')[0]}, {name}: {same}/100 identical, {accepted} drafted tokens accepted"
        )
        assert accepted > 0
        assert same == len(PROMPTS) == 100
