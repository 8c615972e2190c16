"""Laws 1, 2 and 3 for acceptance rules that are not Paceline's own: those of docs/rules.md, and a classical one.

The package that docs/rules.md describes is installed as it stands there, outside of the repository.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.accept import AcceptRule, Outcome, Verification, accept_rejection
from paceline.rules import Rule
from paceline.types import Speculation
from tests.laws import under_law
from tests.laws.test_law_3_distribution import ABSURD, DRAFTERS, LIKELY, PARAMS, engine_exact, engine_texts, judged
from tests.outside import installed, registered
from tests.rig import build
from tests.runs import run, tokens_of

DOCUMENT = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    [code] = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    return code


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    offers = tomllib.loads(block("toml"))["project"]["entry-points"]["paceline.rules"]
    with installed(tmp_path_factory.mktemp("outside"), "pace_rules", block("python"), offers):
        yield


def test_the_document_lists_what_there_is() -> None:
    items = [name for name, _ in inspect.getmembers(Verification, lambda member: isinstance(member, property))]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", DOCUMENT, flags=re.MULTILINE))
    named = set(re.findall(r"\w+", cells))
    assert named == {*items, *(field.name for field in fields(AcceptRule))} - {"vocab_size"}


@pytest.mark.parametrize("name", ["right-chain", "sure-chain", "tree", "noisy", "ngram"])
@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_the_text_is_the_plain_one(law: str, name: str) -> None:
    """Laws 1 and 2, of a rule that accepts what the target draws itself."""
    rig = build("toy", {name: under_law.made(name, "toy", law)})
    told = run(rig, under_law.asked(name, "toy", law, (Rule("same"),)))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("toy", law))
    assert rig.engine.stats.accepted > 0


def test_a_lossy_one_accepts_more() -> None:
    accepted = {}
    for rule in ("same", "top_two"):
        rig = build("toy", {"noisy": under_law.made("noisy", "toy", "greedy")})
        run(rig, under_law.asked("noisy", "toy", "greedy", (Rule(rule),)))
        accepted[rule] = rig.engine.stats.accepted / rig.engine.stats.drafted
    assert accepted["same"] < accepted["top_two"]
    assert not Speculation(rule="top_two").rule.lossless


def classical(given: Verification) -> Outcome:
    return accept_rejection(given.rows, given.p, given.q, given.coins, given.noise)


def forgetful(given: Verification) -> Outcome:
    """A planted bug: what was rejected is not corrected."""
    outcome = classical(given)
    tokens = (given.p[outcome.last].log() + given.noise).argmax(-1)
    return Outcome(alive=outcome.alive, last=outcome.last, tokens=tokens)


@pytest.mark.parametrize("name", ["right-chain", "sure-chain", "noisy"])
def test_a_rule_with_distributions_is_greedy_where_the_request_is(name: str) -> None:
    with registered(AcceptRule(name="classical", judge=classical, lossless=True, wants_probs=True)) as rule:
        rig = build("toy", {name: under_law.made(name, "toy", "greedy")})
        told = run(rig, under_law.asked(name, "toy", "greedy", (rule,)))
        assert tokens_of(told) == tokens_of(under_law.plain_answers("toy", "greedy"))
        assert rig.engine.stats.accepted > 0


@pytest.mark.parametrize("judge", [classical, forgetful])
def test_the_distribution_is_the_targets_own(judge: object) -> None:
    """Law 3, with the planted bug that it must see."""
    made = AcceptRule(name="classical", judge=judge, lossless=True, wants_probs=True)  # type: ignore[arg-type]
    with registered(made) as rule:
        texts = engine_texts(PARAMS["plain"], rule, DRAFTERS["bad"], requests=4)
    found = judged(texts, engine_exact(PARAMS["plain"]))
    assert found > LIKELY if judge is classical else found < ABSURD
