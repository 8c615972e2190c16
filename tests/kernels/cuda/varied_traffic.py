"""Start engines' rounds on paper, run varied steps, and print as JSON which kernels only the steps asked for.

test_no_compiling_in_traffic.py runs it in a process of its own, in which Triton's interpreter is off. Steps are random:
numbers of sequences and prompts, their lengths and contexts, parameters, rules, grammars, offers, scored prompts, and
heads and models that catch up. With the word `eager` the start records nothing, so that every round runs launch by
launch.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.drafters.block.on_device import BlockOnDevice
from paceline.drafters.eagle.on_device import drafter_of_head
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.ngram import LookupOnDevice
from paceline.drafters.portfolio.on_device import PortfolioOnDevice
from paceline.engine.draft_rules import judge_drafts
from paceline.kernels.quant import quantise_fp8
from paceline.models.block_config import Markov
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import expected_shapes
from paceline.rules import Rule
from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.heads.cuda_block import CudaBlock
from paceline.runner.rounds.cuda import CudaRounds
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Offer, Seat
from paceline.runner.rounds.traits import copies_alone, longest_copy
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.block_heads import random_block
from tests.heads import random_eagle
from tests.kernels.cuda.device_on_paper import forget, noted

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=6000,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=3,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=4096,
    norm_eps=1e-5,
    rope_theta=1000.0,
)
LANES, CONTEXT, STEP_ROWS, MAX_DRAFT, PAGES, TAPS = 20, 2500, 500, 8, 600, (0, 1, 2)
STEPS = 250
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.1, "top_k": 30, "logprobs": 20},
    {"repetition_penalty": 1.2, "logprobs": 0},
    {"logit_bias": {3: 1.0}, "logprobs": 3},
    {"min_tokens": 4},
]
RULES = [{"rule": rule, "threshold": 0.2} for rule in (Rule.REJECTION, Rule.BLOCK, Rule.THRESHOLD, Rule.TYPICAL)]


def forward(layers: int, *, fp8: bool = False) -> CudaForward:
    """Make a model; `fp8`: in 8 bits, with floats beside them for many rows, as models that draft are loaded, and with
    so many KV heads that attention is divided otherwise."""
    config = replace(CONFIG, num_layers=layers, **({"num_heads": 16, "num_kv_heads": 8} if fp8 else {}))
    floats = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected_shapes(config).items()}
    weights = {name: quantise_fp8(value) if fp8 and value.dim() == 2 else value for name, value in floats.items()}
    decoder = CudaDecoder(config, weights, max_context=CONTEXT + 40, device="cpu", pdl=True, expand=fp8)
    decoder.profile(STEP_ROWS, LANES * (1 + MAX_DRAFT))
    return CudaForward(decoder, new_kv(config, num_pages=PAGES, dtype=torch.bfloat16, device="cpu"))


def drafter(kind: str, target: CudaForward) -> DeviceDrafter:
    if kind == "ngram":
        return LookupOnDevice()
    if kind in ("model", "parallel"):
        return ModelOnDevice(forward(1, fp8=True), mask=2 if kind == "parallel" else None)
    if kind == "block":
        made = random_block(CONFIG, taps=TAPS, block_size=7, draft_vocab=3001, markov=Markov("gated", 64))
        block = CudaBlock(made, target.decoder, max_context=CONTEXT + 40)
        block.profile(STEP_ROWS, 2 * LANES)
        block.new_kv(PAGES, seats=LANES)
        return BlockOnDevice(block, taps=TAPS, max_draft=made.config.longest)
    head = CudaHead(random_eagle(CONFIG, taps=TAPS, draft_vocab=3000), target.decoder, max_context=CONTEXT + 40)
    head.profile(STEP_ROWS, 2 * LANES)
    head.new_kv(PAGES)
    return drafter_of_head(head, TAPS, {"branches": 3} if kind == "tree" else {})


def started(kinds: list[str], *, seconds: float) -> CudaRounds:
    target = forward(CONFIG.num_layers)
    drafters: dict[str, DeviceDrafter] = {kind: drafter(kind, target) for kind in kinds if kind != "portfolio"}
    if "portfolio" in kinds:
        drafters = {"portfolio": PortfolioOnDevice(drafters[kinds[0]], name=kinds[0]), **drafters}
    options = {"lanes": LANES, "max_context": CONTEXT, "max_draft": MAX_DRAFT, "max_draft_tokens": 64}
    rounds = CudaRounds(target, drafters=drafters, **options)  # type: ignore[arg-type]
    rounds.judge = judge_drafts
    rounds.prepare(dict.fromkeys(kinds, MAX_DRAFT), offers=MAX_DRAFT, prompt_rows=STEP_ROWS, seconds=seconds)
    return rounds


class Traffic:
    """Random steps of rounds."""

    def __init__(self, rounds: CudaRounds) -> None:
        self._rounds = rounds
        self._random = random.Random(0)

    def step(self) -> None:
        chance, rounds = self._random, self._rounds
        by = chance.choice([None, *rounds.drafters])
        lanes = chance.sample(range(LANES), chance.randint(1, LANES))
        reading = lanes[: chance.choice([0, 0, chance.randint(1, len(lanes))])]
        kinds = PARAMETERS[:1] if chance.random() < 0.5 else PARAMETERS
        for lane in lanes:
            self._enter(lane, chance.choice(kinds))
        chunks = [*self._chunks(reading, by)]
        masks, judged = chance.random() < 0.2, by is not None and chance.random() < 0.1
        rules = chance.sample(RULES, 2) if judged and not masks else [{}]
        seats = [self._seat(lane, by, chance.choice(rules)) for lane in lanes if lane not in reading]
        masked = [index for index in range(len(seats)) if masks and chance.random() < 0.5]
        ticket = rounds.launch(chunks, seats, drafter=by, context=chance.randint(30, CONTEXT), masked=masked)
        if masked:
            rounds.sheet(ticket)
            rounds.draw(ticket, masked)
        rounds.collect(ticket)

    def _enter(self, lane: int, parameters: dict[str, Any]) -> None:
        tokens = self._random.choices(range(100), k=self._random.randint(2, STEP_ROWS))
        sampler = Sampler(SamplingParams.of(**parameters), seed=lane, vocab_size=CONFIG.vocab_size, eos_ids=())
        sampler.see_prompt(tokens)
        self._rounds.write(lane, np.array(tokens, dtype=np.int32), sampler)

    def _chunks(self, lanes: list[int], by: str | None) -> list[Chunk]:
        chance, left, chunks = self._random, STEP_ROWS - LANES, []
        catches_up = chance.random() < 0.5  # a model drafts again after plain steps, and reads the text since then
        for lane in lanes:
            count = min(left, chance.randint(1, chance.choice([12, 40, 150, STEP_ROWS])))
            if by in self._rounds.tapping and chance.random() < 0.2:
                chunks.append(Chunk(lane, 0, 1, draws=False, target=False, drafts=True))
            elif by in self._rounds.readers and catches_up:
                chunks.append(Chunk(lane, 0, min(count, 12), draws=False, target=False, drafts=True))
            elif count:
                draws, scored = chance.random() < 0.7, chance.randint(1, count) if chance.random() < 0.1 else 0
                drafts, states = by is not None and chance.random() < 0.8, int(chance.random() < 0.1)
                asked = {"scored": scored, "top": 5 if scored else 0, "states": states}
                chunks.append(Chunk(lane, 0, count, draws=draws, drafts=drafts, **asked))
                left -= count
        return chunks

    def _seat(self, lane: int, by: str | None, rule: dict[str, Any]) -> Seat:
        chance = self._random
        if chance.random() < 0.15:
            offer = Offer(2, tuple(range(MAX_DRAFT)), near=2)
            return Seat(lane, chance.randint(1, MAX_DRAFT), offer=offer)
        seat = Seat(lane, chance.randint(0, MAX_DRAFT) if by else 0, **rule)
        drafter = self._rounds.drafters[by] if by else None
        if rule or not longest_copy(drafter) or chance.random() < 0.3:
            return seat
        if copies_alone(drafter):
            return seat._replace(max_draft=seat.max_draft * chance.randint(0, 1), max_copy=MAX_DRAFT, sure=3)
        return seat._replace(max_copy=seat.max_draft, sure=3)


def report(kinds: list[str], *, seconds: float) -> dict[str, Any]:
    forget()
    traffic = Traffic(started(kinds, seconds=seconds))
    noted.started = True
    known = sum(map(len, noted.kernels.values()))
    for _ in range(STEPS):
        traffic.step()
    return {"known": known, "late": noted.late, "comparisons": noted.comparisons}


if __name__ == "__main__":
    seconds = 0.0 if "eager" in sys.argv else 600.0
    drafters = (["eagle", "ngram", "portfolio"], ["tree"], ["model", "portfolio"], ["parallel"], ["block"])
    print(json.dumps({"+".join(kinds): report(kinds, seconds=seconds) for kinds in drafters}))
