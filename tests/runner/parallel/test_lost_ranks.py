"""A rank that is lost ends the others, and is named: killed or stuck, in a pass, idle, or while it reads weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import ModelFileError, NoAnswer, OutOfMemory, RankLost
from paceline.models.load import open_model
from paceline.runner.parallel import forward as forward_module
from paceline.runner.parallel import ranks as module
from paceline.runner.parallel.exchange import Exchange
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.messages import Busy, Failed, Hello, Join, Load, Loaded, Message, Pong
from paceline.runner.parallel.ranks import Loading, Ranks, Worker
from paceline.runner.parallel.split import Split, plan_split
from paceline.types import OFF, Finish, Request, SamplingParams
from tests.rig import Rig, build
from tests.rig_drafters import RIGS
from tests.runner.parallel.odd_workers import Interrupts, fake
from tests.runner.parallel.split_models import PATIENCE, split_over, write_tiny
from tests.runs import Run, prompt
from tests.tiny_batches import chunks_of
from tests.tiny_models import TARGET

PAGES = 160
COUNT = 6


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
    assert all(not is_running(pid) for pid in pids), "no process is left"
    return rig.engine.dead


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def beside(*commands: list[str]) -> tuple[Ranks, list[Worker]]:
    """A rank that is alone, with workers that never joined."""
    ranks = Ranks(1, threads=1, timeout=PATIENCE)
    workers = [Worker(rank, command, timeout=PATIENCE) for rank, command in enumerate(commands, 1)]
    ranks._workers.extend(workers)
    return ranks, workers


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


def test_a_worker_fails_in_a_pass() -> None:
    """Its last words are the cause, and not the broken pipe."""
    ranks, [worker] = beside(fake(Failed("KeyError", "no such head"), "ends"))
    worker.process.wait()
    assert worker.ending == "ended with status 1"
    with pytest.raises(RankLost, match="rank 1 failed: no such head"):
        ranks.call(0, "compute", (), lambda: None)


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


# ── compiled ranks ──


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


# ── idle ranks ──


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
    [batch] = chunks_of([1, 2, 3, 4, 5], (5,))
    for _ in range(3):
        forward(batch)
        ranks.check()
    os.kill(ranks.pids()[1], signal.SIGSTOP)
    ranks.timeout = 1.0
    with pytest.raises(RankLost, match="rank 1 is stuck: no answer for 1 s"):
        ranks.check()
    assert not is_running(ranks.pids()[1])


# ── while weights are read ──


def reads(ranks: Ranks, mine: Callable[[Callable[[], None]], None] = lambda look: None) -> None:
    order = Load(0, "model", "fp32", Split(degree=2, shards=2), 8, torch.float32, ())
    ranks.load(lambda key: order, lambda order, exchange, look: mine(look))


def forever(look: Callable[[], None]) -> None:
    """Rank 0 reads a part that has no end, until it is told that a worker is lost."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        look()
        time.sleep(0.01)
    raise AssertionError("it has read to the end")


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
    assert not is_running(ranks.pids()[1])


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


def test_a_model_that_one_rank_cannot_read(path: Path, tmp_path: Path) -> None:
    """Rank 0 fails by itself: the workers, which may be in the middle of a pass, are ended."""
    ranks = Ranks(1, threads=1)
    write_tiny(tmp_path, TARGET.config, {"norm": torch.ones(64)})
    with pytest.raises(ModelFileError):
        split_over(ranks, tmp_path, same_bits=False, num_pages=8)
    with pytest.raises(RankLost, match="ModelFileError"):
        ranks.check()


# ── rank 0 ──


def outlives(program: str, *args: str) -> bool:
    """Kill a process with ranks once it has printed the pid of one; return whether that rank goes on."""
    with subprocess.Popen([sys.executable, "-c", program, *args], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        assert is_running(pid)
        first.kill()
    until = time.monotonic() + PATIENCE
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return is_running(pid)


@pytest.mark.slow
def test_a_worker_outlives_nobody() -> None:
    """Rank 0 is killed: its pipe is closed, and the worker ends."""
    program = (
        "from paceline.runner.parallel.ranks import Ranks\n"
        "import time\nranks = Ranks(2, threads=1)\nprint(ranks.pids()[1], flush=True)\ntime.sleep(600)\n"
    )
    assert not outlives(program)


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
    assert not outlives(program, str(path))
