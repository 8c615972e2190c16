"""Rounds of a tiny model that is split over ranks: processes of Triton's interpreter, started as those of GPUs are."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.drafters.eagle.on_device import drafter_of_head
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.ngram import LookupOnDevice
from paceline.drafters.portfolio.on_device import PortfolioOnDevice
from paceline.kernels.cuda.exchange import Peers
from paceline.kernels.cuda.tiles import UNIT
from paceline.models.config import ModelConfig
from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.parallel.device_part import cut_weights, rank_config, share_of, with_own_head
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.messages import Assemble
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.parallel.split import plan_split
from paceline.runner.parallel.worker import end_with, main
from paceline.runner.rounds.cuda import CudaRounds
from paceline.runner.rounds.protocol import DeviceDrafter
from paceline.runner.rounds.ranks import FollowingRounds, LeadingRounds
from tests.heads import random_eagle
from tests.kernels.cuda.meeting_ranks import SECONDS, peers_in
from tests.kernels.cuda.round_pairs import KEPT, OPTIONS, PAGES, TAPS
from tests.kernels.tiny_forward import CONFIGS, PLAIN, floats, random_weights

EVEN = {"num_heads": 16, "intermediate_size": 512}  # two shards, each with 256 inputs of o and of down
MODELS = {name: replace(config, **EVEN) for name, config in CONFIGS.items()} | {"uneven": PLAIN}
PROGRAMS = 16


def weights_of(config: ModelConfig, noise: float = 0.0) -> dict[str, Any]:
    own, other = (floats(random_weights(config, "int8", seed=seed)) for seed in (0, 1))
    return {name: weight + noise * other[name] for name, weight in own.items()}


def whole_forward(config: ModelConfig, noise: float = 0.0) -> CudaForward:
    decoder = CudaDecoder(
        config, weights_of(config, noise), max_context=64, dtype=torch.float32, device="cpu", pdl=False
    )
    return CudaForward(decoder, new_kv(config, num_pages=PAGES, dtype=torch.float32, device="cpu"), taps=KEPT)


def split_forward(config: ModelConfig, rank: int, degree: int, *, same_bits: bool, folder: Path | None) -> CudaForward:
    """Return a rank's Forward. Without a folder the rank is alone."""
    split = plan_split("tiny", config, degree=degree, same_bits=same_bits, packed=True, even=UNIT)
    hidden, own = config.hidden_size, rank_config(config, rank, split)
    peers = Peers.alone(hidden, "cpu") if folder is None else peers_in(folder, rank, degree, hidden, programs=PROGRAMS)
    weights = with_own_head(
        dict(cut_weights(weights_of(config).items(), config, rank=rank, split=split)), config, rank=rank, split=split
    )
    decoder = CudaDecoder(
        own,
        weights,
        max_context=64,
        dtype=torch.float32,
        device="cpu",
        pdl=False,
        share=share_of(config, split, peers),
    )
    return CudaForward(decoder, new_kv(own, num_pages=PAGES, dtype=torch.float32, device="cpu"), taps=KEPT)


def drafter_for(kind: str | None, target: CudaForward, config: ModelConfig) -> dict[str, DeviceDrafter]:
    if kind is None:
        return {}
    if kind == "ngram":
        return {kind: LookupOnDevice()}
    if kind == "model":
        return {kind: ModelOnDevice(whole_forward(config, 0.05))}
    if kind == "layers":
        return {kind: ModelOnDevice(CudaForward(target.decoder.leading(1), target.kv), shares_kv=True)}
    if kind == "portfolio":
        return {kind: PortfolioOnDevice(drafter_for("layers", target, config)["layers"], name="layers")}
    made = random_eagle(config, taps=TAPS, draft_vocab=60)
    head = CudaHead(made, target.decoder, max_context=64)
    head.new_kv(PAGES)
    options = {"min_confidence": 0.02, "max_draft": 5, "branches": 2} if kind == "trees" else {"min_confidence": 0.2}
    return {kind: drafter_of_head(head, TAPS, options)}


def rounds_of_rank(
    model: str, kind: str | None, rank: int, degree: int, *, same_bits: bool, folder: Path | None = None
) -> CudaRounds:
    target = split_forward(MODELS[model], rank, degree, same_bits=same_bits, folder=folder)
    return CudaRounds(target, drafters=drafter_for(kind, target, MODELS[model]), graphs=False, **OPTIONS)


def leading_rounds(model: str, kind: str | None, degree: int, folder: Path, *, same_bits: bool) -> LeadingRounds:
    """Start the other ranks, which follow as long as these rounds are there."""
    command = (sys.executable, "-m", "tests.kernels.cuda.split_rounds", str(folder), model, kind or "")
    ranks = Ranks(degree, threads=1, timeout=SECONDS, command=command)
    config = EngineConfig(tensor_parallel=degree, same_bits_across_degrees=same_bits)
    order = Assemble(0, model, "fp32", 0, (), config, ())
    key, rounds = ranks.load(
        lambda key: replace(order, key=key),
        lambda order, exchange, look: rounds_of_rank(model, kind, 0, degree, same_bits=same_bits, folder=folder),
    )
    share = rounds._target.decoder.share
    assert share is not None
    return LeadingRounds(rounds, share.peers, ranks, key)


def follow(order: Assemble, exchange: Exchange) -> object:
    folder, model, kind = sys.argv[1:4]
    config = order.config
    return FollowingRounds(
        rounds_of_rank(
            model,
            kind or None,
            exchange.rank,
            config.tensor_parallel,
            same_bits=config.same_bits_across_degrees,
            folder=Path(folder),
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    end_with(int(sys.argv[-1]))
    sys.exit(main(int(sys.argv[-1]), follow))
