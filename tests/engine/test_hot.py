"""Drafters that join and leave while sequences run: nothing is lost, no text changes, and memory comes back."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.guard import Guard
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.portfolio import PortfolioDrafter
from paceline.engine.hot import HotDrafters
from paceline.errors import InvalidRequest, OutOfMemory, PacelineError, UnknownOption
from paceline.llm import LLM
from paceline.types import Finish, OffKind, Request, SamplingParams, Speculation
from tests.cli.tiny_model import write_model
from tests.heads import write_head
from tests.odd_drafters import Silent
from tests.published_heads import LAYOUTS
from tests.rig import Rig, build
from tests.rig_drafters import RIGS, EagleMade
from tests.runs import Run, plain, prompt, run, tokens_of
from tests.tiny_models import VOCAB

LONG = SamplingParams(temperature=0, max_tokens=60)


def a_guard(**options: Any) -> Guard:
    return Guard(NgramDrafter(min_ngram=1, max_ngram=2), vocab_size=VOCAB, timeout=60.0, **options)


def requests(*names: str | None) -> list[Request]:
    return [
        Request(id=str(i), prompt=prompt(12, seed=i, repeat=True), sampling=LONG, speculation=Speculation(drafter=name))
        for i, name in enumerate(names)
    ]


def rig_of(*names: str, **options: Any) -> Rig:
    made = {name: made for kinds in RIGS.values() for name, made in kinds.items()}
    return build("toy", {name: made[name] for name in names}, **options)


@pytest.mark.parametrize("leaving", ["noisy", "eagle"])
def test_sequences_of_a_drafter_that_leaves_go_on_with_the_default(leaving: str) -> None:
    rig = rig_of("ngram", leaving)
    asked = requests(leaving, None, leaving)
    going = Run(rig)
    going.submit(asked)
    for _ in range(6):
        going.step()
    assert {each.drafter for each in rig.engine._scheduler.running} == {"ngram", leaving}
    rig.engine.remove_drafter(leaving)
    told = going.finish()
    assert {each.stats.drafter for each in told.values()} == {"ngram"}
    assert tokens_of(told) == tokens_of(run(rig_of("ngram"), plain(asked)))
    assert leaving not in rig.engine.snapshot().drafters


def test_sequences_go_on_plainly_if_the_default_needs_hidden_states_that_are_gone() -> None:
    rig = build("toy", {"eagle": EagleMade(), "ngram": RIGS["ngram"]["ngram"]})
    going = Run(rig)
    going.submit(requests("ngram"))
    for _ in range(4):
        going.step()
    rig.engine.remove_drafter("ngram")
    [told] = going.finish().values()
    assert told.stats.off is not None
    assert told.stats.off.kind is OffKind.DRAFTER_OUT
    assert "ngram was unloaded" in told.stats.off.detail


def test_a_waiting_sequence_and_one_that_comes_too_late_use_the_default() -> None:
    rig = rig_of("ngram", "noisy", max_sequences=1)
    asked = requests("noisy", "noisy", "noisy")
    going = Run(rig)
    going.submit(asked[:2])
    going.step()
    rig.engine.validate(asked[2])  # it was loaded when the request was checked
    rig.engine.remove_drafter("noisy")
    rig.engine.submit(asked[2], validated=True)
    going.told |= {("2", 0): type(going.told["0", 0])()}
    told = going.finish()
    assert [each.stats.drafter for each in told.values()] == ["ngram"] * 3
    with pytest.raises(UnknownOption):
        rig.engine.validate(asked[2])


def test_a_drafter_that_joins_drafts_for_requests_that_name_it() -> None:
    rig = rig_of("ngram")
    going = Run(rig)
    going.submit(requests(None))
    going.step()
    rig.engine.add_drafter("new", a_guard())
    going.submit(
        [Request(id="n", prompt=prompt(12, seed=4, repeat=True), sampling=LONG, speculation=Speculation(drafter="new"))]
    )
    told = going.finish()
    assert told["n", 0].stats.drafter == "new"
    assert told["n", 0].stats.drafted > 0


def test_the_default_can_change_and_be_nobody() -> None:
    rig = rig_of("ngram", "noisy")
    drafted = []
    for name in ("noisy", None, "ngram"):
        rig.engine.default_drafter = name
        [told] = run(rig, requests(None)).values()
        drafted.append(told.stats.drafter)
    assert drafted == ["noisy", None, "ngram"]


def test_what_was_learnt_of_a_name_does_not_pass_to_the_next_drafter() -> None:
    rig = rig_of("ngram", "noisy", measure_cost=True, measure_speedup=True)
    run(rig, requests("noisy"))
    governor = rig.engine._governor
    assert "noisy" in governor.cost._drafting
    rig.engine.remove_drafter("noisy")
    assert "noisy" not in governor.cost._drafting
    assert not [key for key in governor._limits if key[0] == "noisy"]
    assert governor.truth is not None
    assert not [key for key in governor.truth._groups if "noisy" in key[0]]


def test_a_guard_that_is_closed_ends_its_thread_and_calls_no_more() -> None:
    class Slow(Silent):
        inline = False
        closed = False

        def close(self) -> None:
            self.closed = True

    before, drafter = {*threading.enumerate()}, Slow()
    guard = Guard(drafter, vocab_size=VOCAB, timeout=5.0)
    (own,) = {*threading.enumerate()} - before  # beside it are threads of engines of other tests, which never end
    guard.close()
    own.join(timeout=5)
    assert drafter.closed
    assert not own.is_alive()
    assert guard.out is not None
    guard.stop(1)


def test_a_guard_counts_what_a_drafter_grows_by_and_remembers_its_faults() -> None:
    class Failing(Silent):
        def stop(self, key: int) -> None:
            raise OSError("full")

    sizes = iter([100, 130, 130, 125])
    guard = Guard(Failing(), vocab_size=VOCAB, timeout=5.0)
    guard.memory = lambda: next(sizes)
    guard.stop(1)
    assert (guard.grown, guard.fault, guard.out) == (30, "raised OSError: full", None)
    guard.stop(1)
    assert guard.grown == 25


# With models from files.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path]:
    root = tmp_path_factory.mktemp("hot")
    for name in ("target", "other"):
        (root / name).mkdir()
    other = write_model(root / "other", seed=1)
    target = write_model(root / "target")
    return LLM(str(target), drafter=["suffix"], format="int8", threads=1, max_context=128, max_sequences=4), other


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_loaded_and_unloaded_a_hundred_times_nothing_stays(models: tuple[LLM, Path]) -> None:
    llm, other = models
    hot = HotDrafters(llm.parts)
    want = llm.generate(["abcabcabc"], LONG)[0].tokens

    def once() -> weakref.ref[Any]:
        loaded = hot.load(f"model:{other},format=int8", name="other")
        gone = weakref.ref(loaded.guard._drafter)
        hot.join(loaded)
        del loaded
        answer = llm.generate(["abcabcabc"], LONG, speculation=Speculation(drafter="other"))[0]
        assert answer.tokens == want
        assert answer.stats.drafter == "other"
        hot.unload("other")
        return gone

    gc.disable()  # memory comes back at once, not when garbage is collected
    try:
        for _ in range(5):
            assert once()() is None
        before = files_open(), threading.active_count(), llm.engine.snapshot().pages_held, resident()
        for _ in range(95):
            assert once()() is None
        after = files_open(), threading.active_count(), llm.engine.snapshot().pages_held, resident()
    finally:
        gc.enable()
    assert after[:3] == before[:3]
    assert after[3] - before[3] < 8 << 20
    llm.engine.check()


def test_what_cannot_be_loaded_or_unloaded_says_why(models: tuple[LLM, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, other = models
    hot = HotDrafters(llm.parts)
    for words, name, problem in (
        ("suffix", None, "'suffix' is loaded: give this one another name"),
        ("nowhere-to-be-found", None, "unknown drafter"),
        ("ngram:max=3", None, "unknown option of the ngram drafter"),
        ("ngram", "a b", "a drafter's name is"),
        ("ngram", "none", "a drafter's name is"),
        ("eagle:shape", None, "since its start: it cannot be loaded while the server runs"),
        ("portfolio:members=suffix+wrong", None, "unknown member of the drafter portfolio 'wrong'"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            hot.load(words, name=name)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.engine.hot.available_memory", lambda: 1000)
        with pytest.raises(OutOfMemory, match="0 MiB are free"):
            hot.load(f"model:{other},format=int8")
    for name, problem in (
        ("suffix", "is the default: make another one the default first"),
        ("prediction", "serves requests with a prediction, and stays"),
        ("wrong", "unknown drafter 'wrong'"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            hot.unload(name)
    monkeypatch.setattr(llm.engine, "is_hot", False)
    with pytest.raises(InvalidRequest, match="records its rounds for the drafters that it starts with"):
        hot.load("ngram")
    with pytest.raises(InvalidRequest, match="cannot be loaded or unloaded while the server runs"):
        hot.unload("suffix")


@pytest.mark.parametrize("name", ["a tensor less", "a tensor more", "a pickle", "another size", "a mask"])
def test_a_broken_head_leaves_the_engine_as_it_was(name: str, models: tuple[LLM, Path], tmp_path: Path) -> None:
    llm, _ = models
    config = llm.parts.target.model.config
    folder = LAYOUTS["p-eagle of one layer"].write(tmp_path, vocab=config.vocab_size)
    file, values = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    problem = {
        "a tensor less": "tensor 'norm.weight' .* is missing",
        "a tensor more": "1 tensor that no head of this kind has: other",
        "a pickle": "pytorch_model.bin is a pickle",
        "another size": "hidden states of size 32, the target's have 64",
        "a mask": f"mask_token_id is {config.vocab_size}; allowed: a whole number from 0 to {config.vocab_size - 1}",
    }[name]
    if name == "a tensor less":
        del tensors["norm.weight"]
    tensors |= {"other": torch.ones(1)} if name == "a tensor more" else {}
    values |= {"target_hidden_size": 32} if name == "another size" else {}
    values |= {"mask_token_id": config.vocab_size} if name == "a mask" else {}
    write_head(folder, values, tensors)
    if name == "a pickle":
        file.rename(folder / "pytorch_model.bin")
    before, loaded = llm.generate("abcabc", LONG)[0].tokens, [*llm.engine.drafters]
    with pytest.raises(PacelineError, match=problem):
        HotDrafters(llm.parts).load(f"eagle:{folder}")
    assert [*llm.engine.drafters] == loaded
    assert llm.generate("abcabc", LONG)[0].tokens == before
    llm.engine.check()


def test_a_portfolio_has_the_members_that_are_named_and_they_stay_as_long_as_it_does(models: tuple[LLM, Path]) -> None:
    llm, _ = models
    hot = HotDrafters(llm.parts)
    hot.join(hot.load("ngram"))
    hot.join(hot.load("portfolio:members=ngram+suffix", name="both"))
    with pytest.raises(InvalidRequest, match="a member of both: unload both first"):
        hot.unload("ngram")
    answer = llm.generate(["abcabcabc"], LONG, speculation=Speculation(drafter="both"))[0]
    assert answer.samples[0].finish is Finish.LENGTH
    assert set(answer.stats.by_member) <= {"ngram", "suffix", "ngram+suffix", "suffix+ngram"}
    hot.unload("both")
    hot.unload("ngram")
    assert set(llm.engine.drafters) == {"suffix", "prediction"}


def test_a_portfolio_of_all_leaves_ngram_out_beside_suffix(models: tuple[LLM, Path]) -> None:
    llm, _ = models
    hot = HotDrafters(llm.parts)
    for words in ("ngram", "recycling", "portfolio"):
        hot.join(hot.load(words))
    made = llm.engine.drafters["portfolio"]._drafter
    assert isinstance(made, PortfolioDrafter)
    assert {member.name for member in made.members} == {"suffix", "recycling"}
    for name in ("ngram", "portfolio", "recycling"):
        hot.unload(name)
    assert set(llm.engine.drafters) == {"suffix", "prediction"}


def test_a_model_that_is_named_by_its_file_alone_is_called_model(models: tuple[LLM, Path]) -> None:
    llm, other = models
    loaded = HotDrafters(llm.parts).load(str(other))
    assert loaded.name == "model"
    loaded.guard.close()
