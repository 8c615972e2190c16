"""Ranks as processes: what they compute, and how a rank that is lost ends the others."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.errors import ModelFileError, OutOfMemory, RankLost
from paceline.kernels.base import PAGE_SIZE, Batch, Output
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.parallel import messages
from paceline.runner.parallel import ranks as module
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.forward import SplitForward, check_memory
from paceline.runner.parallel.messages import Failed, Hello, Message, versions
from paceline.runner.parallel.ranks import Ranks, Worker
from paceline.types import OFF, Finish, Request, SamplingParams
from tests.rig import RIGS, Rig, build
from tests.runner.parallel.compiled_ranks import CompiledRanks, apart
from tests.runner.parallel.split_models import PATIENCE, Threads, split_over, write_tiny
from tests.runs import Run, prompt
from tests.tiny_batches import chunks_of
from tests.tiny_models import TARGET

TOKENS = [(7 * i + 3) % 97 for i in range(40)]
PAGES = 160
COUNT = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), TARGET.config, TARGET.weights)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, threads=1, timeout=PATIENCE)
    yield ranks
    ranks.close()


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


def test_workers_end_with_their_ranks(path: Path) -> None:
    ranks = Ranks(1, threads=1)
    forward = split_over(ranks, path, same_bits=True, num_pages=8)
    ranks.check()
    ranks.close()
    assert forward(chunks_of(TOKENS, (3,))[0]).logits.shape == (3, 97), "a rank that is alone needs nobody"


def asked() -> list[Request]:
    sampling = SamplingParams(temperature=0, max_tokens=20)
    requests = [Request(id=str(i), prompt=prompt(9, seed=i), sampling=sampling) for i in range(COUNT)]
    return [*requests[:-1], Request(id="plain", prompt=prompt(40, seed=9), sampling=sampling, speculation=OFF)]


class KillsAt:
    """Ends a worker in the middle of a sum: `after` sums of rank 0."""

    def __init__(self, exchange: Exchange, pid: int, *, after: int, number: signal.Signals) -> None:
        self._sum, self._pid, self._after, self._number = exchange.sum, pid, after, number
        exchange.sum = self._count  # type: ignore[method-assign]

    def _count(self, parts: list[torch.Tensor]) -> torch.Tensor:
        self._after -= 1
        if self._after == 0:
            os.kill(self._pid, self._number)
        return self._sum(parts)


def loses_a_rank(path: Path, *, after: int, number: signal.Signals, timeout: float, size: int = 2) -> str:
    ranks = Ranks(size, threads=1, timeout=timeout)
    forward = split_over(ranks, path, same_bits=False, num_pages=PAGES)
    rig = build("eager", {"noisy": RIGS["model"]["noisy"]}, forward=forward)
    pids = list(ranks.pids().values())
    KillsAt(ranks.exchange, pids[after % len(pids)], after=after, number=number)
    return loses(rig, ranks, pids, timeout=timeout)


def loses(rig: Rig, ranks: Ranks, pids: list[int], *, timeout: float) -> str:
    """Run requests until a rank is lost, check that every request ends once, and return what the engine says."""
    run = Run(rig)
    run.submit(asked())
    began = time.monotonic()
    while rig.engine.has_work:
        run.step()
    assert time.monotonic() - began < timeout + 60, "a guard against hanging"
    run.check_over()
    assert rig.engine.dead is not None
    assert isinstance(rig.engine.failure, RankLost)
    assert [each.finish for each in run.told.values()].count(Finish.ERROR) > 0
    assert all(each.finish is Finish.ERROR or len(each.tokens) == 20 for each in run.told.values())
    with pytest.raises(RankLost, match="rank"):
        ranks.check()
    assert all(not _runs(pid) for pid in pids), "no process is left"
    return rig.engine.dead


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("after", [1, 42])
def test_a_worker_is_killed(path: Path, after: int) -> None:
    said = loses_a_rank(path, after=after, number=signal.SIGKILL, timeout=PATIENCE)
    assert said == "RankLost: rank 1 was killed by SIGKILL"


def test_a_worker_is_stuck(path: Path) -> None:
    said = loses_a_rank(path, after=7, number=signal.SIGSTOP, timeout=1.0)
    assert said == "RankLost: rank 1 is stuck: no answer for 1 s"


@pytest.mark.slow
@pytest.mark.parametrize("after", range(1, 101, 2))
def test_workers_are_killed_anywhere(path: Path, after: int) -> None:
    size = 4 if after % 10 == 1 else 2
    said = loses_a_rank(path, after=after, number=signal.SIGKILL, timeout=PATIENCE, size=size)
    assert said == f"RankLost: rank {1 + after % (size - 1)} was killed by SIGKILL"


FAKE = """
import sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
pipe.send_bytes(bytes.fromhex(sys.argv[1]))
sys.exit(1) if "ends" in sys.argv else time.sleep(60)
"""


def fake(message: Message) -> list[str]:
    """The command of a worker that says one thing and then nothing."""
    return [sys.executable, "-c", FAKE, pickle.dumps(message).hex()]


def beside(command: list[str]) -> tuple[Ranks, Worker]:
    """A rank that is alone, with a worker that never joined."""
    ranks = Ranks(1, threads=1)
    worker = Worker(1, command, timeout=1.0)
    ranks._workers.append(worker)
    return ranks, worker


def test_an_idle_worker_is_killed() -> None:
    ranks, worker = beside(fake(Hello(versions(), 1 << 30)))
    ranks.check()
    worker.process.kill()
    worker.process.wait()
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
            ranks.check()
    ranks.free(0)


def test_a_worker_fails_in_a_pass() -> None:
    """Its last words are the cause, and not the broken pipe."""
    ranks, worker = beside([*fake(Failed("KeyError", "no such head")), "ends"])
    worker.process.wait()
    assert worker.ending == "ended with status 1"
    with pytest.raises(RankLost, match="rank 1 failed: no such head"):
        ranks.call(0, "compute", (), lambda: None)


def test_versions_that_differ() -> None:
    with pytest.raises(RankLost, match=r"rank 1 runs torch 1.0, and rank 0 Paceline.*need the same versions"):
        Ranks(2, threads=1, command=fake(Hello(("torch 1.0",), 1 << 30)))


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


def test_ranks_that_do_not_meet() -> None:
    with pytest.raises(RankLost, match=r"rank 1 is stuck: no answer for 0.3 s"):
        Ranks(2, threads=1, timeout=0.3, command=fake(Hello(versions(), 1 << 30)))


def test_a_rank_with_too_little_memory() -> None:
    check_memory([200, 200], 100)
    with pytest.raises(OutOfMemory, match=r"rank 1 needs 100 MiB .* is 50 MiB: lower kv_memory"):
        check_memory([400 << 20, 100 << 20], 100 << 20)


def test_a_model_that_one_rank_cannot_read(path: Path, tmp_path: Path) -> None:
    """Rank 0 fails by itself: the workers, which may be in the middle of a pass, are ended."""
    ranks = Ranks(1, threads=1)
    write_tiny(tmp_path, TARGET.config, {"norm": torch.ones(64)})
    with pytest.raises(ModelFileError):
        split_over(ranks, tmp_path, same_bits=False, num_pages=8)
    with pytest.raises(RankLost, match="ModelFileError"):
        ranks.check()


@pytest.mark.slow
def test_a_worker_outlives_nobody(path: Path) -> None:
    """Rank 0 is killed: its pipe is closed, and the worker ends."""
    program = (
        "from paceline.runner.parallel.ranks import Ranks\n"
        "import time\nranks = Ranks(2, threads=1)\nprint(ranks.pids()[1], flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        assert _runs(pid)
        first.kill()
    until = time.monotonic() + PATIENCE
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)


def test_a_forward_says_what_it_is(two: Ranks, path: Path) -> None:
    forward = split_over(two, path, same_bits=False, num_pages=9, taps=(1,))
    assert isinstance(forward, SplitForward)
    assert (forward.vocab_size, forward.bitwise, forward.kv.num_pages, forward.taps) == (97, False, 9, (1,))
    assert PAGE_SIZE * forward.kv.num_pages == 144


# ── compiled ranks ──


class Interrupts:
    """Sends a worker signals before and while rank 0 runs a pass, and so waits for the worker's sums."""

    def __init__(self, forward: SplitForward, pid: int, *, after: int, number: signal.Signals) -> None:
        self._compute, self._pid, self._after, self._number = forward._part.compute, pid, after, number
        forward._part.compute = self._stopped  # type: ignore[method-assign]

    def _stopped(self, batch: Batch) -> Output | None:
        self._after -= 1
        if self._after == 0:
            os.kill(self._pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self._pid, self._number)).start()
        return self._compute(batch)


def loses_a_compiled_rank(path: Path, *, after: int, number: signal.Signals, timeout: float) -> str:
    ranks = Ranks(2, threads=1, timeout=timeout)
    forward = split_over(ranks, path, same_bits=False, num_pages=PAGES, format="int8")
    rig = build("eager", {"noisy": RIGS["model"]["noisy"]}, forward=forward)
    pid = ranks.pids()[1]
    Interrupts(forward, pid, after=after, number=number)
    return loses(rig, ranks, [pid], timeout=timeout)


@pytest.mark.parametrize("after", [1, 5])
def test_a_compiled_rank_is_killed(path: Path, after: int) -> None:
    """Rank 0 waits inside the pass for a worker that is stopped, and hears of its end at once."""
    said = loses_a_compiled_rank(path, after=after, number=signal.SIGKILL, timeout=PATIENCE)
    assert said == "RankLost: rank 1 was killed by SIGKILL"


def test_a_compiled_rank_is_stuck(path: Path) -> None:
    said = loses_a_compiled_rank(path, after=3, number=signal.SIGSTOP, timeout=1.0)
    assert said == "RankLost: rank 1 is stuck: no answer for 1 s"


def test_a_compiled_rank_goes_on(two: Ranks, path: Path) -> None:
    """A worker that is stopped for a moment delays the pass, and changes nothing."""
    [batch] = chunks_of(TOKENS, (20,))
    forward = split_over(two, path, same_bits=False, num_pages=8, format="int8")
    expected = forward(batch).logits.clone()
    Interrupts(forward, two.pids()[1], after=1, number=signal.SIGCONT)
    assert torch.equal(forward(batch).logits, expected)


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


def test_versions_cover_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks with other C sources would add other bits."""
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    monkeypatch.setattr(messages, "PACKAGE", tmp_path)
    found = set()
    for name in ("a.py", "a.c", "a.h", "a.txt"):
        (tmp_path / "kernels" / "cpu" / name).write_text("1", encoding="utf-8")
        found.add(versions.__wrapped__())
    assert len(found) == 3, "a text decides on no bits"


@pytest.mark.slow
def test_a_compiled_worker_outlives_nobody(path: Path) -> None:
    """Rank 0 is killed while a worker waits for its sums."""
    program = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "from paceline.runner.parallel.messages import Call, flat\n"
        "from paceline.runner.parallel.ranks import Ranks\n"
        "from tests.runner.parallel.split_models import split_over\n"
        "from tests.tiny_batches import chunks_of\n"
        "ranks = Ranks(2, threads=1, timeout=600.0)\n"
        "forward = split_over(ranks, Path(sys.argv[1]), same_bits=False, num_pages=8, format='int8')\n"
        "ranks._tell(Call(forward._key, 'compute', (flat(chunks_of([1, 2, 3], (3,))[0]),)))\n"
        "time.sleep(1)\nprint(ranks.pids()[1], flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        assert _runs(pid)
        first.kill()
    until = time.monotonic() + PATIENCE
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)
