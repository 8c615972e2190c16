"""The head that comes with SmolLM2 keeps its acceptance, and loses it with the layers of another reading of its ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.drafters.shipped import SHIPPED
from paceline.llm import LLM
from paceline.types import SamplingParams, Speculation
from tests.published_heads import IDS

QUESTIONS = ["Explain how a bicycle stays upright.", "Write a Python function that reverses a list."]
OPTIONS = {"measure_cost": False, "measure_speedup": False, "max_context": 512, "kv_memory": 1 << 28, "device": "cpu"}


def acceptance(head: str) -> tuple[float, str]:
    """Accepted by drafted tokens of two answers, and how the head runs."""
    llm = LLM("smollm2", drafter=f"eagle:{head},branches=1,max_draft=3,min_confidence=0", **OPTIONS)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=48)
    stats = [llm.chat(prompt, params, speculation=Speculation(drafter="eagle")).stats for prompt in prompts]
    return sum(s.accepted for s in stats) / sum(s.drafted for s in stats), llm.parts.drafters["eagle"].how


@pytest.mark.slow
def test_the_shipped_head_keeps_its_acceptance(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "smollm2", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    found, how = acceptance("smollm2")
    assert "hidden states 2, 15, 27" in how
    assert found > 0.3
    config.write_text(json.dumps({**values, "eagle_config": {IDS: [1, 14, 26], "use_aux_hidden_state": True}}))
    assert acceptance(str(tmp_path / "head"))[0] == found
    config.write_text(json.dumps({**values, "eagle_config": None, IDS: [1, 14, 26]}))
    assert acceptance(str(tmp_path / "head"))[0] < 0.9 * found
