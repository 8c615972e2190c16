"""Agent-like traffic: fixed by its seed, no request twice, several sessions at once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from paceline.prompts.files import read_prompts
from peers import agent_traffic
from peers.agent_traffic import AT_ONCE, REQUESTS, traffic


def test_no_request_stands_twice_and_the_seed_fixes_all() -> None:
    made = traffic(sessions=24)
    assert len({line["prompt"] for line in made}) == len(made) == 24 * REQUESTS
    assert made == traffic(sessions=24)
    assert made != traffic(sessions=24, seed=1)


def test_sessions_come_back_to_their_tool_or_file() -> None:
    made = traffic(sessions=12)
    for number in range(12):
        texts = [line["prompt"] for line in made if line["id"].startswith(f"session {number},")]
        assert len(texts) == REQUESTS
        rest = {text.split("\n\n", 1)[1] for text in texts}
        assert len(rest) == 1, "a session has one tool or one file"
        questions = {re.sub(r"\d+", "#", text.split("\n\n", 1)[0]) for text in texts}
        assert len(questions) == (REQUESTS if number % 2 else 1), "edits differ, calls differ in numbers alone"


def test_few_sessions_run_at_once() -> None:
    order = [int(re.findall(r"\d+", line["id"])[0]) for line in traffic(sessions=16)]
    for place in range(len(order)):
        running = {*order[:place]} & {*order[place:]}
        assert len(running) <= AT_ONCE
    assert order != sorted(order)


def test_the_output_is_a_prompt_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent_traffic", "--sessions", "2"])
    agent_traffic.main()
    file = tmp_path / "agents.jsonl"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    prompts = read_prompts(str(file))
    assert [prompt.text for prompt in prompts] == [line["prompt"] for line in traffic(sessions=2)]
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[0])["category"] == "agents"
