"""The target answers prompts: Paceline's own engine, plain, with as many sequences at once as the device likes.

What an answer costs the host is more than what it costs a GPU, so a GPU gets several processes (`python -m
paceline.train.data.answering STORE …`), each with an engine and every so-manyth shard. A worker whose parent is gone
stops.
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
from paceline.errors import EngineDead, InvalidRequest, PacelineError
from paceline.text.tokenizer import Tokenizer
from paceline.train.data.answers import SHARD, AnswerStore, Exchange
from paceline.types import OFF, Finish, Request, SamplingParams

LOOK = 0.5  # seconds between two looks at what the workers have done

Report = Callable[[int, int], None]  # shards done, shards in all


@dataclass(frozen=True, slots=True)
class Crew:
    """Who answers, and on what."""

    device: str
    batch: int  # sequences at once, of one worker
    workers: int
    threads: int | None = None
    part: int = 0  # this process' shards among those of several machines or GPUs
    parts: int = 1


def answer(store: AnswerStore, crew: Crew, report: Report) -> None:
    """Answer what is missing of this part of the shards."""
    mine = [shard for shard in store.missing() if shard % crew.parts == crew.part]
    if not mine:
        return
    if crew.device == "cpu":
        _work(store, mine, crew, lambda done: report(store.shards - len(store.missing()), store.shards))
        return
    workers = [_start(store, crew, mine[index :: crew.workers]) for index in range(crew.workers)]
    try:
        _wait(store, workers, report)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()


def _start(store: AnswerStore, crew: Crew, shards: Sequence[int]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "paceline.train.data.answering", str(store.path), "--device", crew.device]
    words += ["--batch", str(crew.batch), "--sharing", str(crew.workers), "--shards", *map(str, shards)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    local = int(os.environ.get("LOCAL_RANK", 0))
    gpu = visible[local] if local < len(visible) and visible[local] else str(local)
    return subprocess.Popen(words, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "2"})


def _wait(store: AnswerStore, workers: Sequence[subprocess.Popen[bytes]], report: Report) -> None:
    while any(worker.poll() is None for worker in workers):
        if failed := [worker for worker in workers if worker.poll() not in (None, 0)]:
            raise EngineDead(
                f"a process that answers prompts ended with status {failed[0].returncode}; its reason stands above. "
                "What was answered is kept: give the same command again, with a smaller --answer-batch or fewer "
                "--answer-workers if memory was short"
            )
        report(store.shards - len(store.missing()), store.shards)
        time.sleep(LOOK)
    if failed := [worker for worker in workers if worker.returncode]:
        raise EngineDead(f"a process that answers prompts ended with status {failed[0].returncode}; see above")
    report(store.shards - len(store.missing()), store.shards)


def _work(store: AnswerStore, shards: Sequence[int], crew: Crew, done: Callable[[int], None]) -> None:
    settings = store.settings
    config = EngineConfig.of(
        device=crew.device,
        max_sequences=crew.batch,
        max_context=settings.max_length,
        max_draft=1,
        kv_memory=_kv_memory(crew),
    )
    ready = read_target(settings.target, format=settings.format, device=crew.device, config=config)
    assert ready.tokenizer is not None
    # Text is of no use here, and the time that it takes is.
    engine = assemble(replace(ready, tokenizer=None), config=config, device=crew.device, threads=crew.threads).engine
    for shard, exchanges in _answered(engine, ready.tokenizer, store, shards, crew.batch):
        store.write(shard, exchanges)
        done(shard)


def _kv_memory(crew: Crew) -> int | None:
    """Workers that share a GPU must not each take all that is free."""
    if crew.device == "cpu" or crew.workers == 1:
        return None
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free * 0.6 / crew.workers)


def _answered(
    engine: Engine, tokenizer: Tokenizer, store: AnswerStore, shards: Sequence[int], batch: int
) -> Iterator[tuple[int, list[Exchange]]]:
    """Shards as they become complete; the next ones begin while the last answers of one are still being written."""
    template = ChatTemplate(tokenizer)
    todo = (index for shard in shards for index in _members(store, shard))
    found: dict[int, Exchange] = {}
    texts: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    unwritten = list(shards)
    parent = os.getppid()
    while unwritten:
        while len(texts) < batch + batch // 4 and (index := next(todo, None)) is not None:
            prompt = tuple(template.encode([{"role": "user", "content": store.questions[index].text}]))
            if len(prompt) > store.settings.max_length - 2:
                found[index] = Exchange(np.zeros(1, dtype=np.int32), 1)
                continue
            texts[index] = (prompt, [])
            engine.submit(_request(store, tokenizer, index, prompt))
        for event in engine.step():
            index = int(event.request_id)
            texts[index][1].extend(event.tokens)
            if event.finish is Finish.ERROR:
                raise EngineDead(f"the engine stopped while answering: {event.error}")
            if event.finish is not None:
                prompt, answer = texts.pop(index)
                found[index] = Exchange(np.array([*prompt, *answer], dtype=np.int32), len(prompt))
        for shard in [shard for shard in unwritten[:4] if all(index in found for index in _members(store, shard))]:
            unwritten.remove(shard)
            yield shard, [found.pop(index) for index in _members(store, shard)]
        if os.getppid() != parent:
            raise InvalidRequest("the process that wanted the answers is gone")


def _members(store: AnswerStore, shard: int) -> range:
    return range(shard * SHARD, min((shard + 1) * SHARD, len(store.questions)))


def _request(store: AnswerStore, tokenizer: Tokenizer, index: int, prompt: tuple[int, ...]) -> Request:
    sampling = SamplingParams(
        temperature=store.questions[index].temperature,
        max_tokens=min(store.settings.max_new, store.settings.max_length - len(prompt)),
        stop_ids=tokenizer.eos_ids,
        seed=store.settings.seed + index,
    )
    return Request(id=str(index), prompt=prompt, sampling=sampling, speculation=OFF)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answer shards of a store.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--sharing", type=int, required=True, help="workers on this device")
    parser.add_argument("--shards", type=int, nargs="*", required=True)
    args = parser.parse_args(argv)
    crew = Crew(device=args.device, batch=args.batch, workers=args.sharing)
    try:
        _work(AnswerStore.open(args.store), args.shards, crew, lambda shard: None)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
