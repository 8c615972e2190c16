"""What is asked, when, and what a server counts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.bench.arrivals import Load, times
from paceline.bench.counters import SpecCounters, read_counters
from paceline.bench.workloads import workload
from paceline.errors import InvalidRequest

METRICS = """# HELP vllm:spec_decode_num_drafts_total Rounds.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6
vllm:num_requests_running 3
"""


def test_counters_are_read_and_subtracted() -> None:
    after, before = read_counters(METRICS), SpecCounters(drafts=5, drafted=20, accepted=5, by_position={0: 4})
    assert after == SpecCounters(10, 40, 15, {0: 9, 1: 6})
    found = (after - before).record()
    assert found["spec_decode_acceptance_rate"] == 50
    assert found["spec_decode_acceptance_length"] == 3
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 1.2]
    assert (after + before).drafted == 60
    assert read_counters("vllm:num_requests_running 3") is None
    assert read_counters("vllm:spec_decode_num_drafts_total x") is None
    assert SpecCounters().record() == {}


def test_arrivals() -> None:
    constant = list(times(Load(rate=4), count=5, arrivals="constant", seed=0))
    assert constant == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert list(times(Load(at_once=3), count=3, arrivals="poisson", seed=0)) == [0, 0, 0]
    poisson = list(times(Load(rate=100), count=4001, arrivals="poisson", seed=1))
    gaps = [b - a for a, b in pairwise(poisson)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.01, rel=0.05)
    assert sum(gap > 0.01 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # e⁻¹: without memory
    assert poisson == list(times(Load(rate=100), count=4001, arrivals="poisson", seed=1))
    ramp = list(times(Load(rate=1, last_rate=3), count=4, arrivals="constant", seed=0))
    assert ramp == pytest.approx([0, 1, 1 + 3 / 5, 1 + 3 / 5 + 3 / 7])


def test_titles() -> None:
    assert Load(at_once=8).title == "c8"
    assert Load(at_once=8, rate=1, last_rate=4).title == "1–4 requests/s · c8"


def test_made_up_prompts_have_as_many_words_as_told(tmp_path: Path) -> None:
    (tmp_path / "sonnet").mkdir()
    (tmp_path / "sonnet" / "sonnet.txt").write_text("one two three four\n\nfive six\n", encoding="utf-8")
    found = workload(
        ["random", "sonnet"], data=tmp_path, count=4, max_tokens=9, words={"random": 31, "sonnet": 7}.__getitem__
    )
    lengths = [len(prompt.text.partition("\n\n")[2].split()) for prompt in found]
    assert lengths == [31, 31, 7, 7]
    assert len({prompt.text for prompt in found}) == 4
    assert [prompt.seed for prompt in found] == [0, 1, 2, 3]
    assert all(prompt.max_tokens == 9 for prompt in found)


def test_sources_share_the_count(tmp_path: Path) -> None:
    for name in "ab":
        lines = [json.dumps({"id": f"{name}{i}", "prompt": f"{name} {i}"}) for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = workload(
        [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], data=None, count=4, max_tokens=1, words=lambda kind: 1
    )
    assert [prompt.id for prompt in found] == ["a0", "a5", "b0", "b5"]


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="holds no prompts"):
        workload([str(tmp_path / "none.jsonl")], data=None, count=None, max_tokens=1, words=lambda kind: 1)
