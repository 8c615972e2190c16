"""Block drafters in every published layout draft what the formulas say, over whole drafts and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.block import BlockDrafter
from paceline.llm import LLM
from paceline.models.load import open_model
from paceline.types import OFF, SamplingParams, Speculation
from tests.block_heads import LAYOUTS
from tests.cli.tiny_model import write_model
from tests.plain_block import PlainBlock
from tests.plain_eagle import PlainTarget

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["a b c a b", "hello"]
Drafts = list[tuple[tuple[int, ...], Draft]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Every draft of a block drafter, with the tokens that it follows."""
    seen: Drafts = []
    propose = BlockDrafter.propose

    def spy(self: BlockDrafter, asks: Sequence[Ask]) -> list[Draft]:
        before = [tuple(ask.tokens.tolist()) for ask in asks]
        found = propose(self, asks)
        seen.extend((tokens, draft) for tokens, draft in zip(before, found, strict=True) if draft.tokens)
        return found

    monkeypatch.setattr(BlockDrafter, "propose", spy)
    return seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_formulas(name: str, target: Path, tmp_path: Path, drafts: Drafts) -> None:
    folder = LAYOUTS[name].write(tmp_path / "head", vocab=open_model(str(target)).config.vocab_size)
    llm = LLM(str(target), drafter=f"block:{folder},min_confidence=0", format="fp32", **OPTIONS)
    answers = llm.generate(PROMPTS, PARAMS, speculation=Speculation(drafter="block"))
    assert [a.tokens for a in answers] == [a.tokens for a in llm.generate(PROMPTS, PARAMS, speculation=OFF)]
    plain = PlainBlock(folder, PlainTarget(target))
    longest = plain.values["block_size"] - (not plain.anchor_first)
    assert sum(len(draft.tokens) == longest for _, draft in drafts) > 15
    for before, draft in drafts[::3]:
        tokens, sure = plain.draft(before, len(draft.tokens))
        assert list(draft.tokens) == tokens, f"after {len(before)} tokens"
        if sure:
            assert draft.own_confidence == pytest.approx(sure, rel=1e-3)
