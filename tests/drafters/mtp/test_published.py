"""MTP heads in every published layout draft what the formulas say, over whole drafts and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.llm import LLM
from paceline.types import OFF, SamplingParams, Speculation
from tests.mtp_checkpoints import LAYOUTS, PlainMtp
from tests.plain_eagle import PlainTarget

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["a b c a b", "hello"]
LONGEST = 4
Drafts = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Every draft of the head, with the tokens that it follows."""
    seen: Drafts = []
    propose = EagleDrafter.propose

    def spy(self: EagleDrafter, asks: Sequence[Ask]) -> list[Draft]:
        before = [tuple(ask.tokens.tolist()) for ask in asks]
        found = propose(self, asks)
        seen.extend((tokens, draft.tokens) for tokens, draft in zip(before, found, strict=True) if draft.tokens)
        return found

    monkeypatch.setattr(EagleDrafter, "propose", spy)
    return seen


def words_of(target: Path, head: Path, options: str) -> str:
    return f"mtp:{options}" if target == head else f"mtp:{head},{options}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_formulas(name: str, tmp_path: Path, drafts: Drafts) -> None:
    layout = LAYOUTS[name]
    target, head = layout.write(tmp_path)
    words = words_of(target, head, f"min_confidence=0,max_draft={LONGEST}")
    llm = LLM(str(target), drafter=words, format="fp32", **OPTIONS)
    answers = llm.generate(PROMPTS, PARAMS, speculation=Speculation(drafter="mtp"))
    assert [a.tokens for a in answers] == [a.tokens for a in llm.generate(PROMPTS, PARAMS, speculation=OFF)]
    plain = PlainMtp(head, PlainTarget(target), layout.names, hidden_first=layout.hidden_first)
    assert sum(len(tokens) == LONGEST for _, tokens in drafts) > 20
    for before, tokens in drafts:
        assert list(tokens) == plain.draft(before, len(tokens)), f"after {len(before)} tokens"


@pytest.mark.parametrize("own", ["embed_tokens.weight", "lm_head.weight"])
def test_matrices_of_its_own_are_used_and_copies_are_not(own: str, tmp_path: Path, drafts: Drafts) -> None:
    layout = LAYOUTS["alone for Llama"]
    target, head = layout.write(tmp_path)
    words = words_of(target, head, f"min_confidence=0,max_draft={LONGEST}")
    for format in ("fp32", "int8"):  # rounded weights of the target are still those of the copies
        how = LLM(str(target), drafter=words, format=format, **OPTIONS).parts.drafters["mtp"].how
        assert "of its own" not in how
    tensors = load_file(head / "model.safetensors")
    drawn = torch.randn(tensors[own].shape, generator=torch.Generator().manual_seed(5))
    save_file({**tensors, own: tensors[own].std() * drawn}, head / "model.safetensors")
    llm = LLM(str(target), drafter=words, format="fp32", **OPTIONS)
    assert llm.parts.drafters["mtp"].how.count("of its own") == 1
    llm.generate(PROMPTS, PARAMS, speculation=Speculation(drafter="mtp"))
    plain = PlainMtp(head, PlainTarget(target), layout.names)
    assert sum(len(tokens) == LONGEST for _, tokens in drafts) > 20
    for before, tokens in drafts:
        assert list(tokens) == plain.draft(before, len(tokens)), f"after {len(before)} tokens"


@pytest.mark.parametrize("name", ["MiMo", "alone for Qwen3"])
def test_compiled_heads_draft_nearly_the_same(name: str, tmp_path: Path, drafts: Drafts) -> None:
    """Weights of 8 bits change a token here and there, and a wrong network nearly all."""
    layout = LAYOUTS[name]
    target, head = layout.write(tmp_path)
    words = words_of(target, head, f"min_confidence=0,max_draft={LONGEST},branches=1,format=int8")
    llm = LLM(str(target), drafter=words, format="int8", **OPTIONS)
    assert "an MTP head" in llm.parts.drafters["mtp"].how
    assert "compiled" in llm.parts.drafters["mtp"].how
    llm.generate(PROMPTS, PARAMS, speculation=Speculation(drafter="mtp"))
    plain = PlainMtp(head, PlainTarget(target), layout.names, hidden_first=layout.hidden_first)
    whole = [list(tokens) == plain.draft(before, len(tokens)) for before, tokens in drafts]
    assert len(whole) > 20
    assert sum(whole) >= 0.5 * len(whole)


def test_of_several_modules_the_first_drafts_and_says_so(tmp_path: Path) -> None:
    target, _ = LAYOUTS["MiMo, two modules, shards"].write(tmp_path)
    assert "the first of 2 modules) on hidden states 2" in LLM(str(target), **OPTIONS).parts.drafters["mtp"].how
