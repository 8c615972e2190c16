"""Split a model that is ready over ranks. Whatever makes this impossible is an error here, before weights are read."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import InvalidRequest
from paceline.kernels.quant import Quantised
from paceline.runner.loading.memory import weight_parts
from paceline.runner.loading.models import ReadyModel, StoredWeights
from paceline.runner.loading.rank_threads import check_ranks, check_threads
from paceline.runner.parallel.split import INPUTS, Split, plan_split

FLOATS = ("native", "fp32", "bf16")  # formats that torch runs; "native" is then read as float32


def check_place(device: str, degree: int) -> None:
    """Raise InvalidRequest if a model that is read by itself cannot be split on a device."""
    if device != "cpu":
        raise InvalidRequest(
            f"tensor_parallel {degree}: on {device} ranks read a model when its engine starts; here take device cpu"
        )


def split_model(
    ready: ReadyModel,
    *,
    degree: int,
    same_bits: bool,
    timeout: float,
    threads: int | None = None,
    option: str = "tensor_parallel",
) -> ReadyModel:
    """Return the model over `degree` ranks. `timeout`: seconds that a rank may keep others waiting; `option`: that asks
    for the degree."""
    check_place(ready.device, degree)
    if ready.stored is None:
        raise InvalidRequest(f"{option} {degree}: ranks read weights from files, and {ready.name} has none")
    check_ranks(degree)
    check_threads(threads, same_bits=same_bits, compiled=ready.compiled)
    split = plan_split(
        ready.name,
        ready.model.config,
        degree=degree,
        same_bits=same_bits,
        packed=ready.compiled,
        option=option,
    )
    made = replace(ready, split=split, rank_timeout=timeout)
    return _compiled(made, split) if ready.compiled else _in_torch(made, ready.stored, split, option=option)


def split_beside(drafter: ReadyModel, target: ReadyModel) -> ReadyModel:
    """Return a model that drafts for a target: over the target's ranks if it says so, else whole on rank 0."""
    if not target.splits_drafters:
        return drafter
    assert target.split is not None, f"{target.name} is not split"
    return split_model(
        replace(drafter, shortlist=False),
        degree=target.split.degree,
        same_bits=target.split.same_bits,
        timeout=target.rank_timeout,
        option="drafter_tensor_parallel",
    )


def _compiled(ready: ReadyModel, split: Split) -> ReadyModel:
    """Return the model as compiled programs, one a rank."""
    for name, weight in ready.model.weights.items():
        kept_whole = isinstance(weight, Quantised) and not weight.grouped
        if split.shards > split.degree and kept_whole and name.endswith(INPUTS):
            raise InvalidRequest(
                f"same_bits_across_degrees: weights of {ready.name} with one scale for all inputs, as int8 has, are "
                "not cut inside a rank; take format int4 or a GGUF file's own"
            )
    return replace(ready, why=f"{ready.why}, {split.spoken}")


def _in_torch(ready: ReadyModel, stored: StoredWeights, split: Split, *, option: str) -> ReadyModel:
    """Return the model in torch. Quantised weights of a file are read as float32."""
    if stored.format not in FLOATS:
        raise InvalidRequest(
            f"{option} {split.degree}: {stored.format} weights of {ready.name} do not run compiled here ({ready.why}); "
            "take format fp32 or bf16"
        )
    if stored.source.quantised and stored.format == "native":
        stored = replace(stored, format="fp32")
    parts = weight_parts(ready.model, packed=False)
    return replace(ready, why=f"torch, {split.spoken}", parts=parts, stored=stored)
