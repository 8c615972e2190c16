"""Laws 1, 2, 4 and 6 for a model that is split over two processes, and the same bits at every degree if asked for.

Torch computes, so texts are compared where no two tokens are nearly tied, as for an unsplit model in torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.runner.parallel.ranks import Ranks
from paceline.types import Request, Rule
from tests.laws import under_law
from tests.laws.test_law_4_kv import assert_remembered, walk
from tests.rig import RIGS, Made, Rig, build
from tests.runner.parallel.split_models import PATIENCE, split_over, write_tiny
from tests.runs import Key, Told, plain, run, tokens_of
from tests.tiny_models import TARGET

# Early layers and a copy on the target's KV memory need a whole model in one process.
NAMES = tuple(name for name in under_law.NAMES if name not in {*RIGS["layers"], *RIGS["self"]})
COUNT = len(NAMES)
MIXES: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "few pages": {"num_pages": 14},
    "no prefix cache": {"prefix_cache": False, "max_step_tokens": 9},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), TARGET.config, TARGET.weights)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, threads=1, timeout=PATIENCE)
    yield ranks
    ranks.close()


def engine(
    ranks: Ranks,
    path: Path,
    drafters: Mapping[str, Made] | None = None,
    *,
    same_bits: bool = False,
    num_pages: int = 160,
    format: str = "fp32",
    **options: Any,
) -> Rig:
    """An engine of the split model; drafters run whole, on rank 0."""
    taps = sorted({tap for made in (drafters or {}).values() for tap in getattr(made, "taps", ())})
    forward = split_over(ranks, path, same_bits=same_bits, num_pages=num_pages, taps=taps, format=format)
    return build("eager", drafters, forward=forward, num_pages=num_pages, **options)


def all_drafters(law: str, names: Sequence[str] = NAMES) -> dict[str, Made]:
    return {name: under_law.made(name, "eager", law, COUNT) for name in names}


def requests(law: str, names: Sequence[str] = NAMES, **changes: Any) -> list[Request]:
    """One request for each drafter."""
    asked = under_law.requests(law, (Rule.COUPLED,), count=COUNT)
    return [
        replace(each, speculation=replace(each.speculation, drafter=name), sampling=replace(each.sampling, **changes))
        for name, each in zip(names, asked, strict=False)
    ]


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_all_drafters_in_one_batch(two: Ranks, path: Path, law: str) -> None:
    """Laws 1 and 2, chains and trees; the texts are those of the unsplit model, too."""
    rig = engine(two, path, all_drafters(law))
    told = tokens_of(run(rig, requests(law), every=2))
    assert told == tokens_of(run(engine(two, path), plain(requests(law))))
    assert told == tokens_of(under_law.plain_answers("eager", law, COUNT))
    assert rig.engine.stats.accepted > 0
    assert all(guard.out is None for guard in rig.engine.drafters.values())


@pytest.mark.slow
@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_each_drafter(two: Ranks, path: Path, name: str, law: str) -> None:
    rig = engine(two, path, {name: under_law.made(name, "eager", law)})
    told = run(rig, under_law.asked(name, "eager", law, (Rule.COUPLED,)))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("eager", law))
    assert rig.engine.stats.drafted > 0


NEIGHBOURS = ("noisy", "ngram", "tree", "chain", "eagle")


@pytest.mark.parametrize("mix", MIXES)
def test_in_any_mix(two: Ranks, path: Path, mix: str) -> None:
    """Law 6, with preemption where pages are few."""
    rig = engine(two, path, all_drafters("sampled", NEIGHBOURS), **MIXES[mix])
    asked = requests("sampled", NEIGHBOURS)
    alone = under_law.plain_answers("eager", "sampled", COUNT)
    told = tokens_of(run(rig, asked, every=1))
    assert told == {key: alone[key].tokens for key in told}
    assert (rig.engine.stats.preemptions > 0) == (mix == "few pages")


def test_a_walk_leaves_the_kv_of_a_prefill(two: Ranks, path: Path) -> None:
    """Law 4: heads of both ranks, and what the prefix cache remembers."""
    rig = engine(two, path, {"tree": under_law.made("tree", "eager", "sampled")})
    asked = [replace(r, cache_salt=str(i % 2)) for i, r in enumerate(under_law.requests("sampled", (Rule.COUPLED,)))]
    told = walk(rig, "eager", asked)
    assert tokens_of(told) == tokens_of(under_law.plain_answers("eager", "sampled"))
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    assert_remembered(rig, "eager", asked, told)


ACROSS = ("noisy", "tree", "eagle", "suffix", "ngram")


def said(told: Mapping[Key, Told]) -> dict[Key, tuple[list[int], list[Any]]]:
    """Tokens with the bits of their log-probabilities."""
    return {key: (each.tokens, each.logprobs) for key, each in told.items()}


def kv_of(rig: Rig) -> torch.Tensor:
    slots = torch.from_numpy(np.arange(rig.forward.kv.num_pages * 16, dtype=np.int32))
    return torch.stack(rig.forward.kv.read(slots))


def across(
    ranks: Ranks, path: Path, law: str, mix: str, *, same_bits: bool = True, format: str = "fp32"
) -> tuple[dict[Key, Any], torch.Tensor, int]:
    """What requests say, the keys and values that they leave, and how many sequences had to give up their pages."""
    rig = engine(ranks, path, all_drafters(law, ACROSS), same_bits=same_bits, format=format, **MIXES[mix])
    told = said(run(rig, requests(law, ACROSS, logprobs=3), every=1))
    assert rig.engine.stats.accepted > 0
    return told, kv_of(rig), rig.engine.stats.preemptions


@pytest.mark.parametrize(("law", "mix"), [("greedy", "usual"), ("sampled", "few pages")])
def test_the_same_bits_at_every_degree(two: Ranks, path: Path, law: str, mix: str) -> None:
    one = across(Ranks(1, threads=1), path, law, mix)
    other = across(two, path, law, mix)
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    assert one[2] == other[2]
    assert (one[2] > 0) == (mix == "few pages")


@pytest.mark.slow
@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_the_same_bits_on_four_ranks(path: Path, law: str) -> None:
    """More ranks than key/value heads: some heads are on two ranks."""
    four = Ranks(4, threads=1, timeout=PATIENCE)
    one, other = across(Ranks(1, threads=1), path, law, "usual"), across(four, path, law, "usual")
    four.close()
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
