"""An audit finds the bugs that speculation could have, names the first differing token, and exits with 1."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.audit import planted
from tests.audit.conftest import PROMPTS, Auditor


def test_without_a_bug_everything_is_identical(auditor: Auditor) -> None:
    told = auditor("--at-once", "1,3", "--no-edits", "--samples", 32, "--places", 1)
    found = told.found
    assert told.status == 0
    assert (found["prompts"], found["identical"], found["near_tie"], found["structural"]) == (4, 4, 0, 0)
    assert (found["passed"], found["bitwise"], found["distribution_failed"], found["lossy"]) == (True, True, 0, None)
    plain_beside_others, coupled, by_distribution_but_greedy = 8, 2 * 8, 2 * 2 * 4
    compared = plain_beside_others + coupled + by_distribution_but_greedy
    assert found["answers"] == {"compared": compared, "identical": compared, "near_tie": 0, "structural": 0}
    assert 0 < found["accepted"] < found["drafted"]
    assert f"EXACT: {compared} of {compared} answers are identical" in told.out
    assert len(found["distribution"]) == 2
    assert all(test["proves"] and not test["failed"] and 0 < test["shift"] < 1 for test in found["distribution"])


WHERE = {  # under which sampling parameters a bug can show
    "acceptance": {"T=0", "T=0 edited", "T=1", "T=1 edited"},
    "penalties": {"T=0 edited", "T=1 edited"},
    "KV commit": {"T=0", "T=0 edited", "T=1", "T=1 edited"},
    "noise key": {"T=1", "T=1 edited"},
}


@pytest.mark.parametrize("bug", planted.TOKENS)
def test_a_planted_bug_is_found_and_named(
    bug: str, auditor: Auditor, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bug == "penalties":  # it shows in one answer of 30
        many = [f"{i} {prompt}" for i in range(5) for prompt in PROMPTS]
        prompts.write_text("\n".join(many), encoding="utf-8")
    planted.TOKENS[bug](monkeypatch)
    told = auditor("--rule", "coupled")
    found = told.found
    assert told.status == 1
    assert found["structural"] > 0
    assert found["near_tie"] == 0
    assert found["identical"] + found["structural"] == found["prompts"]
    assert not found["passed"]
    assert {difference["sampling"] for difference in found["differences"]} <= WHERE[bug]
    first = found["differences"][0]
    assert (first["kind"], first["drafter"]) == ("structural", "model")
    assert first["plain"] != first["replayed"]
    assert first["expected"] == first["plain"]  # the target, asked anew, agrees with the plain answer
    assert first["step"] == first["round"] > 1  # the first step reads the prompt, without a draft
    line = next(line for line in told.out.splitlines() if line.startswith("STRUCTURAL"))
    assert f"prompt {first['prompt_number']} ({first['prompt']})" in line
    assert f"token {first['position'] + 1} of the answer, step {first['step']}" in line
    assert f"plain {first['plain']} " in line
    assert f"replayed {first['replayed']} " in line
    assert "CHANGED" in told.out


@pytest.mark.parametrize("bug", planted.DISTRIBUTIONS)
def test_a_bug_in_a_distribution_rule_is_found(bug: str, auditor: Auditor, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, plant = planted.DISTRIBUTIONS[bug]
    plant(monkeypatch)
    options = ("--temperature", 1, "--no-edits", "--samples", 300, "--places", 2)
    told = auditor("--rule", rule, *options)
    [test] = told.found["distribution"]
    assert told.status == 1
    assert test["failed"]
    assert test["worst"]["tokens"]
    assert "CHANGED: 1 of 1 distribution tests fail" in told.out


def test_a_model_that_only_loops_is_flagged(auditor: Auditor) -> None:
    """The text is unchanged and the drafter always right: and no speed that it gives is a claim."""
    told = auditor("--drafter", "ngram", "--rule", "coupled", "--max-tokens", 48, target="looping")
    found = told.found
    assert told.status == 0
    assert found["identical"] == found["prompts"] == found["degenerate"]
    assert found["accepted"] > 0.9 * found["drafted"] > 0
    assert found["speed_claim"] == "void"
    assert {each["sign"] for each in found["degenerate_answers"]} == {"loop"}
    assert "VOID" in told.out


def test_a_lossy_rule_is_never_called_identical(auditor: Auditor) -> None:
    told = auditor("--rule", "typical", "--rule", "coupled", "--temperature", 1, "--no-edits")
    found = told.found
    assert told.status == 0
    assert found["lossy"]["rules"] == ["typical"]
    assert 0 < found["lossy"]["changed"] <= found["lossy"]["answers"] == 4
    [lossy] = [case for case in found["cases"] if case["rule"] == "typical"]
    assert (lossy["promise"], lossy["identical"], lossy["compared"]) == ("lossy", 0, 0)
    assert found["answers"] == {"compared": 4, "identical": 4, "near_tie": 0, "structural": 0}
    assert "LOSSY by typical" in told.out


def test_what_a_lossy_rule_loses(auditor: Auditor) -> None:
    """A threshold of 1 loses nothing, for only the target's own tokens reach it; a low one makes the text unlikely."""
    words = ("--rule", "threshold", "--temperature", 0, "--no-edits", "--threshold")
    told = auditor(*words, "auto,0.001,1")
    auto, low, strict = (case["loss"] for case in told.found["cases"] if case["rule"] == "threshold")
    assert [case["threshold"] for case in told.found["cases"]] == [None, "auto", 0.001, 1.0]
    assert (strict["changed"], strict["first_difference"], strict["lost_logprob"]) == (0, None, 0)
    assert (low["changed"], low["answers"]) == (4, 4)
    assert low["lost_logprob"] > max(0.1, auto["lost_logprob"])
    assert low["perplexity_ratio"] == pytest.approx(math.exp(low["plain_logprob"] - low["logprob"]))
    assert "4 of 4 answers changed, half of them by token" in told.out
    assert "name one, such as --rule threshold" in auditor("--threshold", "code").err


def test_where_nothing_is_drafted_nothing_is_shown(auditor: Auditor) -> None:
    told = auditor("--drafter", "none", "--at-once", "2", "--rule", "rejection")
    assert told.status == 0
    assert told.found["drafted"] == 0
    assert "NOTHING SHOWN" in told.found["verdict"]
