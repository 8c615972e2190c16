"""Rounds of CUDA kernels beside portable ones of the same tiny model, for tests that compare their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.drafters.block.on_device import BlockOnDevice
from paceline.drafters.eagle.on_device import drafter_of_head
from paceline.drafters.medusa import MedusaOnDevice
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.ngram import LookupOnDevice
from paceline.drafters.portfolio.on_device import PortfolioOnDevice
from paceline.kernels.quant import values_of
from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.block import TorchBlock
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.heads.cuda_block import CudaBlock
from paceline.runner.heads.medusa import TorchMedusa
from paceline.runner.heads.torch import TorchHead
from paceline.runner.rounds.cuda import CudaRounds
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Rounds, Seat
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.block_heads import random_block
from tests.heads import random_eagle, random_medusa
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.tiny_forward import PLAIN, floats, random_weights
from tests.odd_drafters import AgainOnDevice

LANES, PAGES = 9, 40
TAPS = (0, 1, 1)
MASK = 7  # token of drafted positions of the drafter "parallel"
KEPT = (0, 1)  # the target's, for drafters on the host
AGAIN = {"again": AgainOnDevice(), "again-half": AgainOnDevice(finds_fewer=True)}  # from outside
OPTIONS = {"lanes": LANES, "max_context": 2000, "max_draft": 8}


def weights(noise: float = 0.0) -> dict[str, Any]:
    own, other = (floats(random_weights(PLAIN, "int8", seed=seed)) for seed in (0, 1))
    return {name: weight + noise * other[name] for name, weight in own.items()}


def forward(device: torch.device, noise: float = 0.0, kv: Any = None) -> CudaForward:
    decoder = CudaDecoder(PLAIN, weights(noise), max_context=64, dtype=torch.float32, device=device, pdl=ON_GPU)
    kv = kv or new_kv(PLAIN, num_pages=PAGES, dtype=torch.float32, device=device)
    return CudaForward(decoder, kv, taps=KEPT)


def heads(
    target: CudaForward, oracle: TorchForward, *, branches: int | None = 1, **options: Any
) -> tuple[DeviceDrafter, DeviceDrafter]:
    made = random_eagle(PLAIN, taps=TAPS, draft_vocab=60, **options)
    head = CudaHead(replace(made, weights=dict(made.weights)), target.decoder, max_context=64)
    head.new_kv(PAGES)
    other = TorchHead(made, oracle, num_pages=PAGES + 1)  # with a page for padding, as a device has one
    least = 0.2 if branches == 1 else 0.02
    chosen = {} if branches is None else {"max_draft": 5, "branches": branches}
    mine, theirs = (drafter_of_head(each, TAPS, {"min_confidence": least, **chosen}) for each in (head, other))
    return mine, theirs


def blocks(target: CudaForward, oracle: TorchForward, **options: Any) -> tuple[DeviceDrafter, DeviceDrafter]:
    made = random_block(PLAIN, taps=TAPS, draft_vocab=60, **options)
    strong = {name: 6 * values_of(weight) for name, weight in made.weights.items() if name.startswith("markov")}
    made = replace(made, weights={**made.weights, **strong})  # so that drafts depend on the token before
    block = CudaBlock(replace(made, weights=dict(made.weights)), target.decoder, max_context=64)
    block.new_kv(PAGES, seats=LANES)
    other = TorchBlock(made, oracle, num_pages=PAGES + 1)  # with a page for padding, as a device has one
    mine, theirs = (BlockOnDevice(each, taps=TAPS, max_draft=4, min_confidence=0.2) for each in (block, other))
    return mine, theirs


def pair(
    device: torch.device, drafter: str | None = None, *, portfolio: bool = False, **options: Any
) -> tuple[CudaRounds, PortableRounds]:
    """`portfolio`: there is a drafter "portfolio" of this one, too."""
    target, oracle = forward(device), TorchForward(PLAIN, weights(), num_pages=PAGES, taps=KEPT)
    mine: dict[str, DeviceDrafter] = {}
    other: dict[str, DeviceDrafter] = {}
    if drafter == "ngram":
        mine["ngram"] = other["ngram"] = LookupOnDevice()
    elif drafter == "trees":
        mine["trees"] = other["trees"] = AGAIN["again"]  # until the texts are known
    elif drafter == "eagle":
        mine["eagle"], other["eagle"] = heads(target, oracle, **options)
    elif drafter == "block":
        mine["block"], other["block"] = blocks(target, oracle, **options)
    elif drafter == "medusa":
        mine["medusa"], other["medusa"] = (
            MedusaOnDevice(TorchMedusa(random_medusa(PLAIN), device=where), tap=1, min_confidence=0.0)
            for where in (device, "cpu")
        )
    elif drafter in AGAIN:
        mine[drafter] = other[drafter] = AGAIN[drafter]
    elif drafter is not None:
        shares, mask = drafter == "self", MASK if drafter == "parallel" else None
        copied = forward(device, 0.05, target.kv if shares else None)
        mine[drafter] = ModelOnDevice(copied, shares_kv=shares, mask=mask)
        copy = TorchForward(PLAIN, weights(0.05), num_pages=PAGES)
        if shares:
            copy.kv, copy.backend = oracle.kv, oracle.backend
        other[drafter] = ModelOnDevice(copy, shares_kv=shares, mask=mask)
    if portfolio and drafter is not None:
        for by in (mine, other):
            by["portfolio"] = PortfolioOnDevice(by[drafter], name=drafter)
    return (
        CudaRounds(target, drafters=mine, graphs=ON_GPU, **OPTIONS),
        PortableRounds(oracle, drafters=other, **OPTIONS),
    )


def enter(rounds: Rounds, lane: int, tokens: Sequence[int], **params: Any) -> None:
    sampler = Sampler(SamplingParams.of(**params), seed=7 + lane, vocab_size=PLAIN.vocab_size, eos_ids=())
    sampler.see_prompt(tokens)
    rounds.write(lane, np.array(tokens), sampler)
    rounds.set_pages(lane, 0, range(4 * lane, 4 * lane + 4))


Step = tuple[list[Landed | None], list[Landed]]


def both(made: Sequence[Rounds], chunks: Sequence[Chunk], seats: Sequence[Seat], drafter: str | None = None) -> Step:
    mine, other = (each.collect(each.launch(chunks, seats, drafter=drafter, context=30))[:2] for each in made)
    assert mine == other
    return mine
