"""A rule of another installed package over HTTP: allowed by name, asked for by name, and told of in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.accept import AcceptRule
from paceline.accept.rows import Outcome
from paceline.accept.rule import Verification
from paceline.errors import InvalidRequest, UnknownOption
from paceline.llm import LLM
from paceline.server.settings import Settings
from tests.cli.test_rules_from_outside import SOURCE
from tests.outside import installed, registered
from tests.server.api import Api, serving

ALLOWED = ("coupled", "gullible")


@pytest.fixture(autouse=True)
def package(tmp_path: Path) -> Iterator[None]:
    offers = {"gullible": "served_rules:RULE", "broken": "served_rules:MISSING"}
    with installed(tmp_path, "served_rules", SOURCE, offers):
        yield


def test_it_is_asked_for_by_name(llm: LLM) -> None:
    with serving(llm, allowed_rules=ALLOWED) as api:
        told = api.complete(temperature=0, max_tokens=40, speculation={"rule": "gullible"})["speculation"]
        assert (told["rule"], told["lossless"]) == ("gullible", False)
        assert told["num_accepted_tokens"] == told["num_draft_tokens"] > 5
        assert api.complete(max_tokens=4)["speculation"]["rule"] == "coupled"
        assert api.get("/v1/speculation").json()["rules"] == list(ALLOWED)


def test_an_answer_names_the_rule_that_judged_it(llm: LLM) -> None:
    """A rule that raises is out of use; the answer says coupled, and does not claim to be lossless."""

    def judge(given: Verification) -> Outcome:
        raise ValueError("no verdict")

    raises = AcceptRule(name="raises", judge=judge, lossless=False)
    with registered(raises), serving(llm, allowed_rules=("coupled", "raises")) as api:
        told = api.complete(temperature=0, max_tokens=40, speculation={"rule": "raises"})["speculation"]
    assert told["num_drafts"] > 0
    assert (told["rule"], told["lossless"]) == ("coupled", False)


def test_it_may_be_the_default(llm: LLM) -> None:
    with serving(llm, allowed_rules=ALLOWED, default_rule="gullible") as api:
        assert api.complete(max_tokens=4)["speculation"]["rule"] == "gullible"


def test_nobody_gets_it_who_does_not_allow_it(api: Api) -> None:
    error = api.refused("/v1/completions", {"prompt": "a", "speculation": {"rule": "gullible"}})
    assert error["param"] == "speculation.rule"
    assert "not allowed here; allowed: coupled, rejection" in error["message"]
    with pytest.raises(InvalidRequest, match="default_rule 'gullible' is not among allowed_rules"):
        Settings(default_rule="gullible")


def test_a_server_cannot_allow_what_is_not_there() -> None:
    with pytest.raises(UnknownOption, match=r"unknown rule 'gulible'; did you mean 'gullible'\?"):
        Settings(allowed_rules=("coupled", "gulible"))
    with pytest.raises(InvalidRequest, match="the rule 'broken' of another package cannot be loaded: "):
        Settings(allowed_rules=("coupled", "broken"))


def test_it_has_no_threshold_to_set(llm: LLM) -> None:
    with serving(llm, allowed_rules=ALLOWED) as api:
        options = {"rule": "gullible", "threshold": 0.5}
        error = api.refused("/v1/completions", {"prompt": "a", "speculation": options})
        assert error["param"] == "speculation.threshold"
    with pytest.raises(InvalidRequest, match="default_threshold is for a lossy default_rule"):
        Settings(allowed_rules=ALLOWED, default_rule="gullible", default_threshold=0.5)
