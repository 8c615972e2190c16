"""Tiny models with other vocabularies than the target's: its own in another order, SentencePiece's, one in common."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.kernels.base import Batch, Forward, Output
from paceline.models.config import ModelConfig
from paceline.text.bridge import VocabularyBridge
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import metadata
from tests.tiny_models import VOCAB, Model, tiny_tokenizer, tiny_vocabulary
from tests.toy import ToyForward

STRANGE = -1  # stands for a token that the target's vocabulary lacks
PAIRS = range(30, VOCAB)  # tokens of the target that others can spell


class Renamed(ToyForward):
    """A toy with other ids: `order` has the usual id of each token."""

    def __init__(self, order: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self._order = np.array(order)
        self._usual_size, self.vocab_size = self.vocab_size, len(order)

    def __call__(self, batch: Batch) -> Output:
        self.vocab_size = self._usual_size
        usual = np.maximum(self._order, 0).astype(np.int32)
        output = super().__call__(replace(batch, tokens=torch.from_numpy(usual[batch.tokens.numpy()])))
        self.vocab_size = len(self._order)
        logits = output.logits[:, np.maximum(self._order, 0)]
        logits[:, np.flatnonzero(self._order == STRANGE)] = -9.0
        self._last = Output(logits=logits, argmax=logits.argmax(-1).int())
        return self._last


@dataclass(frozen=True)
class Other(Model):
    """A tiny model with other ids."""

    order: tuple[int, ...] = ()

    def forward(self, backend: str, *, num_pages: int, taps: Sequence[int] = ()) -> Forward:
        if backend != "toy":
            return super().forward(backend, num_pages=num_pages, taps=taps)
        looks = {"seed": self.seed, "noise": self.noise, "sharpness": self.sharpness, "vocab_size": self.vocab_size}
        return Renamed(self.order, num_pages=num_pages, **looks)

    @property
    def config(self) -> ModelConfig:
        return replace(super().config, vocab_size=len(self.order))

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        usual = Model(seed=self.seed, noise=self.noise).weights
        rows = torch.tensor(self.order).clamp(min=0)
        known = (torch.tensor(self.order) != STRANGE)[:, None]
        return usual | {name: usual[name][rows] * known for name in ("embed", "head") if name in usual}


def removed(share: float = 0.1) -> frozenset[int]:
    """A part of the target's tokens, all of which can be spelled with others."""
    chosen = np.random.default_rng(3).choice(PAIRS, int(share * VOCAB), replace=False)
    return frozenset(chosen.tolist())


@functools.cache
def permuted(without: frozenset[int] = frozenset()) -> tuple[Tokenizer, tuple[int, ...]]:
    """The target's vocabulary in another order, and the target's id of each token."""
    order = tuple(int(i) for i in np.random.default_rng(1).permutation(VOCAB) if i not in without)
    usual = tiny_vocabulary()
    tokens = [usual["tokens"][i] for i in order]
    return Tokenizer.from_gguf(
        metadata(
            **usual
            | {
                "tokens": tokens,
                "token_type": [usual["token_type"][i] for i in order],
                "merges": [merge for merge in usual["merges"] if merge.replace(" ", "") in tokens],
                "eos_token_id": order.index(0),
            }
        )
    ), order


@functools.cache
def sentencepiece_like() -> tuple[Tokenizer, tuple[int, ...]]:
    """Byte tokens, letters, pairs of letters and the space of SentencePiece; every text begins with <s>."""
    usual = tiny_vocabulary()["tokens"]
    words = ["▁", *usual[1:27], *usual[30:]]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    made = Tokenizer.from_gguf(metadata(model="llama", tokens=tokens, token_type=kinds, scores=scores, **ids))
    return made, (STRANGE, STRANGE, 0, *[STRANGE] * 256, 27, *range(1, 27), *PAIRS)


@functools.cache
def one_in_common() -> tuple[Tokenizer, tuple[int, ...]]:
    """Capital letters, which the target cannot write, and one small letter."""
    tokens = ["<eos>", *(chr(ord("A") + i) for i in range(26)), "a"]
    made = metadata(model="gpt2", pre="gpt-2", tokens=tokens, token_type=[3] + [1] * 27, eos_token_id=0, merges=["A B"])
    made["tokenizer.ggml.tokens"].append("AB")
    made["tokenizer.ggml.token_type"].append(1)
    return Tokenizer.from_gguf(made), (0, *[STRANGE] * 26, 1, STRANGE)


@functools.cache
def of_five() -> tuple[Tokenizer, Tokenizer, tuple[int, ...]]:
    """A target of five tokens, and a drafter that lacks one of them, with one that the target writes as two."""
    names = {"model": "gpt2", "pre": "gpt-2", "token_type": [3, 1, 1, 1, 1]}
    target = metadata(**names, tokens=["<eos>", "a", "b", "ab", "c"], merges=["a b"], eos_token_id=0)
    drafter = metadata(**names, tokens=["<eos>", "c", "a", "b", "bc"], merges=["b c"], eos_token_id=0)
    return Tokenizer.from_gguf(target), Tokenizer.from_gguf(drafter), (0, 4, 1, 2, 3)


def bridge_to(tokenizer: Tokenizer) -> VocabularyBridge:
    return VocabularyBridge(tiny_tokenizer(), tokenizer)
