"""Models that are asked to be split: what is refused before weights are read, and what the result says of itself."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.drafters.model import ModelDrafter
from paceline.drafters.registry import recipe
from paceline.engine.assemble import read_target
from paceline.engine.hot import HotDrafters
from paceline.errors import InvalidRequest, OutOfMemory
from paceline.kernels.cpu.topology import Core, Machine
from paceline.llm import LLM
from paceline.models.weights import Format
from paceline.runner.loading import rank_threads
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.runner.loading.splitting import split_model
from paceline.runner.parallel import ranks
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.split import Split
from paceline.types import SamplingParams, Speculation
from tests.cli.tiny_model import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_threads, "default_threads", lambda: 4)


def split(ready: ReadyModel, degree: int = 2, *, same_bits: bool = False, threads: int | None = None) -> ReadyModel:
    return split_model(ready, degree=degree, same_bits=same_bits, timeout=3.0, threads=threads)


def test_it_says_how_it_runs(path: Path) -> None:
    ready = read_model(str(path), format="fp32")
    made = split(ready)
    assert made.why == "torch, split over 2 ranks"
    assert (made.compiled, made.bitwise, made.rank_timeout) == (False, False, 3.0)
    assert made.page_bytes == ready.page_bytes
    assert split(ready, 4).page_bytes == 2 * ready.page_bytes  # two key/value heads on four ranks
    assert (made.known_threads(None).threads, made.known_threads(3).threads) == (2, 3)
    assert split(ready, 2, same_bits=True).known_threads(None).threads == 1
    assert split(ready, 4, same_bits=True).known_threads(None).threads == 1


def test_a_quantised_file_runs_compiled() -> None:
    ready = read_model("smollm2")
    made = split(ready, 3, threads=2)
    assert made.stored is not None
    assert (made.stored.format, made.compiled, made.bitwise, made.has_whole_program) == ("native", True, True, False)
    assert made.why == f"{ready.why}, split over 3 ranks"
    assert made.page_bytes == ready.page_bytes
    assert made.unread_bytes == ready.unread_bytes
    assert (made.known_threads(None).threads, made.known_threads(3).threads) == (1, 3)


def test_a_quantised_file_is_read_as_floats_where_nothing_is_compiled() -> None:
    ready = replace(read_model("smollm2"), compiled=False)
    made = split(ready, 3)
    assert made.stored is not None
    assert (made.stored.format, made.compiled, made.why) == ("fp32", False, "torch, split over 3 ranks")
    assert made.unread_bytes == 4 * sum(part.parameters for part in made.parts)


def test_copies_of_heads_in_a_compiled_model(path: Path) -> None:
    """Two key/value heads: the same on both ranks of a pair, but once for the two shards of a rank."""
    ready = read_model(str(path), format="int4")
    assert split(ready, 2).page_bytes == ready.page_bytes
    assert split(ready, 2, same_bits=True).page_bytes == ready.page_bytes
    assert split(ready, 2, same_bits=True, threads=2).known_threads(2).threads == 2


@pytest.mark.parametrize(
    ("degree", "options", "message"),
    [
        (5, {}, "tensor_parallel 5: each rank needs a core, and this process may use 4; take 4 at most"),
        (3, {}, "tensor_parallel 3: .* can be split over 1, 2 or 4 ranks only"),
        (2, {"same_bits": True, "threads": 2}, "threads 2: for the same bits across degrees each rank has one thread"),
    ],
)
def test_what_cannot_be_split(path: Path, degree: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        split(read_model(str(path), format="fp32"), degree, **options)


def test_formats_and_places_that_are_not_split(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"tensor_parallel 2: int8 weights of .* do not run compiled here"):
        split(replace(read_model(str(path), format="int8"), compiled=False))
    with pytest.raises(InvalidRequest, match=r"with one scale for all inputs, .*; take format int4"):
        split(read_model(str(path), format="int8"), 1, same_bits=True)
    with pytest.raises(
        InvalidRequest,
        match=r"tensor_parallel 4: .* 4 attention heads and 2 key/value heads of 16, "
        "weights in groups of 32 inputs, and can be split over 1 or 2 ranks only",
    ):
        split(read_model(str(path), format="int4"), 4)
    monkeypatch.setattr(rank_threads, "default_threads", lambda: 100)
    with pytest.raises(InvalidRequest, match="this process may use 100; take 64 at most"):
        split(read_model(str(path), format="int4"), 65)
    with pytest.raises(InvalidRequest, match=r"ranks read weights from files, and .* has none"):
        split(replace(read_model(str(path), format="fp32"), stored=None))
    decoder: Any = SimpleNamespace(device=torch.device("cuda"), weight_bytes=0)
    with pytest.raises(InvalidRequest, match="on cuda ranks read a model when its engine starts"):
        split(replace(read_model(str(path), format="fp32"), decoder=decoder))
    with pytest.raises(
        InvalidRequest,
        match="tensor_parallel 2: on cuda ranks read a model when its engine",
    ):
        read_target("nowhere", device="cuda", config=EngineConfig.of(tensor_parallel=2))


def beside(path: Path, **changes: Any) -> ReadyModel:
    """A target over two ranks that splits its drafters."""
    ready = split(read_model(str(path), format=changes.pop("format", "fp32")), **changes)
    return replace(ready, splits_drafters=True)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("model:{path},format=fp32", "torch, split over 2 ranks"),
        ("model:{path},format=int4", "kernels, split over 2 ranks"),
        ("self:int4", "the target in int4, with KV memory of its own"),
    ],
)
def test_a_drafter_over_the_ranks_of_its_target(path: Path, words: str, why: str) -> None:
    made = recipe(words.format(path=path), beside(path))
    assert made.how.endswith(why)
    assert made.model is not None
    assert (made.model.split, made.model.rank_timeout, made.model.shortlist) == (
        Split(degree=2, shards=2, packed=made.model.compiled),
        3.0,
        False,
    )
    alone = recipe(words.format(path=path), split(read_model(str(path), format="fp32")))
    assert alone.model is not None
    assert alone.model.split is None


def test_a_drafter_with_the_same_bits(path: Path) -> None:
    """The drafter's format is one that can be cut within a rank."""
    made = recipe(f"model:{path}", beside(path, format="int4", same_bits=True))
    assert made.model is not None
    assert made.model.stored is not None
    assert (made.model.stored.format, made.model.split) == ("int4-all", Split(2, 2, same_bits=True, packed=True))
    with pytest.raises(InvalidRequest, match=r"weights of .* with one scale for all inputs"):
        recipe(f"model:{path},format=int8", beside(path, degree=1, same_bits=True))


def test_layers_are_not_measured_over_ranks() -> None:
    with pytest.raises(InvalidRequest, match="over text, and smollm2 is split over ranks: take a number of layers"):
        recipe("layers:auto", split(read_model("smollm2"), 3))


def test_drafters_that_cannot_be_split(path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match="drafter_tensor_parallel 2: smollm2 has 9 attention heads and 3 key/value heads"
    ):
        recipe("model:smollm2", beside(path))
    with pytest.raises(InvalidRequest, match="drafter_tensor_parallel 2: ranks read weights from files, and small has"):
        recipe("model:shape:small", beside(path))
    options: dict[str, Any] = {"tensor_parallel": 2, "drafter_tensor_parallel": 2}
    for words in ("eagle:nowhere", "block:nowhere", "medusa:nowhere", "mtp"):
        with pytest.raises(InvalidRequest, match=f"2: the drafter {words.partition(':')[0]} runs whole on rank 0"):
            LLM("nowhere", drafter=[f"model:{path}", words], **options)
    with pytest.raises(InvalidRequest, match="drafter_tensor_parallel 2: there is no draft model to split"):
        LLM("nowhere", drafter=["ngram"], **options)


def test_an_llm_with_a_split_drafter(path: Path) -> None:
    """From the option to the processes: the ranks of the target have the drafter, too."""
    options: dict[str, Any] = {"tensor_parallel": 2, "drafter_tensor_parallel": 2, "measure_cost": False}
    made = LLM(str(path), format="int4", drafter=[f"model:{path},format=int4"], **options)
    target = made.parts.context.target
    assert isinstance(target, SplitForward)
    assert "model" in made.parts.drafters
    drafter = made.engine.drafters["model"]._drafter
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter.forward, SplitForward)
    assert drafter.forward.ranks is target.ranks
    plain = LLM(str(path), format="int4", drafter=[])
    assert made.generate("abcabc", GREEDY)[0].tokens == plain.generate("abcabc", GREEDY)[0].tokens
    assert made.engine.stats.accepted > 0
    with pytest.raises(InvalidRequest, match="the drafter model is split over 2 ranks, which cannot read it while"):
        HotDrafters(made.parts).load(f"model:{path}", name="other")
    hot, drafted = HotDrafters(made.parts), made.engine.stats.drafted
    hot.join(hot.load("layers:1"))
    again = made.generate("abcabc", GREEDY, speculation=Speculation(drafter="layers"))[0]
    assert again.tokens == plain.generate("abcabc", GREEDY)[0].tokens
    assert made.engine.stats.drafted > drafted
    with pytest.raises(InvalidRequest, match="the drafter medusa runs whole on rank 0"):
        HotDrafters(made.parts).load("medusa:nowhere", name="other")


def test_a_rank_without_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemory, match=r"rank 0 needs .*, and 1 MiB \(1048576 bytes\) are free"):
        LLM(str(path), format="fp32", drafter=[], same_bits_across_degrees=True, kv_memory=8 << 20)


@pytest.mark.parametrize("format", ["fp32", "int4"])
def test_an_llm_in_shards(path: Path, format: Format) -> None:
    """One process with the shards of every degree says what the unsplit model says."""
    before = torch.get_num_threads()
    made = LLM(str(path), format=format, drafter=[], same_bits_across_degrees=True)
    assert isinstance(made.parts.context.target, SplitForward)
    assert made.parts.bitwise == (format == "int4")
    whole = LLM(str(path), format=format, drafter=[])
    assert made.generate("abcabc", GREEDY)[0].tokens == whole.generate("abcabc", GREEDY)[0].tokens
    [one], [other] = made.embed("abc"), whole.embed("abc")
    assert torch.tensor(one).dot(torch.tensor(other)).item() == pytest.approx(1, abs=1e-3 if format == "int4" else 1e-5)
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 1, 8), (8, 2, 4), (8, 4, 2), (7, 2, 3), (1, 2, 1)])
def test_ranks_share_cores(cores: int, ranks: int, threads: int) -> None:
    """Ranks times threads are never more than the cores where each rank can have one."""
    assert rank_threads.threads_by_cores(cores, ranks) == threads


@pytest.mark.parametrize(("format", "threads"), [("fp32", 1), ("int4", 2)])
def test_cores_are_no_wish_for_threads(path: Path, format: Format, threads: int) -> None:
    """A cluster reserves cores for a replica: the same bits in torch need one thread, whatever it reserves."""
    before = torch.get_num_threads()
    made = LLM(str(path), format=format, drafter=[], same_bits_across_degrees=True, cores=2)
    assert isinstance(made.parts.context.target, SplitForward)
    assert made.parts.context.target.ranks.threads == threads
    asked = LLM(str(path), format="int4", drafter=[], same_bits_across_degrees=True, cores=2, threads=1)
    assert isinstance(asked.parts.context.target, SplitForward)
    assert asked.parts.context.target.ranks.threads == 1
    torch.set_num_threads(before)


def machine_of(*nodes: int) -> Machine:
    """A machine whose core i is of node `nodes[i]`, with two CPUs a core."""
    return Machine(tuple(Core((i, i + 100), node=node, efficient=False) for i, node in enumerate(nodes)))


def kept(machine: Machine, rank: int, *, degree: int, threads: int) -> list[int]:
    """The cores that a worker keeps to."""
    cpus = rank_threads.cpus_of_a_rank(machine, rank, degree=degree, threads=threads)
    assert {cpu for cpu in cpus if cpu >= 100} == {cpu + 100 for cpu in cpus if cpu < 100}
    return sorted(cpu for cpu in cpus if cpu < 100)


TWO, FOUR = machine_of(*[0] * 4, *[1] * 4), machine_of(*[0] * 2, *[1] * 2, *[2] * 2, *[3] * 2)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_few_threads_are_still_spread_over_the_nodes(threads: int) -> None:
    """Rank 0, which starts the workers, takes the first cores anyway."""
    assert kept(TWO, 0, degree=2, threads=threads) == []
    assert kept(TWO, 1, degree=2, threads=threads) == [4, 5, 6, 7]


def test_a_worker_is_held_to_nodes_and_to_no_core_of_them() -> None:
    """Else the ranks of several servers on one machine would be held to the same cores, beside cores that idle."""
    assert [kept(TWO, rank, degree=4, threads=1) for rank in range(4)] == [[], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert [kept(FOUR, rank, degree=4, threads=2) for rank in (1, 2, 3)] == [[2, 3], [4, 5], [6, 7]]


def test_a_worker_with_many_threads_has_several_nodes() -> None:
    assert kept(FOUR, 1, degree=2, threads=4) == [4, 5, 6, 7]
    assert kept(FOUR, 1, degree=2, threads=2) == [4, 5]
    assert kept(machine_of(0, 0, 0, 1), 1, degree=2, threads=2) == [0, 1, 2, 3], "it needs cores of both"


def test_a_worker_without_room_runs_anywhere() -> None:
    assert kept(TWO, 1, degree=2, threads=5) == []
    assert kept(machine_of(*[0] * 8), 1, degree=2, threads=4) == [], "there is one node"


def test_a_second_model_has_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that keeps to its nodes sees no others, and would look for its place among those."""
    held: list[set[int]] = []
    monkeypatch.setattr(rank_threads, "_whole_machine", cache(rank_threads._whole_machine.__wrapped__))
    monkeypatch.setattr(rank_threads, "read_machine", lambda: machine_of(2, 2, 3, 3) if held else FOUR)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: held.append(set(cpus)), raising=False)
    for _ in range(2):
        rank_threads.keep_to_own_cores(1, degree=2, threads=4)
    assert held == [{4, 5, 6, 7, 104, 105, 106, 107}] * 2


@pytest.mark.slow
def test_an_llm_over_compiled_ranks() -> None:
    """A quantised file with its own bits over three processes, by all that `tensor_parallel` goes through."""
    made = LLM("smollm2", drafter=[], tensor_parallel=3, rank_timeout=100)
    assert made.parts.bitwise
    whole = LLM("smollm2", drafter=[])
    prompts = ["The capital of France is", "def add(a, b):"]
    one, other = ([answer.tokens for answer in llm.generate(prompts, GREEDY)] for llm in (made, whole))
    assert one == other
