"""Masks that are padding rows of the target's embedding, behind its tokens: published heads use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.block import BlockDrafter
from paceline.errors import ModelFileError
from paceline.llm import LLM
from paceline.types import OFF, SamplingParams, Speculation
from tests.block_heads import LAYOUTS as BLOCKS
from tests.padded_target import PADDING, write_padded
from tests.plain_block import PlainBlock
from tests.plain_eagle import PlainTarget
from tests.published_heads import LAYOUTS as HEADS

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT = "a b c a b"
KINDS = {  # layout → kind of drafter
    "p-eagle": "eagle",
    "p-eagle of one layer": "eagle",
    "dflash": "block",
    "dspark": "block",
    "dspark, speculators": "block",
    "dflash2": "block",
}


@dataclass(frozen=True)
class Padded:
    target: Path
    tokens: int  # of its tokenizer

    def head(self, folder: Path, name: str, mask: int) -> str:
        """Write a head with a mask; return its words."""
        layouts = HEADS if KINDS[name] == "eagle" else BLOCKS
        path = layouts[name].write(folder, vocab=self.tokens + PADDING)
        values = json.loads((path / "config.json").read_text())
        values.get("dflash_config", values)["mask_token_id"] = mask
        (path / "config.json").write_text(json.dumps(values))
        return f"{KINDS[name]}:{path},min_confidence=0"


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Padded:
    return Padded(*write_padded(tmp_path_factory.mktemp("padded")))


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_a_padding_row_is_a_mask_like_any_other(name: str, format: str, padded: Padded, tmp_path: Path) -> None:
    mask = padded.tokens + 5
    llm = LLM(str(padded.target), drafter=padded.head(tmp_path, name, mask), format=format, **OPTIONS)
    kind = KINDS[name]
    assert f"its mask {mask} is a padding row of the embedding, behind the {padded.tokens} tokens" in (
        llm.parts.drafters[kind].how
    )
    [answer] = llm.generate(PROMPT, PARAMS, speculation=Speculation(drafter=kind))
    assert answer.tokens == llm.generate(PROMPT, PARAMS, speculation=OFF)[0].tokens
    assert answer.stats.drafted > 20
    assert llm.engine.drafters[kind].fault is None


def test_its_own_row_is_read(padded: Padded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch, with the published names, drafts the same; with the row of the last token it would not."""
    drafts: list[tuple[list[int], Draft]] = []
    propose = BlockDrafter.propose

    def spy(self: BlockDrafter, asks: Sequence[Ask]) -> list[Draft]:
        texts = [ask.tokens.tolist() for ask in asks]
        found = propose(self, asks)
        drafts.extend(zip(texts, found, strict=True))
        return found

    monkeypatch.setattr(BlockDrafter, "propose", spy)
    words = padded.head(tmp_path, "dflash", padded.tokens + 5)
    llm = LLM(str(padded.target), drafter=words, format="fp32", **OPTIONS)
    llm.generate(PROMPT, PARAMS, speculation=Speculation(drafter="block"))
    plain = PlainBlock(tmp_path, PlainTarget(padded.target))
    long = [(text, draft.tokens) for text, draft in drafts if len(draft.tokens) > 2]
    assert len(long) > 3
    assert all(plain.draft(text, len(tokens))[0] == list(tokens) for text, tokens in long)


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_behind_the_padding_is_refused_by_its_key(name: str, padded: Padded, tmp_path: Path) -> None:
    last = padded.tokens + PADDING - 1
    message = f"mask_token_id is {last + 1}; allowed: a whole number from 0 to {last}"
    with pytest.raises(ModelFileError, match=message):
        LLM(str(padded.target), drafter=padded.head(tmp_path, name, last + 1), **OPTIONS)


def test_a_token_as_mask_needs_no_word(padded: Padded, tmp_path: Path) -> None:
    llm = LLM(str(padded.target), drafter=padded.head(tmp_path, "dflash", padded.tokens - 1), **OPTIONS)
    assert "its mask" not in llm.parts.drafters["block"].how
