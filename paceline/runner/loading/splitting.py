"""Split a model that is ready over ranks. Whatever makes this impossible is an error here, before weights are read."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import InvalidRequest
from paceline.runner.loading.memory import weight_parts
from paceline.runner.loading.models import ReadyModel
from paceline.runner.loading.rank_threads import check_ranks, check_threads
from paceline.runner.parallel.split import plan_split

FORMATS = ("native", "fp32", "bf16")  # formats that torch runs; the compiled program is not split


def check_place(device: str, degree: int) -> None:
    """Raise InvalidRequest if models cannot be split on a device."""
    if device != "cpu":
        raise InvalidRequest(f"tensor_parallel {degree}: models are split on device cpu only, not on {device}")


def split_model(
    ready: ReadyModel, *, degree: int, same_bits: bool, timeout: float, threads: int | None = None
) -> ReadyModel:
    """Return the model over `degree` ranks, running in torch. `timeout`: seconds that a rank may keep others waiting.

    Quantised weights of a file are read as float32."""
    check_place(ready.device, degree)
    if ready.stored is None:
        raise InvalidRequest(f"tensor_parallel {degree}: ranks read weights from files, and {ready.name} has none")
    if ready.stored.format not in FORMATS:
        raise InvalidRequest(
            f"tensor_parallel {degree}: the compiled program for {ready.stored.format} weights is not split; take "
            "format fp32 or bf16"
        )
    check_ranks(degree)
    check_threads(threads, same_bits=same_bits)
    split = plan_split(ready.name, ready.model.config, degree=degree, same_bits=same_bits)
    quantised = ready.stored.source.quantised
    stored = replace(ready.stored, format="fp32") if quantised and ready.stored.format == "native" else ready.stored
    why = f"torch, {split.spoken}; the compiled program for quantised weights is not split"
    return replace(
        ready,
        compiled=False,
        why=why,
        parts=weight_parts(ready.model, packed=False),
        stored=stored,
        split=split,
        rank_timeout=timeout,
    )
