"""What happens in the middle of a load: signals, a fault of the engine, clients that leave, a full queue, no pages.

python clients/kill.py                      with Paceline's own environment
python clients/kill.py --only rank --kills 50 --save losses.json

Each case has a server in a process of its own. Every request must end exactly once: one answer with a clear status, or
one end of its stream, and one line in the log. What survives says what it says alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from checks import Tally, expect
from lost_ranks import CASES, FEW, rank_losses
from odd_clients import idle
from planted import FAULT
from prompts import COMPLETIONS, request
from served import Served, served
from wire import HOST, Answer, get, leave, post, send

REQUESTS, TOKENS = 24, 48
LONG = 2000  # tokens: does not end by itself in time
MEMORY = ("--kv-memory", "512M")
PLANTED = (str(Path(__file__).parent / "planted.py"),)


@dataclass(frozen=True, slots=True)
class End:
    """Of a request: its status, what came of its text, and every word in it that is an end."""

    status: int
    text: str
    ends: tuple[str, ...]


def ended(answer: Answer) -> End:
    if answer.status != 200:
        body = answer.json() if answer.body else {"error": {"code": "no answer"}}
        return End(answer.status, "", (body["error"]["code"],))
    events = answer.events()
    choices = [choice for event in events for choice in event.get("choices", ())]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    ends += [event["error"]["code"] for event in events if "error" in event]
    ends += [] if answer.whole else ["cut off"]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
    return End(200, "".join(texts), tuple(ends))


async def ask(server: Served, index: int, *, tokens: int = TOKENS, name: str = "request") -> End:
    path, body = request(index, tokens=tokens)
    body |= {"stream": True, "ignore_eos": True}
    return ended(await send(server.port, post(path, body, {"X-Request-Id": f"{name}-{index}"})))


async def load(server: Served, count: int = REQUESTS, *, tokens: int = TOKENS) -> list[asyncio.Task[End]]:
    """Streams, at a time when all of them have been heard."""
    before = server.speculation()["running"]
    tasks = [asyncio.create_task(ask(server, index, tokens=tokens)) for index in range(count)]
    while (await asyncio.to_thread(server.speculation))["running"] < before + count:
        expect(not any(task.done() for task in tasks), "some have ended already: too few tokens")
        await asyncio.sleep(0.02)
    return tasks


def check_log(server: Served, wanted: dict[str, set[str]]) -> None:
    """Each of these requests has one line, with one of these words for its end."""
    found = [line for line in server.lines() if line.get("request_id") in wanted]
    counts = Counter(line["request_id"] for line in found)
    expect(counts.keys() == wanted.keys(), f"not in the log: {sorted(wanted.keys() - counts.keys())}")
    expect(set(counts.values()) == {1}, f"more than one line: {counts.most_common(3)}")
    wrong = [line for line in found if line.get("finish", "none") not in wanted[line["request_id"]]]
    expect(not wrong, wrong[:3])


def names(count: int = REQUESTS) -> list[str]:
    return [f"request-{index}" for index in range(count)]


async def drain(server: Served, alone: list[str]) -> None:
    """SIGTERM: what runs ends well, what comes is refused, the process leaves with 0"""
    tasks = await load(server)
    server.signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    late, health = await ask(server, 0, name="late"), await send(server.port, get("/health"))
    expect(late.status == 503 and health.status == 503, f"{late}, {health.status} while draining")
    expect(await asyncio.gather(*tasks) == [End(200, text, ("length",)) for text in alone], "texts are the same")
    await leaves(server)
    check_log(server, {name: {"length"} for name in names()})


async def abort(server: Served, alone: list[str]) -> None:
    """SIGTERM twice: what runs is told that it was aborted, and the process leaves at once"""
    tasks = await load(server, tokens=LONG)
    server.signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    expect(server.process.poll() is None and not any(task.done() for task in tasks), "the first one waits")
    began = time.perf_counter()
    server.signal(signal.SIGTERM)
    for end, text in zip(await asyncio.gather(*tasks), alone, strict=True):
        expect(end.status in (200, 503) and end.ends == ("aborted",), end)  # 503: before its first token
        expect(end.text[: len(text)] == text[: len(end.text)], (end.text, text))
    print(f"        all {len(tasks)} ended {time.perf_counter() - began:.2f} s after the second signal")
    await leaves(server)
    check_log(server, {name: {"abort"} for name in names()})


async def fault(server: Served, alone: list[str]) -> None:
    """An exception in the engine's thread: all end with an error, nobody waits, the server says it is dead"""
    tasks = await load(server, tokens=LONG)
    waiting = [asyncio.create_task(ask(server, index, name="waiting")) for index in range(60)]
    await asyncio.sleep(0.3)
    server.signal(signal.SIGUSR1)
    for end, text in zip(await asyncio.gather(*tasks), alone, strict=True):
        expect(end.status in (200, 500) and end.ends == ("engine_error",), end)
        expect(end.text[: len(text)] == text[: len(end.text)], (end.text, text))
    statuses = Counter((end.status, *end.ends) for end in await asyncio.gather(*waiting))
    told = {(200, "engine_error"), (500, "engine_error"), (503, "engine_dead")}
    expect(statuses.keys() <= told | {(200, "length")}, statuses)
    after, health = await ask(server, 0, name="late"), await send(server.port, get("/health"))
    expect((after.status, health.status) == (503, 503), f"{after}, {health.status}")
    expect(FAULT in server.log.read_text(), "the log says why")
    check_log(server, {name: {"error"} for name in names()})
    server.signal(signal.SIGTERM)
    await leaves(server)


async def storm(server: Served, alone: list[str], *, connections: int = 1000) -> None:
    """1000 clients that leave at any moment, beside others: nothing is left, and the others' texts are the same"""
    before = (server.descriptors, server.threads)
    places = asyncio.Semaphore(16)
    work = asyncio.gather(*(drop(server, index, places) for index in range(connections)))
    beside = sum(await asyncio.gather(*(calm(server, worker, alone, work) for worker in range(4))))
    heard = await work
    await idle(server)
    await asyncio.sleep(0.5)
    now = (server.descriptors, server.threads)
    expect(now[0] <= before[0] + 1 and now[1] <= before[1], f"descriptors and threads: {before} before, {now} after")
    check_log(server, {name: {"abort", "length"} for name in heard if name})
    print(f"        {beside} answers beside {connections} clients that left; {server.memory >> 10} MiB resident")


async def calm(server: Served, worker: int, alone: list[str], storm: asyncio.Future[list[str]]) -> int:
    """One answer after the other while the storm lasts; how many."""
    count = 0
    while not storm.done():
        index = (worker + 4 * count) % REQUESTS
        end = await ask(server, index, name=f"beside-{worker}-{count}")
        expect(end == End(200, alone[index], ("length",)), (end, alone[index]))
        count += 1
    return count


async def drop(server: Served, index: int, places: asyncio.Semaphore) -> str:
    """Leave: silent, in the head, in the body, before the first token, in mid-stream. The id, if surely heard."""
    body = {"prompt": "Tell me a very long story.", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    whole = post(COMPLETIONS, body, {"X-Request-Id": f"left-{index}"})
    part = (0, 40, len(whole) - 20, len(whole), len(whole))[index % 5]
    async with places:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(whole[:part])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        heard = index % 5 == 4 and bool(await reader.read(200))
        await asyncio.sleep(index % 7 * 0.05)  # some tokens more
        await leave(writer)
    return f"left-{index}" if heard else ""


async def full(server: Served, alone: list[str]) -> None:
    """A full queue: those that fit are answered as ever, the others get 429 and are told when to come again"""
    path, body = request(0, tokens=TOKENS)
    ends = await asyncio.gather(*(ask(server, index) for index in range(REQUESTS)))
    counts = Counter(end.status for end in ends)
    expect(counts == {200: 8, 429: REQUESTS - 8}, counts)
    good = [(end, text) for end, text in zip(ends, alone, strict=True) if end.status == 200]
    expect(all(end == End(200, text, ("length",)) for end, text in good), "texts are the same")
    busy = await load(server, 4, tokens=LONG)
    waits = [asyncio.create_task(ask(server, index, tokens=LONG, name="waits")) for index in range(4)]
    await asyncio.sleep(0.5)
    refused = await send(server.port, post(path, body))
    expect(refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 60, refused)
    for task in (*busy, *waits):
        task.cancel()
    await asyncio.gather(*busy, *waits, return_exceptions=True)
    await idle(server)
    expect((await ask(server, 0, name="again")).text == alone[0], "there is room again")


async def exhausted(server: Served, alone: list[str]) -> None:
    """Pages run out: sequences give theirs up and come again, and say the same"""
    expect(
        await asyncio.gather(*await load(server)) == [End(200, text, ("length",)) for text in alone], "the same texts"
    )
    preempted = server.metric("vllm:num_preemptions_total")
    expect(preempted > 0, "nobody had to give up a page: too much memory for this case")
    await idle(server)
    check_log(server, {name: {"length"} for name in names()})
    print(f"        {preempted:g} times a sequence gave its pages up")


async def leaves(server: Served) -> None:
    """The process ends by itself, with status 0."""
    status = await asyncio.to_thread(partial(server.process.wait, 60))
    expect(status == 0, f"status {status}")


Play = Callable[[Served, list[str]], Awaitable[None]]
# What happens, and how the server was started for it.
PLAYS: dict[str, tuple[Play, tuple[str, ...], tuple[str, ...]]] = {
    "drain": (drain, MEMORY, ()),
    "abort": (abort, MEMORY, ()),
    "fault": (fault, MEMORY, PLANTED),
    "storm": (storm, MEMORY, ()),
    "full": (full, (*MEMORY, "--max-sequences", "4", "--max-waiting", "4"), ()),
    "exhausted": (exhausted, ("--kv-memory", "24M", "--max-context", "512"), ()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve-python", default=sys.executable, help="of Paceline's environment (default: this one)")
    parser.add_argument("--only", action="append", choices=[*PLAYS, *CASES], help="which (default: all)")
    parser.add_argument("--kills", type=int, default=FEW, help="times that a rank is lost (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which it is (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="file for what came of each loss, as JSON")
    args = parser.parse_args()
    tally, chosen = Tally("kill"), args.only or [*PLAYS, *CASES]
    if losses := [name for name in chosen if name in CASES]:
        rank_losses(args.serve_python, tally, losses, kills=args.kills, seed=args.seed, save=args.save)
    plays = [name for name in chosen if name in PLAYS]
    alone = whole_texts(args.serve_python) if plays else []
    for name in plays:
        play, options, program = PLAYS[name]
        with tally(f"{name}: {play.__doc__}"), served(args.serve_python, *options, program=program) as server:
            asyncio.run(play(server, alone))
    tally.end()


def whole_texts(python: str) -> list[str]:
    with served(python, *MEMORY) as server:
        return asyncio.run(texts(server))


async def texts(server: Served) -> list[str]:
    """What each says alone."""
    return [(await ask(server, index)).text for index in range(REQUESTS)]


if __name__ == "__main__":
    main()
