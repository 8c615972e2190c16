"""What is counted and timed while prompts are read, on an engine with a clock of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.bench import reading
from paceline.bench.engine import Setup
from paceline.bench.reading import Beside, Prompts, read_beside, read_once
from paceline.cli.main import main
from paceline.errors import EngineDead, InvalidRequest
from paceline.kernels.base import Batch, Output
from paceline.types import OFF, Request, SamplingParams
from tests.rig import Rig, build
from tests.toy import ToyForward


class Timed(ToyForward):
    """A pass takes a millisecond a row."""

    now = 0.0

    def __call__(self, batch: Batch) -> Output:
        self.now += 1e-3 * len(batch.tokens)
        return super().__call__(batch)


def timed(**options: Any) -> tuple[Rig, Timed]:
    forward = Timed(num_pages=400)
    return build("toy", forward=forward, max_context=1000, clock=lambda: forward.now, **options), forward


def ask(name: str, length: int, tokens: int) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(id=name, prompt=tuple(i % 50 for i in range(length)), sampling=sampling, speculation=OFF)


@pytest.mark.parametrize(("text", "count", "length"), [("8192", 1, 8192), ("16x2048", 16, 2048)])
def test_prompts_in_words(text: str, count: int, length: int) -> None:
    assert Prompts.parse(text) == Prompts(count, length)
    assert Prompts.parse(str(Prompts(count, length))) == Prompts(count, length)


@pytest.mark.parametrize("text", ["", "x", "0", "0x5", "5x", "5x0", "-3", "1.5", "2x3x4"])
def test_prompts_that_cannot_be(text: str) -> None:
    with pytest.raises(InvalidRequest, match="given as 8192 or as 16x2048"):
        Prompts.parse(text)


def test_seconds_until_all_have_their_first_token() -> None:
    rig, forward = timed(max_step_tokens=40)
    took = read_once(rig.engine, [ask("a", 50, 1), ask("b", 30, 1)], clock=lambda: forward.now)
    assert took == pytest.approx(0.08)
    assert not rig.engine.has_work


def test_gaps_of_those_who_decode() -> None:
    """Two sequences wait for chunks of 38 tokens, three times, and for the last 6."""
    rig, forward = timed(max_step_tokens=40)
    others = [ask(name, 3, 500) for name in "ab"]
    found = read_beside(rig.engine, ask("long", 120, 1), others, clock=lambda: forward.now)
    assert len(found.gaps) == 2 * 4
    assert found.percentile(0.5) == found.percentile(0.99) == pytest.approx(0.04)
    assert min(found.gaps) == pytest.approx(0.008)
    assert found.seconds == pytest.approx(3 * 0.04 + 0.008)
    assert not rig.engine.has_work, "the others were ended"


def test_percentiles() -> None:
    gaps = Beside(1.0, tuple(i / 100 for i in range(100)))
    assert [gaps.percentile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [0.0, 0.5, 0.99, 0.99]


def test_an_engine_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, forward = timed()
    monkeypatch.setattr(type(forward), "__call__", lambda *_: 1 / 0)
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        read_once(rig.engine, [ask("a", 5, 1)], clock=lambda: 0.0)


def test_shares_in_words() -> None:
    line = {"count": 1, "length": 1024, "tok_s": 2048.0, "first_token_s": 0.5, "limit_share": 0.616}
    limits = {"variant": "avx2", "threads": 2, "bytes": 352e9, "floats": 110e9}
    found = {"limits": limits, "prompts": [line, line | {"limit_share": None}], "beside": None}
    assert reading.text(found).splitlines() == [
        "at best, avx2, 2 threads: 352 G multiply-adds/s of 8-bit products, 110 of attention",
        "1 × 1024: 2,048 tokens/s of reading, first token after 0.50 s, 62% of the arithmetic limit",
        "1 × 1024: 2,048 tokens/s of reading, first token after 0.50 s",
    ]


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InvalidRequest, match="without a drafter"):
        reading.measure(Setup(target="x", drafter="ngram"), (Prompts(1, 5),), None)
    with pytest.raises(InvalidRequest, match="a --batch of at least 2"):
        reading.measure(Setup(target="x"), (), 100)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench engine --target smollm2-135m --device cpu --format int8 --prompt-speed 40,2x20 --beside 60 --batch 3"
    assert main([*words.split(), "--prompt-tokens", "4", "--rounds", "1", "--json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [(line["count"], line["length"]) for line in found["prompts"]] == [(1, 40), (2, 20)]
    assert all(line["tok_s"] > 0 for line in found["prompts"])
    assert all(line["first_token_s"] * line["tok_s"] == pytest.approx(40) for line in found["prompts"])
    assert all(0 < line["limit_share"] < 1.2 for line in found["prompts"]), "more than the cores can do"
    assert min(found["limits"]["bytes"], found["limits"]["floats"]) > 0
    assert (found["beside"]["sequences"], found["beside"]["length"]) == (2, 60)
    assert found["beside"]["gaps"]["count"] >= 2
    assert main(["bench", "engine", "--target", "x", "--prompt-speed", "many"]) == 2
    assert "not as 'many'" in capsys.readouterr().err
