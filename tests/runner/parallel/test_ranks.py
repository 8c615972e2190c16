"""Ranks as processes: what they compute, and how a rank that is lost ends the others."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import ModelFileError, NoAnswer, OutOfMemory, RankLost
from paceline.kernels.base import PAGE_SIZE, Batch, Output
from paceline.models.load import open_model
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.parallel import forward as forward_module
from paceline.runner.parallel import messages
from paceline.runner.parallel import ranks as module
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.messages import Busy, Failed, Hello, Join, Load, Loaded, Message, Pong, versions
from paceline.runner.parallel.ranks import Loading, Ranks, Worker
from paceline.runner.parallel.split import Split, plan_split
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
for word in sys.argv[1:-1]:
    if word == "ends":
        sys.exit(1)
    elif word == "listens":
        pipe.recv_bytes()
    else:
        pipe.send_bytes(bytes.fromhex(word))
time.sleep(60)
"""


def fake(*words: Message | str) -> list[str]:
    """The command of a worker that says this and then nothing. Words: it "listens" to a message, "ends"."""
    spelt = [word if isinstance(word, str) else pickle.dumps(word).hex() for word in words]
    return [sys.executable, "-c", FAKE, *spelt]


def beside(*commands: list[str]) -> tuple[Ranks, list[Worker]]:
    """A rank that is alone, with workers that never joined."""
    ranks = Ranks(1, threads=1, timeout=PATIENCE)
    workers = [Worker(rank, command, timeout=PATIENCE) for rank, command in enumerate(commands, 1)]
    ranks._workers.extend(workers)
    return ranks, workers


def test_an_idle_worker_is_killed() -> None:
    ranks, [worker] = beside(fake("listens", Pong(), "listens", Pong()))
    ranks.check()
    ranks.check()
    worker.process.kill()
    worker.process.wait()
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
            ranks.check()
    ranks.free(0)


def test_an_idle_worker_is_stuck() -> None:
    """The rank that does not answer is named, and all are ended."""
    ranks, workers = beside(fake(Pong(), Pong()), fake(Pong()))
    ranks.check()
    ranks.timeout = 1.0
    with pytest.raises(RankLost, match="rank 2 is stuck: no answer for 1 s"):
        ranks.check()
    assert [worker.process.poll() for worker in workers] == [-signal.SIGKILL] * 2


def test_the_first_worker_that_fails_is_heard() -> None:
    """Rank 1 says nothing, and would be waited for: that rank 2 has ended is known before."""
    ranks, workers = beside(fake(), fake("listens", "ends"))
    with pytest.raises(RankLost, match="rank 2 ended with status 1"):
        ranks.check()
    assert workers[0].process.poll() == -signal.SIGKILL


def test_idle_processes_answer_until_one_is_stopped(path: Path) -> None:
    ranks = Ranks(2, threads=1, timeout=PATIENCE)
    forward = split_over(ranks, path, same_bits=False, num_pages=8)
    [batch] = chunks_of(TOKENS, (5,))
    for _ in range(3):
        forward(batch)
        ranks.check()
    os.kill(ranks.pids()[1], signal.SIGSTOP)
    ranks.timeout = 1.0
    with pytest.raises(RankLost, match="rank 1 is stuck: no answer for 1 s"):
        ranks.check()
    assert not _runs(ranks.pids()[1])


# ── while weights are read ──


def reads(ranks: Ranks, mine: Callable[[Callable[[], None]], None] = lambda look: None) -> None:
    order = Load(0, "model", "fp32", Split(degree=2, shards=2), 8, torch.float32, ())
    ranks.load(lambda key: order, lambda order, exchange, look: mine(look))


class Scripted:
    """A worker whose messages come at given seconds; whoever waits for one moves the clock."""

    rank = 1

    def __init__(self, *said: tuple[float, Message]) -> None:
        self.now, self.pipe, self._said = 0.0, self, list(said)

    def poll(self, seconds: float) -> bool:
        if self._said and self._said[0][0] <= self.now + seconds:
            self.now = max(self.now, self._said[0][0])
            return True
        self.now += seconds
        return False

    def take(self) -> Message:
        return self._said.pop(0)[1]

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ([(50.0, Busy()), (100.0, Busy()), (150.0, Loaded())], 150.0),  # slow, and not stuck
        ([(50.0, Busy()), (120.0, Loaded())], None),
        ([], None),
    ],
)
def test_how_long_a_worker_may_be_silent(
    said: list[tuple[float, Message]], ends: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Scripted(*said)
    monkeypatch.setattr(module, "time", worker)
    loading = Loading([worker])  # type: ignore[list-item]
    if ends is None:
        with pytest.raises(RankLost, match="rank 1 is stuck: no progress with its weights for 60 s"):
            loading.wait()
        assert 60 < worker.now - max([0.0, *[when for when, _ in said if when < 100]]) < 61
    else:
        loading.wait()
        assert worker.now == ends


def test_a_worker_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three the one that is stuck is named. It would be heard of while rank 0 reads its own part, too."""
    monkeypatch.setattr(module, "LOAD_SECONDS", 0.5)
    commands = fake(Loaded()), fake(Busy()), fake(Loaded())
    for mine in (lambda look: None, forever):
        ranks, workers = beside(*commands)
        assert all(worker.pipe.poll(PATIENCE) for worker in workers), "all have started"
        with pytest.raises(RankLost, match=r"rank 2 is stuck: no progress with its weights for 0.5 s"):
            reads(ranks, mine)
        assert all(worker.process.poll() is not None for worker in workers)


def forever(look: Callable[[], None]) -> None:
    """Rank 0 reads a part that has no end, until it is told that a worker is lost."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        look()
        time.sleep(0.01)
    raise AssertionError("it has read to the end")


def test_rank_0_looks_while_it_reads_its_own_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def load_part(load: Load, exchange: Exchange, *, progress: Callable[[int, int], None]) -> None:
        forever(lambda: progress(1, 2))

    monkeypatch.setattr(forward_module, "load_part", load_part)
    ranks, _ = beside(fake("listens", "ends"))
    config = open_model(str(path)).config
    split = plan_split("tiny", config, degree=1, same_bits=False)
    with pytest.raises(RankLost, match="rank 1 ended with status 1"):
        SplitForward(
            ranks,
            str(path),
            split=split,
            format="fp32",
            dtype=torch.float32,
            num_pages=8,
            progress=lambda done, total: read.append(done),
        )
    assert read, "it says how far it is, too"


def test_a_worker_fails_while_rank_0_reads() -> None:
    for last, error in ((Failed("OutOfMemory", "too little"), OutOfMemory), ("ends", RankLost)):
        ranks, _ = beside(fake("listens", Busy(), last))
        with pytest.raises(error, match=r"rank 1 (failed: too little|ended with status 1)"):
            reads(ranks, forever)


def test_a_worker_is_killed_while_it_reads(path: Path) -> None:
    ranks = Ranks(2, threads=1, timeout=PATIENCE)
    os.kill(ranks.pids()[1], signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
        split_over(ranks, path, same_bits=False, num_pages=8)
    assert not _runs(ranks.pids()[1])


BLOCKED = """
import sys, time
from paceline.runner.parallel import worker
worker.load_part = lambda load, exchange: time.sleep(600)  # as of a disk that answers no more
sys.exit(worker.main(int(sys.argv[1])))
"""


def test_a_worker_is_blocked_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is there, and gets nowhere: it says nothing."""
    monkeypatch.setattr(module, "LOAD_SECONDS", 1.5)
    ranks, [worker] = beside([sys.executable, "-c", BLOCKED])
    module.hear([worker], Hello, seconds=PATIENCE, late="has not started within")
    worker.pipe.send(Join(rank=0, size=1, store="unused", timeout=PATIENCE, threads=1, memory=-1))
    with pytest.raises(RankLost, match=r"rank 1 is stuck: no progress with its weights for 1.5 s"):
        reads(ranks)
    assert worker.process.poll() is not None


@pytest.mark.parametrize("silent", [True, False])
def test_the_last_one_that_runs_is_stuck(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others noticed, and have ended: nothing is left to wait for. A rank that breaks off has a cause, though."""
    ranks, [first, _] = beside(fake(Failed("NoAnswer", "rank 2 has not answered in time"), "ends"), fake())
    first.process.wait()
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(naps), sleep=naps.append)
    monkeypatch.setattr(module, "time", clock)

    def mine() -> None:
        raise NoAnswer("rank 2 has not answered in time", silent=silent)

    with pytest.raises(RankLost, match="rank 2 is stuck: no answer for 100 s"):
        ranks._guarded(mine)
    assert bool(naps) != silent


def test_a_worker_fails_in_a_pass() -> None:
    """Its last words are the cause, and not the broken pipe."""
    ranks, [worker] = beside(fake(Failed("KeyError", "no such head"), "ends"))
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
