"""Memory of ranks: what each will hold, as a number that is true before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.llm import LLM
from paceline.models.load import open_model
from paceline.models.weights import Format, Weight, describe_weights
from paceline.runner.loading import rank_threads
from paceline.runner.parallel import forward, ranks
from paceline.runner.parallel.compiled_part import pack_of_rank
from paceline.runner.parallel.messages import Load
from paceline.runner.parallel.rank_memory import Need, bytes_of_ranks, check_memory
from paceline.runner.parallel.split import plan_split
from tests.cli.tiny_model import write_model
from tests.runner.parallel.compiled_ranks import Held, apart
from tests.runner.parallel.split_models import cut, write_tiny
from tests.tiny_models import TARGET

MIB = 1 << 20


@pytest.mark.parametrize(("degree", "same_bits"), [(1, True), (2, False), (2, True), (4, False)])
@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_parts_in_torch(degree: int, same_bits: bool, format: Format, tmp_path: Path) -> None:
    """Copies of key/value heads and norms count on each rank."""
    config = TARGET.config
    split = plan_split("tiny", config, degree=degree, same_bits=same_bits)
    opened = open_model(str(write_tiny(tmp_path, config, TARGET.weights)))
    described = describe_weights(opened.source, config, format=format)
    weights = {name: weight.to(dtype_of(described[name])) for name, weight in TARGET.weights.items()}
    expected = [
        sum(held(cut(weights, config, shard, split)) for shard in split.of_rank(rank)) for rank in range(degree)
    ]
    assert bytes_of_ranks(described, config, split, kv_bytes=0) == expected


def dtype_of(weight: Weight) -> torch.dtype:
    assert isinstance(weight, Tensor)
    return weight.dtype


def held(weights: Mapping[str, Weight]) -> int:
    return sum(weight.nbytes for weight in weights.values() if isinstance(weight, Tensor))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_compiled_parts(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch)
    config, source = TARGET.config, Held(TARGET.weights)
    split = plan_split("tiny", config, degree=2, same_bits=False, packed=True)
    load = Load(0, "tiny", format, split, 8, torch.float32, ())
    packs = [pack_of_rank(load, source, config, rank=rank) for rank in range(2)]
    described = describe_weights(source, config, format=format)
    found = bytes_of_ranks(described, config, split, kv_bytes=0)
    assert found == [pack.layout.size for pack in packs]


def test_kv_memory_is_shared(tmp_path: Path) -> None:
    split = plan_split("tiny", TARGET.config, degree=2, same_bits=False)
    opened = open_model(str(write_tiny(tmp_path, TARGET.config, TARGET.weights)))
    weights = describe_weights(opened.source, TARGET.config)
    bare = bytes_of_ranks(weights, TARGET.config, split, kv_bytes=0)
    assert bytes_of_ranks(weights, TARGET.config, split, kv_bytes=200) == [bare[0] + 100, bare[1] + 100]


def test_ranks_share_one_machine() -> None:
    check_memory([300, 300], [Need(150, 50), Need(100)])
    check_memory([300], [Need(300)])
    mib, one, other = f"MiB ({MIB} bytes)", Need(160 * MIB, 40 * MIB), Need(100 * MIB)
    said = (
        f"rank 0 needs 200 MiB ({200 * MIB} bytes) for weights and KV cache, 40 MiB ({40 * MIB} bytes) of them for "
        f"drafters, beside 100 MiB ({100 * MIB} bytes) of the other ranks, and 250 MiB ({250 * MIB} bytes) are free: "
        "lower kv_memory"
    )
    with pytest.raises(OutOfMemory, match=re.escape(said)):
        check_memory([250 * MIB, 250 * MIB], [one, other])
    with pytest.raises(OutOfMemory, match=r"rank 1 needs 100 MiB .* for weights and KV cache beside 200 MiB"):
        check_memory([900 * MIB, 120 * MIB], [one, other])
    with pytest.raises(OutOfMemory, match=re.escape(f"for weights and KV cache, and 1 {mib} are free")):
        check_memory([MIB], [Need(2 * MIB)])


@pytest.mark.parametrize("degree", [1, 2])
def test_a_drafter_counts_where_its_parts_are(degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole on rank 0, or split as its target is: then no rank has the weights of another one."""
    needs: list[Need] = []

    def refuse(free: list[int], each: list[Need]) -> None:
        needs.extend(each)
        raise OutOfMemory("seen")

    monkeypatch.setattr(forward, "check_memory", refuse)
    monkeypatch.setattr(rank_threads, "default_threads", lambda: 2)
    monkeypatch.setattr(forward, "Ranks", lambda degree, **options: SimpleNamespace(memory=[], close=lambda: None))
    path = str(write_model(tmp_path))
    options: dict[str, Any] = {"format": "fp32", "tensor_parallel": 2, "drafter_tensor_parallel": degree}
    with pytest.raises(OutOfMemory, match="seen"):
        LLM(path, drafter=f"model:{path}", max_sequences=4, **options)
    [first, second] = needs
    if degree == 1:
        assert first.drafters > first.target, "all of a model like the target, and it has half of that itself"
        assert second.drafters == 0
    else:
        assert (first.drafters, second.drafters) == (first.target, second.target), "as the target's own parts"


def test_an_engine_counts_its_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a draft model that are still to be read, and its part of the KV memory."""
    needs: list[int] = []
    monkeypatch.setattr(forward, "check_memory", lambda free, each: needs.extend(need.bytes for need in each))
    path = str(write_model(tmp_path))
    options = {"format": "fp32", "same_bits_across_degrees": True, "max_sequences": 4}
    bare, drafting = (LLM(path, drafter=words, **options) for words in ([], [f"model:{path}"]))  # type: ignore[arg-type]
    memory, page_bytes = drafting.parts.memory, bare.parts.memory.page_bytes
    assert memory.num_pages == bare.parts.memory.num_pages, "as many as four sequences can use"
    assert memory.page_bytes > page_bytes
    weights = sum(part.bytes for part in bare.parts.target.parts)
    assert needs[1] - needs[0] == weights + memory.num_pages * (memory.page_bytes - page_bytes)


def test_a_drafter_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target alone would have room."""
    path = str(write_model(tmp_path))
    options = {"format": "fp32", "same_bits_across_degrees": True, "max_sequences": 4, "kv_memory": 8 * MIB}
    bare = LLM(path, drafter=[], **options)  # type: ignore[arg-type]
    room = sum(part.bytes for part in bare.parts.target.parts) * 3 // 2
    room += bare.parts.memory.num_pages * bare.parts.memory.page_bytes
    monkeypatch.setattr(ranks, "available_memory", lambda: room)
    LLM(path, drafter=[], **options)  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory, match=r"rank 0 needs .* for weights and KV cache, .* of them for drafters"):
        LLM(path, drafter=[f"model:{path}"], **options)  # type: ignore[arg-type]
