"""Laws 1, 2, 4 and 6 for a model that is split over two processes, and the same bits at every degree if asked for.

Drafters run whole on rank 0, but for draft models that are split over the same processes. Torch computes, so texts are
compared where no two tokens are nearly tied, as for an unsplit model in torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.models.config import ModelConfig
from paceline.runner.parallel.ranks import Ranks
from paceline.types import Request, Rule
from tests.laws import under_law
from tests.laws.test_law_4_kv import assert_remembered, walk
from tests.rig import Rig, build
from tests.rig_drafters import RIGS, Made
from tests.runner.parallel.split_models import PATIENCE, split_drafter, split_over, write_tiny
from tests.runs import Key, Told, plain, run, tokens_of
from tests.tiny_models import NOISY, TARGET

# A copy on the target's KV memory needs a whole model in one process. Early layers are split as the target is.
WHOLE = tuple(name for name in under_law.NAMES if name not in RIGS["self"])
SPLIT: Mapping[str, Mapping[str, Any]] = {"split": {}, "split-parallel": {"mask": 3}}
NAMES = (*WHOLE, *SPLIT)
COUNT = len(NAMES)
MIXES: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "few pages": {"num_pages": 14},
    "no prefix cache": {"prefix_cache": False, "max_step_tokens": 9},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_and_drafter(tmp_path_factory.mktemp("tiny"))


def write_target_and_drafter(
    path: Path, config: ModelConfig = TARGET.config, weights: Mapping[str, torch.Tensor] = TARGET.weights
) -> Path:
    """Save a model, and in a folder of it one that drafts for it."""
    folder = path / "drafter"
    folder.mkdir()
    write_tiny(folder, NOISY.config, NOISY.weights)
    return write_tiny(path, config, weights)


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
    """An engine of the split model."""
    taps = sorted({tap for made in (drafters or {}).values() for tap in getattr(made, "taps", ())})
    forward = split_over(ranks, path, same_bits=same_bits, num_pages=num_pages, taps=taps, format=format)
    return build("eager", drafters, forward=forward, num_pages=num_pages, **options)


def made(path: Path, name: str, law: str, *, count: int = COUNT, backend: str = "eager", **options: Any) -> Made:
    """`options`: of a drafter that is split."""
    if name in SPLIT:
        return split_drafter(path / "drafter", **{**SPLIT[name], **options})
    return under_law.made(name, backend, law, count)


def all_drafters(path: Path, law: str, names: Sequence[str] = NAMES, **options: Any) -> dict[str, Made]:
    return {name: made(path, name, law, **options) for name in names}


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
    rig = engine(two, path, all_drafters(path, law))
    told = tokens_of(run(rig, requests(law), every=2))
    assert told == tokens_of(run(engine(two, path), plain(requests(law))))
    assert told == tokens_of(under_law.plain_answers("eager", law, COUNT))
    assert rig.engine.stats.accepted > 0
    assert all(guard.out is None for guard in rig.engine.drafters.values())


@pytest.mark.slow
@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_each_drafter(two: Ranks, path: Path, name: str, law: str) -> None:
    rig = engine(two, path, {name: made(path, name, law, count=9)})
    told = run(rig, under_law.asked(name, "eager", law, (Rule.COUPLED,)))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("eager", law))
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize(("whole", "split"), [("noisy", "split"), ("layers", "layers")])
def test_a_split_drafter_drafts_what_a_whole_one_does(two: Ranks, path: Path, whole: str, split: str) -> None:
    asked, drafts = under_law.requests("greedy", (Rule.COUPLED,), count=4), []
    rigs = (
        build("eager", {whole: under_law.made(whole, "eager", "greedy")}),
        engine(two, path, {split: made(path, split, "greedy")}),
    )
    for rig in rigs:
        run(rig, asked)
        drafts.append((rig.engine.stats.drafted, rig.engine.stats.accepted))
    assert drafts[0] == drafts[1]
    assert 0 < drafts[0][1] < drafts[0][0]


NEIGHBOURS = ("noisy", "ngram", "tree", "chain", "eagle", "split", "layers")


@pytest.mark.parametrize("mix", MIXES)
def test_in_any_mix(two: Ranks, path: Path, mix: str) -> None:
    """Law 6, with preemption where pages are few."""
    rig = engine(two, path, all_drafters(path, "sampled", NEIGHBOURS), **MIXES[mix])
    asked = requests("sampled", NEIGHBOURS)
    alone = under_law.plain_answers("eager", "sampled", COUNT)
    told = tokens_of(run(rig, asked, every=1))
    assert told == {key: alone[key].tokens for key in told}
    assert (rig.engine.stats.preemptions > 0) == (mix == "few pages")


@pytest.mark.parametrize("name", ["tree", "split", "layers"])
def test_a_walk_leaves_the_kv_of_a_prefill(two: Ranks, path: Path, name: str) -> None:
    """Law 4: heads of both ranks, and what the prefix cache remembers."""
    rig = engine(two, path, {name: made(path, name, "sampled", count=9)})
    asked = [replace(r, cache_salt=str(i % 2)) for i, r in enumerate(under_law.requests("sampled", (Rule.COUPLED,)))]
    told = walk(rig, "eager", asked)
    assert tokens_of(told) == tokens_of(under_law.plain_answers("eager", "sampled"))
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    assert_remembered(rig, "eager", asked, told)


ACROSS = ("noisy", "tree", "eagle", "suffix", "ngram", "split", "layers")


def said(told: Mapping[Key, Told]) -> dict[Key, tuple[list[int], list[Any]]]:
    """Tokens with the bits of their log-probabilities."""
    return {key: (each.tokens, each.logprobs) for key, each in told.items()}


def kv_of(rig: Rig) -> torch.Tensor:
    slots = torch.from_numpy(np.arange(rig.forward.kv.num_pages * 16, dtype=np.int32))
    return torch.stack(rig.forward.kv.read(slots))


def across(
    ranks: Ranks, path: Path, law: str, mix: str, *, same_bits: bool = True, format: str = "fp32"
) -> tuple[dict[Key, Any], torch.Tensor, tuple[int, ...]]:
    """Run requests; return what they say, the keys and values that they leave, and counts of preemptions, drafted and
    accepted tokens."""
    drafters = all_drafters(path, law, ACROSS, same_bits=same_bits, format=format)
    rig = engine(ranks, path, drafters, same_bits=same_bits, format=format, **MIXES[mix])
    told, stats = said(run(rig, requests(law, ACROSS, logprobs=3), every=1)), rig.engine.stats
    assert stats.accepted > 0
    return told, kv_of(rig), (stats.preemptions, stats.drafted, stats.accepted)


@pytest.mark.parametrize(("law", "mix"), [("greedy", "usual"), ("sampled", "few pages")])
def test_the_same_bits_at_every_degree(two: Ranks, path: Path, law: str, mix: str) -> None:
    one = across(Ranks(1, threads=1), path, law, mix)
    other = across(two, path, law, mix)
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    assert one[2] == other[2]
    assert (one[2][0] > 0) == (mix == "few pages")


@pytest.mark.slow
@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_the_same_bits_on_four_ranks(path: Path, law: str) -> None:
    """More ranks than key/value heads: some heads are on two ranks."""
    four = Ranks(4, threads=1, timeout=PATIENCE)
    one, other = across(Ranks(1, threads=1), path, law, "usual"), across(four, path, law, "usual")
    four.close()
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
