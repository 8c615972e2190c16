"""The target as its own drafter: a copy of it in fewer bits that shares its KV memory.

`self`, `self:fp8`, `self:int8` or `self:int4`. The copy reads the target's keys and values and writes those of its
guesses into the same slots; verification writes over all of them (docs/adr/0011). So it needs no pages and reads no
prompt. On a GPU the device runs it, and on the host there is nothing to build; `drafters.self_on_cpu` is for a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters import self_on_cpu
from paceline.drafters.base import Drafter
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.recipe import Recipe
from paceline.errors import InvalidRequest, UnknownOption
from paceline.kernels.base import Forward
from paceline.models.weights import Progress
from paceline.runner.loading.memory import memory_for
from paceline.runner.loading.models import ReadyModel
from paceline.runner.rounds.protocol import DeviceDrafter

if TYPE_CHECKING:
    from paceline.runner.forwards.cuda import CudaDecoder

NAME = "self"
FORMATS = ("fp8", "int8", "int4")


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    known = FORMATS if target.decoder is not None else self_on_cpu.FORMATS
    format = options or known[0]
    if format not in FORMATS:
        raise UnknownOption(f"format of the {NAME} drafter", format, known)
    decoder = target.decoder
    if decoder is None:
        return self_on_cpu.recipe(NAME, format, target, progress)
    with memory_for(f"a copy of {target.name} in {format}", "take a smaller one such as self:int4, or another drafter"):
        copy = decoder.quantised(format)
    if all(mine is own for mine, own in zip(copy.matrices(), decoder.matrices(), strict=True)):
        raise InvalidRequest(
            f"no matrix of {target.name} can lose bits: as loaded all have 8 or fewer already, and a drafter as slow "
            "as the target can only lose; take another one, or load the target in bf16"
        )

    return on_target_memory(NAME, copy, f"the copy of {target.name}", how=f"the target in {format}, on its KV memory")


def on_target_memory(name: str, decoder: CudaDecoder, title: str, *, how: str) -> Recipe:
    """Make the recipe of a drafter that a device runs on the target's keys and values. `title` names its decoder in
    errors."""

    def on_device(built: Drafter | None, to: Forward) -> DeviceDrafter:
        from paceline.runner.forwards.cuda import CudaForward

        assert isinstance(to, CudaForward)
        return ModelOnDevice(CudaForward(decoder, to.kv), shares_kv=True)

    def profile(rows: int, outs: int) -> None:
        with memory_for(f"a pass of {rows} tokens of {title}", "lower max_step_tokens or max_sequences"):
            decoder.profile(rows, outs)

    return Recipe(
        name=name,
        build=lambda context: None,
        how=how,
        pass_bytes=decoder.weight_bytes,
        on_device=on_device,
        profile=profile,
    )
