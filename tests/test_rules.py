"""Acceptance rules by name: what is known of each, where a rule from outside is found, and what is wrong with one."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from paceline import rules
from paceline.accept import AcceptRule
from paceline.errors import InvalidRequest, UnknownOption
from paceline.rules import BUILT_IN, Rule
from paceline.types import Speculation
from tests.outside import installed, registered

SOUND = """
from paceline.accept import AcceptRule

RULE = AcceptRule(name="theirs", judge=lambda given: None, lossless=False, threshold=0.5)
"""


def theirs(**changes: object) -> AcceptRule:
    return AcceptRule(**{"name": "theirs", "judge": print, "lossless": True, **changes})


def test_what_is_known_of_each() -> None:
    assert BUILT_IN == ("coupled", "rejection", "block", "threshold", "typical", "confidence")
    assert [rule for rule in BUILT_IN if rule.lossless] == ["coupled", "rejection", "block"]
    assert [rule for rule in BUILT_IN if rule.wants_probs] == ["rejection", "block"]
    assert {rule: rule.threshold for rule in rules.with_threshold()} == {
        "threshold": 0.3,
        "typical": 0.09,
        "confidence": 0.3,
    }
    for rule in BUILT_IN:
        rule.check_device("cpu")
        rule.check_device("cuda")


@pytest.mark.parametrize("rule", BUILT_IN)
def test_there_is_one_object_of_each_name(rule: Rule) -> None:
    assert Rule(str(rule)) is Rule(rule) is rule
    assert copy.deepcopy(rule) is rule
    assert pickle.loads(pickle.dumps(rule)) is rule
    assert Speculation(rule=str(rule)).rule is rule
    assert type(str(rule)) is str


@pytest.mark.parametrize("name", ["blocks", "", 3, None, ["block"], "no such thing"])
def test_an_unknown_name(name: object) -> None:
    with pytest.raises(UnknownOption, match=re.escape(f"unknown rule {str(name)!r}")) as error:
        Rule(name)
    assert error.value.param == "rule"
    assert "did you mean 'block'?" in str(error.value) or "known: block, confidence, coupled, " in str(error.value)


def test_a_registered_rule_is_asked_for_by_name() -> None:
    with registered(theirs(threshold=0.2, lossless=False)) as rule:
        assert Speculation(rule="theirs").rule is rule
        assert Speculation(rule="theirs", threshold=0.4).threshold == 0.4
        with pytest.raises(InvalidRequest, match="typical and confidence and theirs, not for coupled"):
            Speculation(threshold=0.4)
        with pytest.raises(UnknownOption, match="did you mean 'theirs'"):
            Speculation(rule="thiers")
    with pytest.raises(UnknownOption):
        Speculation(rule="theirs")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "block"}, "already a rule named 'block'"),
        ({"name": "no name"}, "letters, digits and underscores, not 'no name'"),
        ({"name": 3}, "letters, digits and underscores, not 3"),
        ({"lossless": 1}, "lossless must be True or False"),
        ({"wants_probs": None}, "wants_probs must be True or False"),
        ({"threshold": 0}, "threshold must be in"),
        ({"threshold": 1.5}, "threshold must be in"),
        ({"devices": ("cpu", "tpu")}, "unknown device 'tpu'"),
    ],
)
def test_a_rule_that_cannot_be_registered(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message), registered(theirs(**given)):
        pass
    assert len(rules._KNOWN) == len(BUILT_IN)


def test_a_rule_that_only_knows_the_host_is_refused_on_a_gpu() -> None:
    with registered(theirs()) as rule:
        rule.check_device("cpu")
        with pytest.raises(InvalidRequest, match=r"'theirs' does not run on cuda: its AcceptRule\.devices") as error:
            rule.check_device("cuda")
        assert error.value.param == "rule"
    with registered(theirs(devices=("cpu", "cuda"))) as rule:
        rule.check_device("cuda")


def test_a_rule_of_an_installed_package_is_found(tmp_path: Path) -> None:
    with installed(tmp_path, "their_rules", SOUND, {"theirs": "their_rules:RULE"}):
        rule = Rule("theirs")
        assert (rule.lossless, rule.wants_probs, rule.threshold, rule.devices) == (False, False, 0.5, ("cpu",))
        assert Rule("theirs") is rule
    with pytest.raises(UnknownOption):
        Rule("theirs")


@pytest.mark.parametrize(
    ("source", "place", "said"),
    [
        ("import no_such_module", "RULE", "raised ModuleNotFoundError"),
        ("1 / 0", "RULE", "raised ZeroDivisionError"),
        (SOUND, "MISSING", "raised AttributeError"),
        ("RULE = 3", "RULE", "is no paceline.accept.AcceptRule and is skipped"),
        (SOUND.replace('"theirs"', '"other"'), "RULE", "is skipped: it is named 'other'"),
        (SOUND.replace("0.5", "5"), "RULE", "is skipped: threshold must be in"),
    ],
)
def test_a_broken_one_is_named_and_skipped(
    source: str, place: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(tmp_path, "their_rules", source, {"theirs": f"their_rules:{place}"}):
        with pytest.raises(InvalidRequest, match="the rule 'theirs' of another package cannot be loaded: "):
            Rule("theirs")
        with pytest.raises(UnknownOption, match="unknown rule 'nothing'; known: block, confidence, coupled, rej"):
            Rule("nothing")
        assert Rule("block") is Rule.BLOCK
    record = caplog.records[0]
    assert "theirs" in record.message
    assert said in record.message
