"""Which way a model runs, and on what."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import InvalidRequest, OutOfMemory, UnknownOption, UnsupportedModel
from paceline.kernels.base import PAGE_SIZE
from paceline.models import shapes
from paceline.models.load import LoadedModel
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.loading import models as load
from paceline.runner.loading.models import choose_device, read_model, ready_shape
from tests.tiny_models import TARGET


@pytest.fixture(autouse=True)
def _a_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", TARGET.config)


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
    ready.profile(8, 8)  # there is nothing to find out on a CPU
    forward = ready.forward(num_pages=3, threads=1, max_context=40)
    assert isinstance(forward, kind)
    assert forward.vocab_size == TARGET.vocab_size


def test_the_bytes_of_a_page_and_of_a_pass() -> None:
    config, ready = TARGET.config, ready_shape("small", format="fp32")
    assert ready.page_bytes == PAGE_SIZE * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    weights = sum(weight.nbytes for weight in TARGET.weights.values())
    assert ready.pass_bytes == weights - TARGET.weights["embed"].nbytes  # of which a pass looks up a few rows
    assert ready_shape("small", format="fp8").pass_bytes == ready.pass_bytes  # it is made float32 to be run
    assert ready_shape("small", format="int8").pass_bytes < ready.pass_bytes / 2


def test_the_same_seed_draws_the_same_weights() -> None:
    one, same, other = (ready_shape("small", format="fp32", seed=seed).model.weights["head"] for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_kv_formats_are_for_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="kv_format 'fp8' is for a GPU"):
        ready_shape("small", kv_format="fp8")


def test_floats_of_32_bits_are_for_a_cpu() -> None:
    """Before anything is read: on a GPU they would be rounded."""
    with pytest.raises(InvalidRequest, match="fp32 are for a CPU; on a GPU there are auto, native, bf16, fp8, int8"):
        ready_shape("small", format="fp32", device="cuda")
    with pytest.raises(InvalidRequest, match="fp32 are for a CPU"):
        read_model("no-such-model", format="fp32", device="cuda:0")


def test_no_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(load, "random_weights", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 8 << 30))
    with pytest.raises(OutOfMemory, match=r"random weights of small: 3.0 of 8.0 GiB are free on the device; choose"):
        ready_shape("small")


def test_weights_are_counted_before_a_decoder_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(model: LoadedModel, device: str) -> Any:
        model.weights.clear()
        return SimpleNamespace(device=torch.device(device), weight_bytes=7)

    model = ready_shape("small", format="int4").model
    counts = sum(expected.numel() for expected in TARGET.weights.values())
    monkeypatch.setattr(load, "_cuda_decoder", pack)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    ready = load._ready("small", model, None, "cuda", "bf16")
    assert (ready.device, ready.pass_bytes, ready.why) == ("cuda", 7, "cuda: a GPU, 4-bit and 8-bit weights")
    assert {part.format for part in ready.parts} == {"4-bit, groups of 32", "8-bit, groups of 32", "float32"}
    assert sum(part.parameters for part in ready.parts) == counts
    assert all(part.bytes < part.parameters for part in ready.parts if part.format.startswith("4-bit"))


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready_shape("small").model
    monkeypatch.setitem(sys.modules, "paceline.runner.forwards.cuda", None)
    with pytest.raises(UnsupportedModel, match="pip install triton, or use device cpu"):
        load._cuda_decoder(model, "cuda")
