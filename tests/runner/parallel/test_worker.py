"""A worker in this process: what it does with each message, and how it ends."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline.runner.parallel import part, worker
from paceline.runner.parallel.messages import (
    Call,
    Failed,
    Free,
    Hello,
    Join,
    Load,
    Loaded,
    Message,
    Pipe,
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
            while len(said) < 1 + sum(isinstance(message, Load) for message in messages):
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
    with talking(JOIN, load(path), Call(3, "compute", (flat(batch),)), Free(3)) as (status, said):
        assert status == 0
        assert isinstance(said[0], Hello)
        assert (said[0].versions, said[1:]) == (versions(), [Loaded()])
        assert said[0].memory > 1 << 20
    [output] = outputs
    assert output.logits.shape == (3, 97)


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


def test_batches_travel_whole() -> None:
    [batch] = chunks_of([1, 2, 3], (3,))
    arrived = whole(flat(batch))
    for name in ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows"):
        assert torch.equal(getattr(arrived, name), getattr(batch, name))
    assert (arrived.tails, arrived.features, arrived.states) == (None, True, False)
    assert whole(flat([1, 2])) == [1, 2]
