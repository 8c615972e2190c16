"""Bytes of pages, passes and weights, and the error if a device has too little memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.models.load import LoadedModel
from paceline.runner.loading import models as load
from paceline.runner.loading.memory import available_memory
from paceline.runner.loading.models import ready_shape
from tests.tiny_models import TARGET


def test_the_bytes_of_a_page_and_of_a_pass() -> None:
    config, ready = TARGET.config, ready_shape("small", format="fp32")
    assert ready.page_bytes == PAGE_SIZE * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    weights = sum(weight.nbytes for weight in TARGET.weights.values())
    assert ready.pass_bytes == weights - TARGET.weights["embed"].nbytes  # a pass looks up a few of its rows
    assert ready_shape("small", format="fp8").pass_bytes == ready.pass_bytes  # it runs as float32
    assert ready_shape("small", format="int8").pass_bytes < ready.pass_bytes / 2


def test_no_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(load, "random_weights", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 8 << 30))
    with pytest.raises(OutOfMemory, match=r"random weights of small: 3.0 of 8.0 GiB are free on the device; choose"):
        ready_shape("small")


def test_weights_are_counted_before_a_decoder_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(model: LoadedModel, device: str, *, positions: int) -> Any:
        assert positions == model.config.max_context
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


def test_memory_is_what_the_machine_and_the_container_leave(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 64 kB\nMemAvailable:    3072 kB\n", "proc/self/cgroup": "0::/pod"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == 3 << 20
    group = tmp_path / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (group / "memory.current").write_text(str(1 << 20))
    for limit, left in ((3 << 20, 2 << 20), (64 << 20, 3 << 20)):
        (group / "memory.max").write_text(str(limit))
        assert available_memory(tmp_path) == left
