"""The benchmark of programs: both arms do the same calls, one of them in one batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import program
from paceline.bench.program import Setup, Turn, measure, text
from paceline.cli.main import main
from paceline.llm import LLM
from tests.server.api import tiny_llm

SMALL = Setup(runs=3, forks=2, max_tokens=5, rounds=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("bench"))


def test_both_arms_do_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TASK", "{a} and {b} and {c} is")
    ticks: list[tuple[int, int]] = []
    found = measure(llm, SMALL, tick=lambda done, total: ticks.append((done, total)))
    assert found["identical"]
    assert found["calls"] == 6
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {arm: len(seconds) for arm, seconds in found["seconds"].items()} == {"together": 2, "one by one": 2}
    assert found["speedup"]["units"] == 2
    assert "the same tokens" in text(found)


def test_one_by_one_means_one_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TASK", "{a} and {b} and {c} is")
    most, step = [0], llm.engine.step

    def watched() -> object:
        events = step()
        most.append(len(llm.engine._scheduler.running))
        return events

    monkeypatch.setattr(llm.engine, "step", watched)
    program.take_turn(llm, SMALL, "one by one", number=0)
    assert max(most) == 1
    program.take_turn(llm, SMALL, "together", number=0)
    assert max(most) > 2, "the last may come when the first has ended"


def test_other_tokens_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "take_turn", lambda llm, setup, arm, number: Turn(2.0 + len(arm), [(len(arm),)]))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64}
    config |= {"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    status = main(
        ["bench", "program", str(tmp_path / "config.json"), "--drafter", "ngram", "--device", "cpu", "--json"]
    )
    out = capsys.readouterr().out.splitlines()
    assert status == 1
    assert "OTHER TOKENS" in out[0]
    record = json.loads(out[-1])
    assert not record["identical"]
    assert record["speedup"]["ratio"] == pytest.approx(12 / 10)
