"""The choice of device and Forward for a model, and formats that a device does not have."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import InvalidRequest, UnknownOption, UnsupportedModel
from paceline.models.load import LoadedModel
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.loading import models as load
from paceline.runner.loading.models import choose_device, read_model, ready_shape
from tests.tiny_models import TARGET


@pytest.mark.parametrize(
    ("name", "there", "chosen"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_devices(name: str, there: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device(name) == chosen


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="torch finds no CUDA device; use device cpu"):
        choose_device("cuda")
    with pytest.raises(UnknownOption, match="unknown device 'cdua'; did you mean 'cuda'"):
        choose_device("cdua")


@pytest.mark.parametrize(
    ("format", "kind", "why"),
    [
        ("int8", CompiledForward, "compiled: quantised weights"),
        ("int4", CompiledForward, "compiled: quantised weights"),
        ("fp8", TorchForward, "torch: fp8 weights have no compiled kernel"),
        ("fp32", TorchForward, "torch: torch.float32 weights have no compiled kernel"),
    ],
)
def test_a_shape_with_random_weights(format: Any, kind: type, why: str) -> None:
    ready = ready_shape("small", format=format)
    assert ready.why.startswith(why)
    assert (ready.device, ready.tokenizer, ready.compiled) == ("cpu", None, kind is CompiledForward)
    ready.profile(8, 8)  # does nothing on a CPU
    forward = ready.forward(num_pages=3, threads=1, max_context=40)
    assert isinstance(forward, kind)
    assert forward.vocab_size == TARGET.vocab_size


def test_the_same_seed_draws_the_same_weights() -> None:
    one, same, other = (ready_shape("small", format="fp32", seed=seed).model.weights["head"] for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_kv_formats_are_for_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="kv_format 'fp8' is for a GPU"):
        ready_shape("small", kv_format="fp8")


def test_floats_of_32_bits_are_for_a_cpu() -> None:
    """fp32 is refused on a GPU, where it would be rounded, before anything is read."""
    with pytest.raises(InvalidRequest, match="fp32 are for a CPU; on a GPU there are auto, native, bf16, fp8, int8"):
        ready_shape("small", format="fp32", device="cuda")
    with pytest.raises(InvalidRequest, match="fp32 are for a CPU"):
        read_model("no-such-model", format="fp32", device="cuda:0")


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready_shape("small").model
    monkeypatch.setitem(sys.modules, "paceline.runner.forwards.cuda", None)
    with pytest.raises(UnsupportedModel, match="pip install triton, or use device cpu"):
        load._cuda_decoder(model, "cuda", positions=8)


def test_rotary_tables_reach_as_far_as_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds have a drafter read all of a text, also where its own context is shorter."""
    found: list[int] = []

    def pack(model: LoadedModel, device: str, *, positions: int) -> Any:
        found.append(positions)
        return SimpleNamespace(device=torch.device(device), weight_bytes=7)

    monkeypatch.setattr(load, "_cuda_decoder", pack)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    drafter, target = ready_shape("small"), ready_shape("small")
    own = drafter.model.config.max_context
    for context in (own // 2, 4 * own):
        model = replace(target.model, config=replace(target.model.config, max_context=context))
        load._ready("small", drafter.model, None, "cuda", "bf16", replace(target, model=model))
    assert found == [own, 4 * own]
