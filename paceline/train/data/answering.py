"""Answers from the target: Paceline's own engine generates them without speculation, for many sequences at once.

An answer costs the host more time than it costs a GPU, so a GPU gets several worker processes (`python -m
paceline.train.data.answering STORE …`). Each worker has its own engine and its own shards, and stops when its parent
process is gone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.chat.template import ChatTemplate
from paceline.config import EngineConfig
from paceline.engine.assemble import assemble, read_target
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest, PacelineError, TrainingError
from paceline.text.tokenizer import Tokenizer
from paceline.train.data.answers import SHARD_PROMPTS, AnswerStore, Exchange
from paceline.train.options import TargetOptions
from paceline.types import OFF, Finish, Request, SamplingParams

POLL_SECONDS = 0.5  # between two checks of the workers
KV_MEMORY_SHARE = 0.6  # share of free GPU memory for the KV caches of all workers

Report = Callable[[int, int], None]  # prompts answered, prompts in all


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that answer prompts on one device."""

    device: str
    batch: int  # sequences at once, per worker
    count: int
    threads: int | None = None
    part: int = 0  # this training process answers shards with number % parts == part
    parts: int = 1

    @classmethod
    def of(cls, target: TargetOptions, *, part: int = 0, parts: int = 1) -> Workers:
        return cls(
            device=target.device,
            batch=target.answer_batch,
            count=target.answer_workers,
            threads=target.threads,
            part=part,
            parts=parts,
        )


def answer(store: AnswerStore, workers: Workers, report: Report) -> None:
    """Answer the missing shards of this training process."""
    mine = [shard for shard in store.missing() if shard % workers.parts == workers.part]
    if not mine:
        return
    if workers.device == "cpu":
        before = _answered(store)
        _work(store, mine, workers, lambda done: report(before + done, len(store.questions)))
        return
    started = [_start(store, workers, mine[index :: workers.count]) for index in range(workers.count)]
    try:
        _wait(store, started, report)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()


def _start(store: AnswerStore, workers: Workers, shards: Sequence[int]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "paceline.train.data.answering", str(store.path), "--device", workers.device]
    words += ["--batch", str(workers.batch), "--sharing", str(workers.count), "--shards", *map(str, shards)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    local = int(os.environ.get("LOCAL_RANK", 0))
    gpu = visible[local] if local < len(visible) and visible[local] else str(local)
    return subprocess.Popen(words, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "2"})


def _wait(store: AnswerStore, processes: Sequence[subprocess.Popen[bytes]], report: Report) -> None:
    """Wait until all worker processes have ended; raise as soon as one of them fails."""
    while any(process.poll() is None for process in processes):
        if failed := [process for process in processes if process.poll() not in (None, 0)]:
            raise TrainingError(
                f"a process that answers prompts ended with status {failed[0].returncode}; its reason stands above. "
                "What was answered is kept: give the same command again, with a smaller --answer-batch or fewer "
                "--answer-workers if memory was short"
            )
        report(_answered(store), len(store.questions))
        time.sleep(POLL_SECONDS)
    if failed := [process for process in processes if process.returncode]:
        raise TrainingError(f"a process that answers prompts ended with status {failed[0].returncode}; see above")
    report(_answered(store), len(store.questions))


def _answered(store: AnswerStore) -> int:
    """Count the prompts of the shards that are on disk."""
    return len(store.questions) - sum(len(_members(store, shard)) for shard in store.missing())


def _work(store: AnswerStore, shards: Sequence[int], workers: Workers, done: Callable[[int], None]) -> None:
    """Answer shards in this process. `done` is called with the number of prompts that are answered."""
    settings = store.settings
    config = EngineConfig.of(
        device=workers.device,
        max_sequences=workers.batch,
        max_context=settings.max_length,
        max_draft=1,
        kv_memory=_kv_memory(workers),
    )
    ready = read_target(settings.target, format=settings.format, device=workers.device, config=config)
    assert ready.tokenizer is not None
    # Without a tokenizer the engine makes no text; only tokens are needed here.
    silent = replace(ready, tokenizer=None)
    engine = assemble(silent, config=config, device=workers.device, threads=workers.threads).engine
    for shard, exchanges in Answering(engine, ready.tokenizer, store, shards, batch=workers.batch, done=done).run():
        store.write(shard, exchanges)


def _kv_memory(workers: Workers) -> int | None:
    """Return the KV memory of one worker in bytes; None: the engine chooses. Workers on one GPU share its free
    memory."""
    if workers.device == "cpu" or workers.count == 1:
        return None
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free * KV_MEMORY_SHARE / workers.count)


class Answering:
    """Shards that one engine answers. The next shards start while the last answers of one are still generated."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        store: AnswerStore,
        shards: Sequence[int],
        *,
        batch: int,
        done: Callable[[int], None] = lambda prompts: None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._store = store
        self._shards = list(shards)  # shards that are not complete yet
        self._waiting = (index for shard in shards for index in _members(store, shard))
        self._max_running = batch + batch // 4  # more than fit a step, so that the engine always has a full batch
        self._running: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # prompt and answer so far
        self._finished: dict[int, Exchange] = {}
        self._answered = 0
        self._done = done

    def run(self) -> Iterator[tuple[int, list[Exchange]]]:
        """Yield shards as they become complete."""
        parent = os.getppid()
        while self._shards:
            self._submit()
            self._step()
            yield from self._complete()
            if os.getppid() != parent:
                raise InvalidRequest("the process that wanted the answers is gone")

    def _submit(self) -> None:
        while len(self._running) < self._max_running and (index := next(self._waiting, None)) is not None:
            prompt = tuple(self._template.encode([{"role": "user", "content": self._store.questions[index].text}]))
            if len(prompt) > self._store.settings.max_length - 2:
                self._finished[index] = Exchange(np.zeros(1, dtype=np.int32), 1)
                continue
            self._running[index] = (prompt, [])
            self._engine.submit(_request(self._store, self._tokenizer, index, prompt))

    def _step(self) -> None:
        for event in self._engine.step():
            index = int(event.request_id)
            self._running[index][1].extend(event.tokens)
            if event.finish is Finish.ERROR:
                raise TrainingError(f"the engine stopped while answering: {event.error}")
            if event.finish is not None:
                prompt, answer = self._running.pop(index)
                self._finished[index] = Exchange(np.array([*prompt, *answer], dtype=np.int32), len(prompt))
                self._answered += 1
                self._done(self._answered)

    def _complete(self) -> Iterator[tuple[int, list[Exchange]]]:
        for shard in self._shards[:4]:
            members = _members(self._store, shard)
            if all(index in self._finished for index in members):
                self._shards.remove(shard)
                yield shard, [self._finished.pop(index) for index in members]


def _members(store: AnswerStore, shard: int) -> range:
    """Return the indices of a shard's questions."""
    return range(shard * SHARD_PROMPTS, min((shard + 1) * SHARD_PROMPTS, len(store.questions)))


def _request(store: AnswerStore, tokenizer: Tokenizer, index: int, prompt: tuple[int, ...]) -> Request:
    sampling = SamplingParams(
        temperature=store.questions[index].temperature,
        max_tokens=min(store.settings.max_new, store.settings.max_length - len(prompt)),
        stop_ids=tokenizer.eos_ids,
        seed=store.settings.seed + index,
    )
    return Request(id=str(index), prompt=prompt, sampling=sampling, speculation=OFF)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker process."""
    parser = argparse.ArgumentParser(description="Answer shards of a store.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--sharing", type=int, required=True, help="workers on this device")
    parser.add_argument("--shards", type=int, nargs="*", required=True)
    args = parser.parse_args(argv)
    workers = Workers(device=args.device, batch=args.batch, count=args.sharing)
    try:
        _work(AnswerStore.open(args.store), args.shards, workers, lambda shard: None)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
