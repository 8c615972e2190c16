"""The choice among measured ways, within limits of latency, and the file that `serve` reads."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import build_parsers
from paceline.cli.serve import _for_loading, options_of
from paceline.errors import InvalidRequest
from paceline.server.launch import settings_of
from paceline.tune.choice import Choice, Measured, Slo, choose, nearest, settings, yaml
from paceline.tune.ways import DEFAULT, PLAIN


def cell(drafter: str, draft: int | None, batch: int, ratio: float, **more: Any) -> Measured:
    usual = {"ttft": 0.1 * batch, "tpot": 0.01 * batch / ratio, "void": False, "interval": None, "group": 0}
    return Measured(drafter=drafter, draft=draft, batch=batch, tok_s=100 * ratio, ratio=ratio, **{**usual, **more})


def both(one: float, eight: float, *, default: tuple[float, float] = (1.2, 1.0)) -> list[Measured]:
    pairs = ((PLAIN, None, (1.0, 1.0)), (DEFAULT, None, default), ("eagle:x", 4, (one, eight)))
    return [cell(name, draft, batch, r) for name, draft, rs in pairs for batch, r in zip((1, 8), rs, strict=True)]


def test_the_fastest_is_chosen() -> None:
    found = choose(both(2.0, 1.5), ())
    assert found is not None
    assert (found.drafter, found.draft, found.max_draft_batch, found.max_sequences) == ("eagle:x", 4, None, None)
    assert found.speed == pytest.approx(3**0.5)


def test_a_fixed_drafter_drafts_where_it_is_faster() -> None:
    found = choose(both(2.0, 0.5), ())
    assert found is not None
    assert (found.drafter, found.max_draft_batch, found.speed) == ("eagle:x", 1, pytest.approx(2**0.5))
    only_one = [each for each in both(2.0, 0.5) if (each.drafter, each.batch) != ("eagle:x", 8)]
    assert choose(only_one, ()) == found  # nobody measured it for eight


def test_the_default_drafts_where_it_is_not_slower() -> None:
    found = choose(both(1.5, 0.5, default=(2.0, 0.8)), ())
    assert found is not None
    assert (found.drafter, found.max_draft_batch, found.speed) == (DEFAULT, 1, pytest.approx(2**0.5))
    assert settings(found, ["a", "b"], name="", given={}) == {"drafter": ["a", "b"], "max_draft_batch": 1}
    near = choose(both(1.5, 0.5, default=(2.0, 0.99)), ())
    assert near is not None
    assert near.max_draft_batch is None  # it tries drafts from time to time
    unknown = [each for each in both(1.5, 0.5) if (each.drafter, each.batch) != (DEFAULT, 1)]
    assert (choose(unknown, ()) or found).drafter == "eagle:x"


def test_the_default_wins_a_draw() -> None:
    found = choose(both(2.0, 1.0, default=(1.98, 1.0)), ())
    assert found is not None
    assert found.drafter == DEFAULT
    assert "adapts" in found.why
    fastest = choose(both(1.0, 1.0), ())
    assert fastest is not None
    assert (fastest.drafter, fastest.why) == (DEFAULT, "the fastest")


def test_plain_decoding_may_be_the_best() -> None:
    found = choose(both(0.9, 0.7, default=(0.9, 0.9)), ())
    assert found is not None
    assert found.drafter == PLAIN
    assert settings(found, ["eagle:x"], name="", given={"model": "m"}) == {"model": "m", "drafter": []}


def test_limits_of_latency_come_first() -> None:
    found = choose(both(2.0, 1.5), [Slo.read("tpot=40ms")])
    assert found is not None
    assert (found.drafter, found.max_sequences) == ("eagle:x", 1)
    assert choose(both(2.0, 1.5), [Slo.read("tpot=1ms")]) is None
    near = nearest(both(2.0, 1.5), [Slo.read("tpot=1ms"), Slo.read("ttft=1s")])
    assert (near.drafter, near.batch) == ("eagle:x", 1)
    assert choose(both(2.0, 1.5), [Slo.read("ttft=0.05s")]) is None


@pytest.mark.parametrize("text", ["", "tpot", "tpot=40", "e2e=1s", "tpot=-1ms", "tpot=0ms", "tpot=1e9s"])
def test_limits_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--slo is such as"):
        Slo.read(text)


def test_a_limit_says_what_it_is() -> None:
    assert str(Slo.read("ttft=0.5s")) == "ttft=500ms"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(0, "eagle:x", 4, 8, 1, 1.5, ""), ["eagle:x"]),
        (Choice(0, DEFAULT, None, None, None, 1.5, ""), ["eagle:x", "suffix", "portfolio"]),
        (Choice(0, PLAIN, None, None, None, 1.0, ""), ["none"]),
    ],
)
def test_serve_reads_the_file(choice: Choice, expected: list[str], tmp_path: Path) -> None:
    given = {"model": "m", "threads": 2, "kv_memory": 1 << 20}
    options = settings(choice, ["eagle:x", "suffix", "portfolio"], name="eagle", given=given)
    file = tmp_path / "c.yaml"
    file.write_text(yaml(options, comments=["a\nb"]), encoding="utf-8")
    args: Namespace = build_parsers()[0].parse_args(["serve", "--config", str(file)])
    read = options_of(args, {})
    settings_of(read)
    loading = _for_loading(args, read)
    assert (loading.target, loading.drafter, loading.threads, loading.kv_memory) == ("m", expected, 2, 1 << 20)
    fixed = choice.draft is not None
    assert loading.default_drafter == ("eagle" if fixed else None)
    assert (loading.fixed_draft, loading.max_draft) == ((True, 4) if fixed else (None, None))
    assert (loading.max_sequences, loading.max_draft_batch) == ((8, 1) if fixed else (None, None))
