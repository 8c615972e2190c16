"""Models that are split over GPUs: which device a rank has, and its part of a model, ready for rounds."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paceline.errors import InvalidRequest
from paceline.models.load import LoadedModel, open_model
from paceline.models.shapes import is_shape, random_weights, shape_config
from paceline.models.weights import Format, Progress, in_format, resolve_format
from paceline.runner.loading.memory import memory_for, weight_parts
from paceline.runner.loading.models import ReadyModel, check_format, kinds_of, positions_beside, tokenizer_of
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.split import plan_split

SHARED = "PACELINE_SHARE_GPUS"  # environment variable: ranks may be on the same GPU, for tests


def devices_of(degree: int) -> list[str]:
    """Return the device of each rank. Raises InvalidRequest if there are fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    if degree > count and not os.environ.get(SHARED):
        raise InvalidRequest(
            f"tensor_parallel {degree}: each rank needs a GPU, and torch finds {count}; take {count} at most, or "
            "device cpu"
        )
    return [f"cuda:{rank % count}" for rank in range(degree)]


def read_rank(
    name: str,
    exchange: Exchange,
    *,
    format: Format,
    device: str,
    kv_format: str,
    degree: int,
    same_bits: bool,
    timeout: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> ReadyModel:
    """Read a rank's part of a model, or of a shape with random weights, onto its device. All ranks do so at once.

    `timeout`: seconds that a rank may keep the others waiting in a pass."""
    from paceline.kernels.cuda.exchange import MAX_RANKS
    from paceline.kernels.cuda.tiles import UNIT
    from paceline.runner.forwards.cuda import CudaDecoder
    from paceline.runner.parallel.device_part import (
        cut_weights,
        format_of_ranks,
        rank_config,
        read_weights,
        share_of,
        with_own_head,
    )
    from paceline.runner.parallel.peer_memory import meet

    check_format(format, device)
    opened = None if is_shape(name) else open_model(name, progress=progress)
    config, rank = shape_config(name) if opened is None else opened.config, exchange.rank
    split = plan_split(name, config, degree=degree, same_bits=same_bits, packed=True, even=UNIT, most=MAX_RANKS)
    quantised = opened is not None and opened.source.quantised
    format = format_of_ranks(resolve_format(format, quantised=quantised, device=device), split, quantised=quantised)
    peers = meet(exchange, hidden=config.hidden_size, device=torch.device(device), seconds=timeout)
    with memory_for(f"the weights of {name}", "choose a smaller format such as fp8 or int4, or more ranks"):
        if opened is None:
            drawn = random_weights(config, device=device, dtype=torch.bfloat16, seed=seed)
            own = cut_weights(drawn, config, rank=rank, split=split)
            weights = {canonical: in_format(weight, canonical, format=format) for canonical, weight in own}
            weights = with_own_head(weights, config, rank=rank, split=split)
            model = LoadedModel(kind="hf", path=Path(name), config=config, weights=weights, metadata={})
        else:
            read = read_weights(opened, format=format, device=device, rank=rank, split=split, progress=progress)
            model = opened.loaded(read)
        parts, kinds = weight_parts(model, packed=True), kinds_of(model)
        decoder = CudaDecoder(
            rank_config(config, rank, split),
            model.weights,
            max_context=positions_beside(config, None),
            device=device,
            share=share_of(config, split, peers),
        )
    return ReadyModel(
        name,
        model,
        None if opened is None else tokenizer_of(model),
        compiled=False,
        why=f"cuda: {torch.cuda.get_device_name(decoder.device)}, {kinds} weights, {split.spoken}",
        decoder=decoder,
        kv_format=kv_format,
        parts=parts,
    )
