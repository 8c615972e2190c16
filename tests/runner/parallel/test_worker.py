"""A worker in this process: what it does with each message, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline.runner.parallel import part, worker
from paceline.runner.parallel.messages import (
    Busy,
    Call,
    Failed,
    Free,
    Hello,
    Join,
    Lead,
    Load,
    Loaded,
    Message,
    Ping,
    Pipe,
    Pong,
    flat,
    versions,
    whole,
)
from paceline.runner.parallel.sharded_decoder import ShardedDecoder
from paceline.runner.parallel.split import Split
from tests.runner.parallel.split_models import write_tiny
from tests.tiny_batches import chunks_of
from tests.tiny_models import TARGET

JOIN = Join(rank=0, size=1, store="unused", timeout=1.0, threads=1, memory=-1)


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)


@contextmanager
def talking(*messages: Message) -> Iterator[tuple[int, list[Message]]]:
    """Send messages to a worker, close the pipe, and give its status and what it said."""
    mine, theirs = socket.socketpair()
    pipe, said = Pipe(mine.detach(), timeout=60.0), []
    for message in messages:
        pipe.send(message)

    def close() -> None:
        try:
            while len(said) < 1 + sum(isinstance(message, Load | Lead | Ping) for message in messages):
                said.append(pipe.receive())
        finally:
            pipe.close()

    thread = threading.Thread(target=close)
    thread.start()
    status = worker.main(theirs.detach())
    thread.join()
    yield status, said


def load(path: Path, **changes: object) -> Load:
    settings = {"path": str(path), "format": "fp32", "split": Split(degree=1, shards=2), "num_pages": 8}
    return Load(**{"key": 3, **settings, "dtype": torch.float32, "taps": (), **changes})  # type: ignore[arg-type]


def test_it_does_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    compute = ShardedDecoder.compute
    monkeypatch.setattr(ShardedDecoder, "compute", lambda self, batch: outputs.append(compute(self, batch)))
    [batch] = chunks_of([1, 2, 3], (3,))
    path = write_tiny(tmp_path, TARGET.config, TARGET.weights)
    with talking(JOIN, load(path), Call(3, "compute", (flat(batch),)), Ping(), Free(3)) as (status, said):
        assert status == 0
        assert isinstance(said[0], Hello)
        assert (said[0].versions, said[1:]) == (versions(), [Loaded(), Pong()])
        assert said[0].memory > 1 << 20
    [output] = outputs
    assert output.logits.shape == (3, 97)


def test_it_makes_models_of_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of first layers has the keys and values of the whole one, which may go before it."""
    outputs = []
    compute = ShardedDecoder.compute
    monkeypatch.setattr(ShardedDecoder, "compute", lambda self, batch: outputs.append(compute(self, batch)))
    [prompt, token] = chunks_of([1, 2, 3, 4], (3, 1))
    path = write_tiny(tmp_path, TARGET.config, TARGET.weights)
    calls = Call(3, "compute", (flat(prompt),)), Free(3), Call(4, "compute", (flat(token),))
    with talking(JOIN, load(path), Lead(4, 3, 1), *calls) as (status, said):
        assert status == 0
        assert said[1:] == [Loaded(), Loaded()]
    whole = TARGET.forward("eager", num_pages=8)
    part = whole.leading(1)
    whole(prompt)
    assert torch.allclose(outputs[1].logits, part(token).logits, atol=1e-4)


def test_each_model_has_its_own_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's number of threads decides on bits."""
    threads, before = [], torch.get_num_threads()
    monkeypatch.setattr(ShardedDecoder, "compute", lambda self, batch: threads.append(torch.get_num_threads()))
    [batch] = chunks_of([1, 2, 3], (3,))
    path = write_tiny(tmp_path, TARGET.config, TARGET.weights)
    calls = [Call(key, "compute", (flat(batch),)) for key in (3, 4, 3)]
    with talking(JOIN, load(path, threads=2), load(path, key=4, threads=1), *calls) as (status, _):
        torch.set_num_threads(before)
        assert (status, threads) == (0, [2, 1, 2])


def test_it_says_why_it_fails(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, TARGET.config, {"norm": torch.ones(64)})
    with talking(JOIN, load(path)) as (status, said):
        assert status == 1
        assert isinstance(said[1], Failed)
        assert said[1].kind == "ModelFileError"
        assert "tensors are missing" in said[1].text


def test_a_message_that_makes_no_sense() -> None:
    with talking(JOIN, Loaded(), load(Path("nowhere"))) as (status, said):
        assert status == 1
        assert isinstance(said[1], Failed)
        assert "does not know what to do" in said[1].text


def test_no_memory_for_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path, TARGET.config, TARGET.weights)
    for error, kind in ((MemoryError(), "OutOfMemory"), (RuntimeError("a bug"), "RuntimeError")):

        def fails(*args: object, error: Exception = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(part, "ShardedDecoder", fails)
        with talking(JOIN, load(path)) as (status, said):
            assert status == 1
            assert isinstance(said[1], Failed)
            assert said[1].kind == kind


def test_it_says_so_while_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy for work and for blocks of a disk, and for nothing else."""
    monkeypatch.setattr(worker, "BUSY_SECONDS", 0.001)
    looks = iter([(0.0, 0), (0.02, 0), (0.025, 0), (0.025, 1), *[(0.03, 1)] * 50])
    all_seen, mine, theirs = threading.Event(), *socket.socketpair()

    def progress() -> tuple[float, int]:
        seen = next(looks, None)
        if seen is None:
            all_seen.set()
        return seen or (0.03, 1)

    monkeypatch.setattr(worker, "_progress", progress)
    pipe, end = Pipe(mine.detach()), Pipe(theirs.detach())
    with worker._saying_busy(pipe):
        assert all_seen.wait(60.0)
    pipe.send(Loaded())
    said = []
    while end.poll():
        said.append(end.receive())
    assert said == [Busy(), Busy(), Loaded()]
    pipe.close()
    end.close()


def test_work_is_progress() -> None:
    before = worker._progress()
    thread = threading.Thread(target=lambda: sum(range(2_000_000)))
    thread.start()
    thread.join()
    assert worker._progress()[0] > before[0]


STUCK = """
import sys, time
from paceline.runner.parallel import worker
worker.ORPHAN_SECONDS = 0.05
worker.end_with(int(sys.argv[1]), status=7)
time.sleep(600)
"""


def test_an_orphan_ends_whatever_it_is_stuck_in() -> None:
    mine, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    mine.close()
    assert process.wait(60.0) == 7


def test_batches_travel_whole() -> None:
    [batch] = chunks_of([1, 2, 3], (3,))
    arrived = whole(flat(batch))
    for name in ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows"):
        assert torch.equal(getattr(arrived, name), getattr(batch, name))
    assert (arrived.tails, arrived.features, arrived.states) == (None, True, False)
    assert whole(flat([1, 2])) == [1, 2]
