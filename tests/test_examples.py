"""Every example runs on the embedded model and says what it promises."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.drafters.registry import REGISTRY
from paceline.llm import LLM

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "chat": ["Paris", "prompt tokens were already computed"],
    "custom_drafter": ["Wednesday, Thursday", "drafted tokens accepted", "same text: yes"],
    "generate_batch": ["'The three primary colours are' → ' ", "(length)"],
    "program_extract": ["please send 1 pencils", '"pencils", "count":', "rows extracted"],
    "program_rag": ["from Paris: ", "from Basketball: "],
    "program_tree": ["1.", "2.", "calls, 9 of them ratings"],
    "program_vote": ["votes: ", "most say: ", "16 calls"],
    "per_request": ["plain      16 steps,   0 of   0", "up to 16", "same text: yes"],
    "stream_in_colour": ["\x1b[32m", "tokens a step"],
}
MAX_TOKENS = {"chat": 16, "per_request": 16, "program_extract": 40}
FEWER = {"program_extract": {"rows": 4}}  # other arguments, so that a test takes seconds


@pytest.fixture(autouse=True)
def one_model_for_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading takes longer than a few tokens; and what an example registers does not stay."""
    before = dict(REGISTRY)
    monkeypatch.setattr(paceline, "LLM", load, raising=False)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@functools.cache
def load(target: str, *, drafter: str) -> LLM:
    return LLM(target, drafter=drafter)


def test_every_example_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(max_tokens=MAX_TOKENS.get(name, 12), **FEWER.get(name, {}))
    out = capsys.readouterr().out
    for promise in PROMISES[name]:
        assert promise in out
