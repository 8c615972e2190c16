"""Laws 1, 2, 4 and 6 for a compiled model that is split over two processes.

It is bitwise, so speculation changes neither a token nor the bits of its log-probability, and keys and values are those
of a fresh prefill to the bit. Texts are compared with those of the same split: another one adds in another order.
Of two draft models on the same processes one is compiled and one runs in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.weights import Format
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.ranks import Ranks
from paceline.types import Rule
from tests.laws import test_law_4_kv, under_law
from tests.laws.test_law_4_kv import assert_remembered, walk
from tests.laws.test_split_models import (
    COUNT,
    MIXES,
    NAMES,
    NEIGHBOURS,
    across,
    engine,
    made,
    requests,
    said,
    write_target_and_drafter,
)
from tests.rig import Rig
from tests.rig_drafters import Made
from tests.runner.parallel.split_models import PATIENCE, split_over
from tests.runs import Key, plain, run, tokens_of
from tests.tiny_models import TARGET, random_weights

Said = dict[Key, tuple[list[int], list[Any]]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_and_drafter(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, threads=1, timeout=PATIENCE)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alone(two: Ranks, path: Path) -> Callable[[str], Said]:
    """What each request says without speculation, all of them in one batch."""

    @functools.cache
    def answers(law: str) -> Said:
        return said(run(split(two, path), plain(requests(law, logprobs=3))))

    return answers


def split(ranks: Ranks, path: Path, drafters: dict[str, Made] | None = None, **options: Any) -> Rig:
    rig = engine(ranks, path, drafters, format="int8", **options)
    assert isinstance(rig.forward, SplitForward)
    assert rig.forward.bitwise
    return rig


def drafters(path: Path, law: str, names: tuple[str, ...], *, count: int = COUNT) -> dict[str, Made]:
    return {
        name: made(path, name, law, count=count, backend="compiled", format="int8" if name == "split" else "fp32")
        for name in names
    }


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_all_drafters_in_one_batch(two: Ranks, path: Path, law: str, alone: Callable[[str], Said]) -> None:
    """Laws 1 and 2, chains and trees, with the bits of log-probabilities."""
    rig = split(two, path, drafters(path, law, NAMES))
    assert said(run(rig, requests(law, logprobs=3), every=2)) == alone(law)
    assert rig.engine.stats.accepted > 0
    assert all(guard.out is None for guard in rig.engine.drafters.values())


@pytest.mark.slow
@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_each_drafter(two: Ranks, path: Path, name: str, law: str) -> None:
    rig = split(two, path, drafters(path, law, (name,), count=9))
    asked = under_law.asked(name, "compiled", law, (Rule.COUPLED,))
    assert tokens_of(run(rig, asked)) == tokens_of(run(split(two, path), plain(asked)))
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize("mix", MIXES)
def test_in_any_mix(two: Ranks, path: Path, mix: str, alone: Callable[[str], Said]) -> None:
    """Law 6, with preemption where pages are few."""
    rig = split(two, path, drafters(path, "sampled", NEIGHBOURS), **MIXES[mix])
    told = said(run(rig, requests("sampled", NEIGHBOURS, logprobs=3), every=1))
    expected = alone("sampled")
    assert told == {key: expected[key] for key in told}
    assert (rig.engine.stats.preemptions > 0) == (mix == "few pages")


@pytest.mark.parametrize("name", ["tree", "split", "layers"])
def test_a_walk_leaves_the_kv_of_a_prefill(two: Ranks, path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 4, bit by bit: heads of both ranks, and what the prefix cache remembers."""
    fresh = split_over(two, path, same_bits=False, num_pages=10, format="int8")
    monkeypatch.setattr(test_law_4_kv, "fresh_forward", lambda backend: fresh)
    rig = split(two, path, drafters(path, "sampled", (name,)))
    asked = [replace(r, cache_salt=str(i % 2)) for i, r in enumerate(under_law.requests("sampled", (Rule.COUPLED,)))]
    told = walk(rig, "compiled", asked)
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    assert_remembered(rig, "compiled", asked, told)


# ── the same bits at every degree ──

WIDE = replace(TARGET.config, num_heads=8, head_dim=32, intermediate_size=160)  # four shards, of unequal MLP columns


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_and_drafter(tmp_path_factory.mktemp("wide"), WIDE, random_weights(WIDE, seed=3))


@pytest.mark.parametrize(
    ("law", "mix", "format"),
    [
        ("greedy", "usual", "int4"),
        ("sampled", "few pages", "int4"),
        pytest.param("sampled", "usual", "int4-all", marks=pytest.mark.slow),
    ],
)
def test_one_process_and_two_say_the_same(two: Ranks, wide: Path, law: str, mix: str, format: Format) -> None:
    """Tokens, log-probabilities, keys and values, to the bit: shards are added within a rank, then across ranks."""
    one = across(Ranks(1, threads=1), wide, law, mix, format=format)
    other = across(two, wide, law, mix, format=format)
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    assert one[2] == other[2]
    assert (one[2][0] > 0) == (mix == "few pages")


def test_other_bits_if_not_asked_for(two: Ranks, wide: Path) -> None:
    """Without `same_bits` one process and two differ, so that comparing them says something."""
    one = across(Ranks(1, threads=1), wide, "greedy", "usual", format="int4", same_bits=False)
    other = across(two, wide, "greedy", "usual", format="int4", same_bits=False)
    assert one[0] != other[0]
