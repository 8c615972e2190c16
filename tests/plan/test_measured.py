"""The model of a pass against everything that was measured on one H200 and stored in docs/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.plan.against import Cell, cells, mean_draft
from paceline.plan.drafting import paper_drafter
from paceline.plan.size import model_size
from paceline.plan.speed import tokens_per_step
from tests.plan.plans import H200_MEMORY, plan

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STORED = sorted([*RESULTS.glob("engine-*.json"), *RESULTS.glob("reading-*.json")])
WITHIN = 0.15
PLAIN = [f"llama-3.1-8b, plain, batch {batch}" for batch in (1, 8, 16, 32, 64, 128, 256)]
SYNTHETIC = "synthetic speculative, batch"
LISTED = {
    *PLAIN,
    *(f"llama-3.1-8b + llama-3.2-1b, 4.00 drafted, {SYNTHETIC} {batch}" for batch in (8, 16, 32, 64)),
    *(f"llama-3.1-8b + eagle-shape, 4.00 drafted, {SYNTHETIC} {batch}" for batch in (32, 64)),
    *(f"qwen3-32b + qwen3-1.7b, 3.00 drafted, {SYNTHETIC} {batch}" for batch in (1, 16)),
    "qwen3-32b, plain, batch 1",
    "llama-3.2-1b, plain, batch 1",
    "llama-3.1-8b, reading 1 × 16384 tokens",
    "llama-3.1-8b, reading 16 × 2048 tokens",
}


def stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def compared() -> dict[str, list[Cell]]:
    return {path.name: cells(stored(path)) for path in STORED}


@pytest.mark.parametrize("name", [path.name for path in STORED])
def test_every_stored_step_is_within_15_percent(compared: dict[str, list[Cell]], name: str) -> None:
    assert compared[name]
    far = [f"{cell.name}: {cell.error:+.1%}" for cell in compared[name] if abs(cell.error) > WITHIN]
    assert not far


def test_the_listed_cells_are_among_them(compared: dict[str, list[Cell]]) -> None:
    assert {cell.name for found in compared.values() for cell in found} >= LISTED
    assert sum(map(len, compared.values())) > 100


def test_no_constant_leans_to_one_side(compared: dict[str, list[Cell]]) -> None:
    errors = [cell.error for found in compared.values() for cell in found]
    assert abs(sum(errors) / len(errors)) < 0.05


@pytest.mark.parametrize("acceptance", ["-0.3", "-0.6", "", "-0.9"])
def test_speeds_of_a_governor_follow_from_its_acceptance(acceptance: str) -> None:
    record = stored(RESULTS / f"engine-llama-3.1-8b-governed{acceptance}.json")
    setup = record["setup"]
    machine = plan(drafter=setup["drafter"]).machine
    for batch in record["batches"]:
        best = machine.best_step(batch["batch"], 228, longest=setup["draft"], acceptance=setup["acceptance"])
        assert best.tok_s == pytest.approx(batch["synthetic_speculative"]["tok_s"], rel=0.1)


def test_only_trees_are_left_out() -> None:
    tree = stored(RESULTS / "engine-smollm2-tree.json")
    assert {cell.name for cell in cells(tree)} == {"smollm2, plain, batch 1", "smollm2, plain, batch 16"}


@pytest.mark.parametrize("name", ["engine-llama-3.1-8b.json", "engine-llama-3.1-8b-head.json", "engine-qwen3-32b.json"])
def test_tokens_of_a_step_follow_from_acceptance_and_length(name: str) -> None:
    record = stored(RESULTS / name)
    setup = record["setup"]
    for batch in record["batches"]:
        found = batch["synthetic_speculative"]
        assert found["tokens_per_step"] == pytest.approx(tokens_per_step(setup["acceptance"], setup["draft"]), rel=0.02)
        assert mean_draft(found) == pytest.approx(setup["draft"], abs=0.03)


@pytest.mark.parametrize("name", ["engine-llama-3.1-8b.json", "engine-qwen3-32b.json", "engine-llama-3.2-1b.json"])
def test_bytes_are_those_that_the_engine_counted(name: str) -> None:
    record = stored(RESULTS / name)
    size = model_size(record["setup"]["target"], format="auto", kv_format="bf16", memory=H200_MEMORY)
    assert size.few.bytes == record["engines"]["plain"]["target_weights"]
    assert size.kv_token() == record["engines"]["plain"]["target_kv"]


def test_bytes_of_a_drafter_are_those_that_the_engine_counted() -> None:
    record = stored(RESULTS / "engine-llama-3.1-8b.json")
    size = model_size("llama-3.2-1b", format="fp8", kv_format="bf16", memory=H200_MEMORY)
    counted = record["engines"]["speculative"]  # the engine counts 8-bit floats and the 16 bits beside them
    assert size.few.bytes + size.many.bytes == counted["drafter_weights"]
    assert size.kv_token() == counted["drafter_kv"]


def test_bytes_of_a_copy_are_those_that_the_engine_counted() -> None:
    record = stored(RESULTS / "engine-smollm2-self.json")
    size = model_size("smollm2", format="bf16", kv_format="bf16", memory=H200_MEMORY)
    copy = paper_drafter("self:int4-all", "smollm2", size, kv_format="bf16", memory=H200_MEMORY)
    assert copy is not None
    assert copy.weight_bytes == record["engines"]["speculative"]["drafter_weights"]


def test_records_that_do_not_fit_are_errors() -> None:
    with pytest.raises(InvalidRequest, match="not one of 'serve'"):
        cells({"benchmark": "serve"})
    record = stored(RESULTS / "engine-llama-3.2-1b.json")
    record["machine"]["gpu"] = "NVIDIA A100"
    with pytest.raises(InvalidRequest, match=r"of NVIDIA A100, and a plan knows NVIDIA H200"):
        cells(record)
