"""Ranks as processes: how they start, and what they compute."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ModelFileError, OutOfMemory, RankLost
from paceline.kernels.base import PAGE_SIZE
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.parallel import messages
from paceline.runner.parallel import ranks as module
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.messages import Failed, Hello, versions
from paceline.runner.parallel.ranks import Ranks, Worker
from tests.runner.parallel.compiled_ranks import CompiledRanks, apart
from tests.runner.parallel.odd_workers import Interrupts, fake
from tests.runner.parallel.split_models import PATIENCE, Threads, split_over
from tests.tiny_batches import chunks_of
from tests.tiny_models import TARGET

TOKENS = [(7 * i + 3) % 97 for i in range(40)]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, threads=1, timeout=PATIENCE)
    yield ranks
    ranks.close()


def test_versions_that_differ() -> None:
    with pytest.raises(RankLost, match=r"rank 1 runs torch 1.0, and rank 0 Paceline.*need the same versions"):
        Ranks(2, threads=1, command=fake(Hello(("torch 1.0",), 1 << 30)))


def test_versions_cover_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks with other C sources would add other bits."""
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    monkeypatch.setattr(messages, "PACKAGE", tmp_path)
    found = set()
    for name in ("a.py", "a.c", "a.h", "a.txt"):
        (tmp_path / "kernels" / "cpu" / name).write_text("1", encoding="utf-8")
        found.add(versions.__wrapped__())
    assert len(found) == 3, "a text decides on no bits"


def test_a_worker_that_cannot_load() -> None:
    for kind, error in (("OutOfMemory", OutOfMemory), ("ModelFileError", ModelFileError), ("KeyError", RankLost)):
        with pytest.raises(error, match="rank 1 failed: too little"):
            Ranks(2, threads=1, command=fake(Failed(kind, "too little")))


def test_a_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankLost, match="rank 1 ended with status 1"):
        Ranks(2, threads=1, command=["false"])
    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    with pytest.raises(RankLost, match=r"rank 1 has not started within 0.1 s"):
        Ranks(2, threads=1, command=[sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_worker_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Worker] = []

    def worker(rank: int, command: list[str], **options: Any) -> Worker:
        if rank == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(Worker(rank, command, **options))
        return started[0]

    monkeypatch.setattr(module, "Worker", worker)
    with pytest.raises(RankLost, match="rank 2 cannot be started: Resource temporarily unavailable"):
        Ranks(3, threads=1, command=fake())
    assert started[0].process.poll() == -signal.SIGKILL


def test_ranks_that_do_not_meet() -> None:
    with pytest.raises(RankLost, match=r"rank 1 is stuck: no answer for 0.3 s"):
        Ranks(2, threads=1, timeout=0.3, command=fake(Hello(versions(), 1 << 30)))


# ── what they compute ──


def test_a_forward_says_what_it_is(two: Ranks, path: Path) -> None:
    forward = split_over(two, path, same_bits=False, num_pages=9, taps=(1,))
    assert isinstance(forward, SplitForward)
    assert (forward.vocab_size, forward.bitwise, forward.kv.num_pages, forward.taps) == (97, False, 9, (1,))
    assert PAGE_SIZE * forward.kv.num_pages == 144


@pytest.mark.parametrize("same_bits", [False, True])
def test_processes_compute_what_threads_compute(two: Ranks, path: Path, same_bits: bool) -> None:
    forward, threads = split_over(two, path, same_bits=same_bits, num_pages=8), Threads.of(2)
    parts = threads.build(TARGET.config, TARGET.weights, same_bits=same_bits)
    for batch in chunks_of(TOKENS, (20, 5, 1, 14)):
        expected = threads.each(lambda rank, exchange, batch=batch: parts[rank].compute(batch))[0]
        assert expected is not None
        assert torch.equal(forward(batch).logits, expected.logits)
    pair = threads.each(lambda rank, exchange: parts[rank].read(torch.arange(128)))[0]
    assert pair is not None
    assert all(map(torch.equal, forward.kv.read(torch.arange(128)), pair))


def test_compiled_processes_compute_what_threads_compute(
    two: Ranks, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch)
    threads = CompiledRanks.of(TARGET.config, TARGET.weights, 2)
    forward = split_over(two, path, same_bits=False, num_pages=8, format="int4", taps=(1,))
    for batch in chunks_of(TOKENS, (20, 5, 1, 14)):
        output, expected = forward(batch), threads.compute(batch)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.argmax, expected.argmax)
    assert torch.equal(torch.stack(forward.kv.read(torch.arange(128))), threads.read(torch.arange(128)))
    assert forward.bitwise
    floats = split_over(two, path, same_bits=False, num_pages=8)
    tokens = torch.arange(97, dtype=torch.int32)
    torch.testing.assert_close(forward.embed(tokens), floats.embed(tokens), rtol=0.1, atol=0.02)


def test_two_models_and_two_threads(two: Ranks, path: Path) -> None:
    """Calls of several threads do not mix: ranks run them in one order."""
    models = [split_over(two, path, same_bits=same_bits, num_pages=8) for same_bits in (False, True)]
    states = torch.randn((5, 64))  # on a thread that torch was not told of, five rows have other bits
    expected = [model.project(states) for model in models]
    wrong: list[int] = []

    def work(number: int) -> None:
        found = [models[number].project(states) for _ in range(5)]
        wrong.extend(number for each in found if not torch.equal(each, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    del models[0]
    assert torch.equal(models[0].project(states), expected[1])


def test_bf16(two: Ranks, path: Path) -> None:
    [batch] = chunks_of(TOKENS, (20,))
    forward = split_over(two, path, same_bits=False, num_pages=8, format="bf16")
    whole = TorchForward(TARGET.config, TARGET.weights, num_pages=8, dtype=torch.bfloat16)
    torch.testing.assert_close(forward(batch).logits, whole(batch).logits, rtol=0.1, atol=0.1)
    assert forward.embed(torch.arange(9, dtype=torch.int32)).dtype == torch.bfloat16


def test_a_compiled_rank_goes_on(two: Ranks, path: Path) -> None:
    """A worker that is stopped for a moment delays the pass, and changes nothing."""
    [batch] = chunks_of(TOKENS, (20,))
    forward = split_over(two, path, same_bits=False, num_pages=8, format="int8")
    expected = forward(batch).logits.clone()
    Interrupts(forward, two.pids()[1], after=1, number=signal.SIGCONT)
    assert torch.equal(forward(batch).logits, expected)


def test_a_rank_that_is_alone_computes_after_the_end(path: Path) -> None:
    ranks = Ranks(1, threads=1)
    forward = split_over(ranks, path, same_bits=True, num_pages=8)
    ranks.check()
    ranks.close()
    assert forward(chunks_of(TOKENS, (3,))[0]).logits.shape == (3, 97)


def test_a_worker_that_ends_is_heard_of() -> None:
    """Once, by another thread; the end of all ranks is none of its news."""
    heard, ended = threading.Event(), threading.Event()
    ranks, others = Ranks(2, threads=1, timeout=PATIENCE), Ranks(2, threads=1, timeout=PATIENCE)
    ranks.watch(heard.set)
    others.watch(ended.set)
    [pid] = ranks.pids().values()
    os.kill(pid, signal.SIGKILL)
    assert heard.wait(PATIENCE)
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
        ranks.guarded(ranks.check)
    others.close()
    assert not ended.wait(0.2)
