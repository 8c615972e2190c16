"""The head that comes with SmolLM2 keeps its acceptance, and loses it if its taps or its norms are misread."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters.shipped import SHIPPED
from paceline.llm import LLM
from paceline.types import SamplingParams, Speculation
from tests.published_heads import IDS

QUESTIONS = [
    "Explain how a bicycle stays upright.",
    "Write a Python function that reverses a list.",
    "What is the capital of France, and what is it known for?",
    "Tom has 12 apples and gives away a third of them. How many are left?",
    "Translate to German: the weather is fine today.",
    "List three uses of a paper clip.",
]
OPTIONS = {"measure_cost": False, "measure_speedup": False, "max_context": 256, "kv_memory": 1 << 27, "device": "cpu"}
# Tokens per step below which norms are misread. On the first three questions 2.50 as shipped, with norms misread 1.77
# and 1.21; with the layers one before or behind 2.26 and 2.11. These are less by 10 %, so they are compared instead.
LEAST = 2.0
NEIGHBOURS = ([1, 14, 26], [3, 16, 28])  # ids of the layers beside those that it was trained with
GAIN = 1.04  # tokens per step over those with a neighbour's layers, at least
MISREAD: dict[str, dict[str, Any]] = {  # changes to a config that has the same taps in the usual place
    "the layers backwards": {IDS: [27, 15, 2]},
    "a norm of the output": {"norm_output": True},
    "a norm before the residual": {"norm_before_residual": True},
}


def tokens_per_step(head: str) -> tuple[float, str]:
    """Tokens per step of greedy answers with chains of 4 tokens, and how the head runs."""
    words = f"eagle:{head},branches=1,max_draft=4,min_confidence=0"
    llm = LLM("smollm2", drafter=words, min_acceptance=0.0, **OPTIONS)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=40)
    stats = [llm.chat(prompt, params, speculation=Speculation(drafter="eagle")).stats for prompt in prompts]
    return sum(s.output_tokens for s in stats) / sum(s.steps for s in stats), llm.parts.drafters["eagle"].how


def changed(folder: Path, **values: Any) -> str:
    """A copy of the shipped head with other values in its config."""
    shutil.copytree(SHIPPED / "smollm2", folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), **values}))
    return str(folder)


def test_the_shipped_head_reads_its_layers_and_is_accepted(tmp_path: Path) -> None:
    found, how = tokens_per_step("smollm2")
    assert "hidden states 2, 15, 27:" in how
    assert found > LEAST
    for ids in NEIGHBOURS:
        beside = changed(tmp_path / str(ids[0]), eagle_config=None, **{IDS: ids})
        assert found > GAIN * tokens_per_step(beside)[0], f"the layers {ids} are as good"


@pytest.mark.slow
@pytest.mark.parametrize("case", MISREAD)
def test_misread_it_is_accepted_less(case: str, tmp_path: Path) -> None:
    """LEAST tells whether norms are read as they were trained: with any of these faults less is accepted."""
    head = changed(tmp_path / "head", **{"eagle_config": None, IDS: [2, 15, 27], **MISREAD[case]})
    assert tokens_per_step(head)[0] < LEAST


@pytest.mark.slow
def test_ids_of_outputs_are_the_same_layers(tmp_path: Path) -> None:
    head = changed(tmp_path / "head", eagle_config={IDS: [1, 14, 26], "use_aux_hidden_state": True})
    assert tokens_per_step(head) == tokens_per_step("smollm2")
