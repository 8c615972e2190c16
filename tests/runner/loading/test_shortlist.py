"""The sketch of a draft model's outputs: fitted when its weights are packed, and kept with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.cpu.build import load_library
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.heads import sketch
from paceline.runner.heads.protocol import TreeRequest
from paceline.runner.heads.sketch import EXACT, UP
from paceline.runner.heads.trees import OF_MODEL, TreeProgram
from paceline.runner.loading import models, shortlist
from paceline.runner.loading.models import ReadyModel, read_model
from tests.cli.tiny_model import write_model

PAGES = 4


@pytest.fixture(autouse=True)
def _small_layers_have_sketches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()  # compiled in the cache of all tests
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sketch, "MIN_OUTPUTS", 64)
    monkeypatch.setattr(sketch, "FITTED_RANK_DIVISOR", 2.0)


@pytest.fixture
def drafter(tmp_path: Path) -> ReadyModel:
    """A draft model with a vocabulary of whole tiles."""
    (tmp_path / "model").mkdir()
    special = ("<|end|>", "<|im_start|>", "<|im_end|>", *(f"<|{i}|>" for i in range(13)))
    model = write_model(tmp_path / "model", special=special)
    return read_model(str(model), format="int4-all", shortlist=True)


def build(ready: ReadyModel) -> CompiledForward:
    forward = ready.forward(num_pages=PAGES, threads=1, max_context=PAGES * PAGE_SIZE)
    assert isinstance(forward, CompiledForward)
    return forward


def text(seed: int) -> Batch:
    tokens = torch.randint(16, 272, (12,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    places, ends = torch.arange(12, dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
    table = torch.arange(PAGES, dtype=torch.int32)[None]
    noise = {"seeds": torch.zeros(1, dtype=torch.int64), "inverse_temperatures": torch.zeros(1)}
    return Batch(tokens, places, places, ends, ends[1:], table, logit_rows=places[-1:], **noise)


def agreement(forward: CompiledForward) -> float:
    """Share of drafted tokens that are the best of all outputs."""
    drafts = TreeProgram(forward.program, torch.arange(forward.vocab_size, dtype=torch.int32), OF_MODEL)
    hits = 0
    for seed in range(20):
        best = int(forward(text(seed)).argmax[0])
        [tree] = drafts.draft(text(seed), None, [TreeRequest(1, 0.0, 0.0)], width=1)
        hits += tree.tokens == [best]
    return hits / 20


def test_a_draft_computes_a_shortlist(drafter: ReadyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the best output though it computes few exactly; a sketch of another layer would not."""
    monkeypatch.setattr("paceline.runner.forwards.compiled.FITTED_EXACT_OUTPUTS", 1)
    assert agreement(build(drafter)) > 0.7
    write = shortlist.write_sketch
    monkeypatch.setenv("PACELINE_CACHE_SIZE", "0")
    monkeypatch.setattr(shortlist, "write_sketch", lambda pack, weight, *rest: write(pack, weight.flip(0), *rest))
    assert agreement(build(drafter)) < 0.5


def test_the_sketch_is_kept_with_the_weights(drafter: ReadyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = agreement(build(drafter))
    monkeypatch.setattr(models, "fill_shortlist", None)  # nothing is fitted at a second start
    assert agreement(build(drafter)) == first


def test_only_drafters_have_one(drafter: ReadyModel) -> None:
    target = replace(drafter, shortlist=False)
    assert UP not in target.packed(1)
    pack = drafter.packed(1)
    assert UP in pack
    assert drafter.unread_bytes == pack.layout.size > target.unread_bytes + pack.layout.items[EXACT].outputs


def test_its_prompts_are_among_what_decides_on_a_pack() -> None:
    """Other prompts would give other bytes under the same name in the cache."""
    from paceline.prompts.files import find
    from paceline.runner.loading.pack_cache import PACKAGE, PACKERS

    files = {str(find(name, data=None).relative_to(PACKAGE)) for name in shortlist.SOURCES}
    assert files <= set(PACKERS)
