"""Heads in every published layout draft what the formulas say, over whole drafts and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.errors import InvalidRequest
from paceline.kernels.base import Batch, Output
from paceline.llm import LLM
from paceline.models.load import open_model
from paceline.runner.heads.torch import TorchHead
from paceline.types import OFF, SamplingParams, Speculation
from tests.cli.tiny_model import write_model
from tests.plain_eagle import PlainHead, PlainTarget
from tests.published_heads import LAYOUTS

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["a b c a b", "hello"]
LONGEST = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every draft of an EAGLE drafter, with the tokens that it follows."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    propose = EagleDrafter.propose

    def spy(self: EagleDrafter, asks: Sequence[Ask]) -> list[Draft]:
        before = [tuple(ask.tokens.tolist()) for ask in asks]
        found = propose(self, asks)
        seen.extend((tokens, draft.tokens) for tokens, draft in zip(before, found, strict=True) if draft.tokens)
        return found

    monkeypatch.setattr(EagleDrafter, "propose", spy)
    return seen


@pytest.mark.unwatched
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_formulas(
    name: str, target: Path, tmp_path: Path, drafts: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    folder = LAYOUTS[name].write(tmp_path / "head", vocab=open_model(str(target)).config.vocab_size)
    words = f"eagle:{folder},min_confidence=0,max_draft={LONGEST}"
    llm = LLM(str(target), drafter=words, format="fp32", **OPTIONS)
    speculation = Speculation(drafter="eagle")
    answers = llm.generate(PROMPTS, PARAMS, speculation=speculation)
    assert [a.tokens for a in answers] == [a.tokens for a in llm.generate(PROMPTS, PARAMS, speculation=OFF)]
    plain = PlainHead(folder, PlainTarget(target))
    assert sum(len(tokens) == LONGEST for _, tokens in drafts) > 20
    for before, tokens in drafts:
        assert list(tokens) == plain.draft(before, len(tokens)), f"after {len(before)} tokens"


@pytest.mark.unwatched
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_heads_draft_nearly_the_same(
    name: str, target: Path, tmp_path: Path, drafts: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Weights of 8 bits change a token here and there, and a wrong network nearly all."""
    folder = LAYOUTS[name].write(tmp_path / "head", vocab=open_model(str(target)).config.vocab_size)
    words = f"eagle:{folder},min_confidence=0,max_draft={LONGEST},branches=1,format=int8"
    llm = LLM(str(target), drafter=words, format="int8", **OPTIONS)
    assert "compiled" in llm.parts.drafters["eagle"].how
    llm.generate(PROMPTS, PARAMS, speculation=Speculation(drafter="eagle"))
    plain = PlainHead(folder, PlainTarget(target))
    wanted = [(tokens[0], plain.draft(before, 1)[0]) for before, tokens in drafts]
    assert len(wanted) > 20
    assert sum(a == b for a, b in wanted) >= 0.8 * len(wanted)
    whole = [list(tokens) == plain.draft(before, len(tokens)) for before, tokens in drafts]
    assert sum(whole) >= 0.5 * len(whole)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("p-eagle", "branches=2", "branches 2: a P-EAGLE head drafts chains, so it must be 1"),
        ("eagle3", "max_draft=257", "max_draft 257: a draft must fit the head's max_position_embeddings of 256"),
    ],
)
def test_options_that_a_head_cannot_follow(name: str, options: str, message: str, target: Path, tmp_path: Path) -> None:
    folder = LAYOUTS[name].write(tmp_path / "head", vocab=open_model(str(target)).config.vocab_size)
    with pytest.raises(InvalidRequest, match=message):
        LLM(str(target), drafter=f"eagle:{folder},{options}", **OPTIONS)


def test_a_user_is_told_what_a_head_is_and_where_it_ends(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = LAYOUTS["speculators, three layers"]
    short = replace(layout, shape={**layout.shape, "max_position_embeddings": 64})
    folder = short.write(tmp_path / "head", vocab=open_model(str(target)).config.vocab_size)
    llm = LLM(str(target), drafter=f"eagle:{folder}", **OPTIONS)
    how = llm.parts.drafters["eagle"].how
    assert "3 layers, norm_before_residual, norm_output, q and k norms, a window of 6) on hidden states 0, 1, 3" in how
    said = "trained for 64 tokens of context, the target's 256: acceptance may fall beyond"
    assert said in how
    assert sum(said in record.getMessage() for record in caplog.records) == 1


def test_one_pass_drafts_all_tokens_of_p_eagle(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LAYOUTS["p-eagle"].write(tmp_path / "head", vocab=open_model(str(target)).config.vocab_size)
    llm = LLM(str(target), drafter=f"eagle:{folder},min_confidence=0,max_draft=5", format="fp32", **OPTIONS)
    passes: list[bool] = []
    run = TorchHead.__call__

    def counted(self: TorchHead, batch: Batch, **inputs: Any) -> Output:
        passes.append("features" in inputs)
        return run(self, batch, **inputs)

    monkeypatch.setattr(TorchHead, "__call__", counted)
    [answer] = llm.generate("abc", PARAMS, speculation=Speculation(drafter="eagle"))
    assert answer.stats.drafted > 40
    assert all(passes)
    assert len(passes) <= answer.stats.steps
