"""What a cluster on Ray Serve promises, with two replicas: nothing is lost, and the text is the same everywhere.

python clients/cluster.py                   with an environment that has Paceline's extra ray
python clients/cluster.py --times           what Ray costs instead, on a quiet machine (see cluster_times.py)

Ends with a table, and with status 1 if a point does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial

import cluster_times
from checks import Tally, expect
from clustered import REPLICA, Clustered, clustered
from prompts import COMPLETIONS, request, said
from wire import Answer, post, send

OPTIONS = {"model": "smollm2", "drafter": ["ngram"], "max_sequences": 8, "kv_memory": "256M", "drain_timeout": 120}
SEEDED = 8  # requests that every replica answers
AT_ONCE = 16
LONG = 400  # tokens of a stream that is to be cut
AFFINITY = 0.9  # share of requests that go where their beginning is known
Row = tuple[str, str]


async def ask(cluster: Clustered, index: int, *, tokens: int, stream: bool = False, **headers: str) -> Answer:
    path, body = request(index, tokens=tokens)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return await send(cluster.port, post(path, body | {"stream": stream, "ignore_eos": True}, sent))


async def limited(work: list[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[Answer]]) -> Answer:
        async with places:
            return await call()

    return list(await asyncio.gather(*map(one, work)))


async def both_up(cluster: Clustered) -> bool:
    return len(await cluster.replicas()) == 2


async def mixed(cluster: Clustered, count: int) -> Row:
    """chats and completions, greedy and sampled, streamed and whole: all are answered, by both"""
    work = [partial(ask, cluster, i, tokens=12, stream=bool(i % 3)) for i in range(count)]
    answers = await limited(work)
    for answer in answers:
        said(answer)
    by = Counter(answer.headers[REPLICA] for answer in answers)
    expect(len(by) == 2 and min(by.values()) >= count // 10, f"both replicas answer: {by}")
    return f"{count} mixed requests", f"{count} answered, by replica: {sorted(by.values())}"


async def same(cluster: Clustered) -> Row:
    """a seeded request gives the same text from every replica, asked by its name"""
    names: set[str] = set()

    async def both_answer() -> bool:
        names.update(await cluster.replicas())  # a busy one may get none of some requests
        return len(names) == 2

    await cluster.until(both_answer, "of two replicas one does not answer")
    texts: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for index in range(SEEDED):
        for name in sorted(names):
            answer = await ask(cluster, index, tokens=24, **{REPLICA.replace("-", "_"): name})
            expect(answer.headers[REPLICA] == name, f"{name} was asked, {answer.headers[REPLICA]} answered")
            texts[index].add(said(answer))
    expect(all(len(each) == 1 for each in texts.values()), texts)
    return "the same seeded text", f"{SEEDED} requests × {len(names)} replicas: no difference"


async def affinity(cluster: Clustered, prefixes: int, repeats: int) -> Row:
    """requests that share a beginning go to one replica, and so do those of a session"""
    tale = "The keeper of the archive number {} wrote every morning about the weather, the ships and the visitors. " * 3
    order = [index for index in range(prefixes) for _ in range(repeats)]
    random.Random(0).shuffle(order)
    place: dict[int, str] = {}
    hits = 0
    for n, index in enumerate(order):
        body = {"prompt": tale.format(index, index, index) + f"Letter {n}:", "max_tokens": 2, "temperature": 0}
        answer = await send(cluster.port, post(COMPLETIONS, body))
        said(answer)
        hits += place.get(index) == answer.headers[REPLICA]
        place.setdefault(index, answer.headers[REPLICA])
    later = len(order) - prefixes
    expect(hits >= AFFINITY * later, f"{hits} of {later} repeated beginnings went where they were known")
    expect(len(set(place.values())) == 2, "all beginnings went to one replica")
    for name in ("anna", "bert", "cleo"):
        answers = [await ask(cluster, i, tokens=8, x_session_id=name) for i in range(4)]
        expect(all(answer.status == 200 for answer in answers), f"session {name} is answered")
        expect(len({answer.headers[REPLICA] for answer in answers}) == 1, f"session {name} moved")
    return "affinity", f"{hits} of {later} repeated beginnings ({hits / later:.0%}); 3 sessions stay"


async def killed(cluster: Clustered) -> Row:
    """a replica is killed in mid-stream: its streams end with an error, the others do not notice, and it is back"""
    before = await cluster.replicas()
    halves = [{REPLICA.replace("-", "_"): name} for name in sorted(before)]  # sessions may all have one replica
    streams = [asyncio.create_task(ask(cluster, i, tokens=LONG, stream=True, **halves[i % 2])) for i in range(8)]
    await asyncio.sleep(1)  # a fast machine ends some streams in three seconds, and those tell nothing
    victim = cluster.pids[0]
    os.kill(victim, signal.SIGKILL)
    answers = await asyncio.gather(*streams)
    lost = [answer for answer in answers if b"replica_lost" in answer.body]
    whole = [answer for answer in answers if b"replica_lost" not in answer.body]
    for answer in whole:
        said(answer)
    expect(lost and whole, f"{len(lost)} streams were lost, {len(whole)} not: both should be there")
    for answer in lost:
        expect(answer.whole and answer.status in (200, 503), f"{answer.status}, {answer.body[-200:]!r}")
        expect(answer.status == 200 or answer.headers.get("retry-after"), "a refusal says when to come again")
    names = {answer.headers.get(REPLICA) for answer in lost if answer.status == 200}
    expect(len(names) <= 1 and not names & {answer.headers[REPLICA] for answer in whole}, "one replica was lost")
    again = [await ask(cluster, i, tokens=8, x_session_id=str(i)) for i in range(8)]
    for answer in again:
        said(answer)
    await cluster.until(partial(both_up, cluster), "the replica is not back")
    after = await cluster.replicas()
    expect(len(after - before) == 1, f"{before} before, {after} after")
    return (
        "one killed in mid-stream",
        f"{len(lost)} streams ended with replica_lost, {len(whole)} untouched; it is back",
    )


STOP = asyncio.Event()  # set when a load is to end


async def stream_on(cluster: Clustered, answers: list[Answer], worker: int) -> None:
    """One stream after the other, each read to its end."""
    while not STOP.is_set():
        answers.append(await ask(cluster, worker + len(answers), tokens=24, stream=True))


async def scaled(cluster: Clustered) -> Row:
    """1 → 2 → 1 under load: every request is answered whole"""
    answers: list[Answer] = []
    cluster.change(
        {"min_replicas": 1, "max_replicas": 2, "target_waiting": 1, "upscale_delay": 1, "downscale_delay": 3}
    )

    async def alone(cluster: Clustered) -> bool:
        return len(cluster.pids) == 1

    for at_once, reached in ((1, alone), (24, both_up), (1, alone)):
        workers = [asyncio.create_task(stream_on(cluster, answers, worker)) for worker in range(at_once)]
        try:
            await cluster.until(partial(reached, cluster), f"{at_once} streams do not lead to {reached.__name__}")
        finally:
            STOP.set()
            await asyncio.gather(*workers)
            STOP.clear()
    for answer in answers:
        said(answer)
    return "2 → 1 → 2 → 1 under load", f"{len(answers)} streams, none lost"


async def audited(cluster: Clustered, python: str) -> Row:
    """`paceline audit --url` finds no difference between the replicas"""
    questions = cluster.file.with_name("questions.txt")
    questions.write_text("Why is the sky blue?\nName three rivers.\n", encoding="utf-8")
    command = [python, "-m", "paceline.cli.main", "audit", "--url", cluster.url, "--repeats", "6", "--quick"]
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--prompts", str(questions)], capture_output=True, text=True
    )
    expect(done.returncode == 0 and "from 2 replicas" in done.stdout, done.stdout + done.stderr)
    return "audit over both replicas", done.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="with Paceline and Ray (default: this one)")
    parser.add_argument("--count", type=int, default=200, help="mixed requests (default: 200)")
    parser.add_argument("--only", help="some cases: of mixed,same,affinity,audited,killed,scaled (default: all)")
    parser.add_argument("--times", action="store_true", help="measure what Ray costs instead")
    args = parser.parse_args()
    if args.times:
        cluster_times.main(args.python)
    tally, rows = Tally("cluster"), []
    cases: dict[str, Callable[[Clustered], Awaitable[Row]]] = {
        "mixed": partial(mixed, count=args.count),
        "same": same,
        "affinity": partial(affinity, prefixes=10, repeats=8),
        "audited": partial(audited, python=args.python),
        "killed": killed,
        "scaled": scaled,
    }
    with clustered(args.python, OPTIONS, min_replicas=2, max_replicas=2, cpus=0.5, health_period=1) as cluster:
        asyncio.run(cluster.until(partial(both_up, cluster), "the cluster does not start"))
        for name, case in cases.items():
            if args.only is None or name in args.only.split(","):
                with tally(name):
                    rows.append(asyncio.run(case(cluster)))
    width = max((len(what) for what, _ in rows), default=0)
    print("\n".join(f"  {what:<{width}}  {outcome}" for what, outcome in rows))
    tally.end()


if __name__ == "__main__":
    main()
