from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.errors import InvalidRequest, UnknownOption

OPTIONAL = ("max_context", "kv_memory")
FLAGS = ("prefix_cache", "measure_cost", "measure_speedup", "fixed_draft", "same_bits_across_degrees")
REALS = ("max_prompt_seconds", "min_acceptance", "drafter_timeout", "rank_timeout", "synthetic_acceptance")
NAMES = ("kv_format", "default_drafter")
INTEGERS = tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name not in (*OPTIONAL, *FLAGS, *REALS, *NAMES))


@pytest.mark.parametrize("name", [*INTEGERS, *OPTIONAL])
@pytest.mark.parametrize("value", [-1, 1.5, True, "8", math.nan])
def test_integers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        EngineConfig.of(**{name: value})


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1", None])
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        EngineConfig.of(**{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"max_sequences": 0},
        {"max_step_tokens": 0},
        {"max_draft": 0},
        {"min_acceptance": 1.5},
        {"drafter_timeout": 0},
        {"rank_timeout": 0},
        {"tensor_parallel": 0},
        {"drafter_tensor_parallel": 0},
        {"drafter_tensor_parallel": 2, "tensor_parallel": 4},
        {"drafter_tensor_parallel": 2},
        {"same_bits_across_degrees": 1},
        {"max_context": 1},
        {"kv_memory": 0},
        {"kv_format": "fp16"},
        {"default_drafter": 8},
        {"prefix_cache": "no"},
        {"measure_cost": 1},
        {"fixed_draft": 1},
        {"synthetic_acceptance": 1.1},
    ],
)
def test_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(given))):
        EngineConfig.of(**given)


def test_a_drafter_runs_on_one_rank_or_on_all() -> None:
    assert EngineConfig.of(tensor_parallel=4).drafter_tensor_parallel == 1
    assert EngineConfig.of(tensor_parallel=4, drafter_tensor_parallel=4).drafter_tensor_parallel == 4
    with pytest.raises(InvalidRequest, match=r"on rank 0 alone or on all 4 ranks of tensor_parallel; take 1 or 4$"):
        EngineConfig.of(tensor_parallel=4, drafter_tensor_parallel=2)
    with pytest.raises(InvalidRequest, match=r"drafter_tensor_parallel 2: .*; take 1$"):
        EngineConfig.of(drafter_tensor_parallel=2)


def test_speculation_can_be_limited_to_nothing() -> None:
    config = EngineConfig.of(max_draft_tokens=0, max_draft_batch=0, max_draft_context=0)
    assert config.max_draft_tokens == 0


def test_a_gpu_has_room_for_more() -> None:
    cpu, gpu = EngineConfig.of(), EngineConfig.of(device="cuda", max_draft_batch=3)
    assert gpu.max_step_tokens > cpu.max_step_tokens
    assert gpu.max_draft_batch == 3
    assert (cpu.measure_speedup, gpu.measure_speedup) == (True, False)


def test_a_misspelt_option() -> None:
    with pytest.raises(UnknownOption, match="unknown engine option 'max_drafts'; did you mean 'max_draft'"):
        EngineConfig.of(max_drafts=3)
