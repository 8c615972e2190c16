"""The prompts that the playground offers, answered by the embedded model at its default sampling."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from paceline.llm import LLM
from paceline.types import Finish, Speculation
from tests.server.node import MODULES

SEED = int(re.search(r'^const SEED = "(\d+)";', MODULES["race.js"], flags=re.MULTILINE)[1])  # type: ignore[index]


def race_prompt() -> str:
    """The prompt of the race, from the module that has it."""
    text = MODULES["examples.js"]
    pieces = dict(re.findall(r"^const (\w+) = `(.*?)(?<!\\)`;", text, flags=re.DOTALL | re.MULTILINE))
    return pieces["EDIT"].replace("\\`", "`").replace("${ACCOUNT}", pieces["ACCOUNT"])


@pytest.mark.slow
def test_the_race_is_over_before_its_answer_repeats_itself() -> None:
    """Plain and speculative texts are equal, end by themselves, and no line of them comes again and again."""
    llm = LLM("smollm2", drafter="ngram")
    sampling = replace(llm.default_sampling, seed=SEED, max_tokens=400)
    messages = [{"role": "user", "content": race_prompt()}]
    plain, fast = (
        llm.chat(messages, sampling, speculation=Speculation(enabled=enabled)).samples[0] for enabled in (False, True)
    )
    assert plain.text == fast.text
    assert plain.finish is Finish.STOP
    assert fast.stats.accepted > 0
    assert "def withdraw" in fast.text
    lines = Counter(line for line in fast.text.splitlines() if line.strip())
    assert max(lines.values()) <= 3
