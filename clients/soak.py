"""Long inputs and a long load against a server in a process of its own: does it stay quick, and is anything left?

make soak                                   30 minutes; SOAK=3 for three
python clients/soak.py --minutes 3          with Paceline's own environment

First the burst: 64 long requests at once, while one process polls /health (at most 100 ms) and another reads streams
(no gap above 250 ms). Then mixed load: chats, streams, clients that leave, long inputs, forms, tools, bad requests and
samples. After a sixth of its time memory may grow by 5 %; at its end descriptors and pages are as before, and the same
seed gives the same text. Prints a line for each check, and JSON last, with the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from checks import Tally, expect
from odd_clients import idle
from prompts import request, said
from served import Served, served
from soak_load import Mix, long_requests
from wire import get, post, send

AT_ONCE = 64
HEALTH_MS, GAP_MS = 100.0, 250.0
CLIENTS = 6
WARM_SHARE = 1 / 6  # of the time: 5 of 30 minutes
GROWTH = 1.05
KV_MEMORY = "192M"  # filled within the first minute: memory that is used for the first time is no leak
SAMPLE_SECONDS = 3.0
WATCHER = Path(__file__).parent / "soak_watch.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of mixed load (default: %(default)g)")
    parser.add_argument("--serve-python", default=sys.executable, help="of Paceline's environment (default: this one)")
    args = parser.parse_args()
    tally, facts = Tally("soak"), {"machine": machine(), "minutes": args.minutes}
    with served(args.serve_python, "--kv-memory", KV_MEMORY) as server:
        asyncio.run(soak(server, tally, facts, seconds=60 * args.minutes))
    print(json.dumps(facts))
    tally.end()


async def soak(server: Served, tally: Tally, facts: dict[str, Any], *, seconds: float) -> None:
    long = [content for _, content in long_requests()]
    before = [said(await send(server.port, seeded)) for seeded in canaries()]
    await idle(server)
    facts["before"] = sample(server)
    await burst(server, tally, facts, long)
    await idle(server)
    facts["after_burst"] = sample(server)
    if seconds:
        await mixed(server, tally, facts, long, seconds)
    with tally("nothing is left"):
        await idle(server)
        await asyncio.sleep(2)
        facts["after"] = after = sample(server)
        expect(after["descriptors"] <= facts["before"]["descriptors"], after)
        expect(after["pages"] == facts["before"]["pages"], after)
    with tally("the same seeds give the same texts"):
        expect([said(await send(server.port, seeded)) for seeded in canaries()] == before, "other texts than before")
    with tally("healthy, and no error in the log"):
        expect((await send(server.port, get("/health"))).status == 200, "not healthy")
        wrong = [line for line in server.log.read_text().splitlines() if "Traceback" in line or "ERROR" in line]
        expect(not wrong, wrong[:3])


def canaries() -> list[bytes]:
    return [post(path, body) for path, body in (request(index, tokens=32) for index in range(6))]


async def burst(server: Served, tally: Tally, facts: dict[str, Any], long: list[bytes]) -> None:
    with watching(server) as quiet:
        await asyncio.sleep(3)
    facts["quiet"] = quiet
    with watching(server) as busy:
        await asyncio.sleep(1)
        began = time.monotonic()
        answers = await asyncio.gather(*(send(server.port, one) for one in islice(cycle(long), AT_ONCE)))
        facts["burst_seconds"] = round(time.monotonic() - began, 1)
    facts["burst"] = busy
    facts["burst_statuses"] = dict(Counter(str(answer.status) for answer in answers))
    with tally(f"{AT_ONCE} long requests at once are answered"):
        odd = [answer for answer in answers if answer.status not in (200, 400) or not answer.whole]
        expect(not odd, [(answer.status, answer.body[:200]) for answer in odd[:3]])
    with tally(f"/health within {HEALTH_MS:g} ms meanwhile"):
        expect(busy["health"]["max_ms"] < HEALTH_MS, busy["health"])
    with tally(f"another's stream has no gap above {GAP_MS:g} ms"):
        expect(busy["stream"]["max_ms"] < GAP_MS, busy["stream"])


@contextmanager
def watching(server: Served) -> Iterator[dict[str, Any]]:
    """Watch until the block ends; then the summaries are there."""
    found: dict[str, Any] = {}
    watchers = {
        kind: subprocess.Popen(
            [sys.executable, str(WATCHER), kind, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for kind in ("health", "stream")
    }
    try:
        yield found
    finally:
        for kind, watcher in watchers.items():
            out, _ = watcher.communicate(timeout=180)
            found[kind] = json.loads(out)


async def mixed(server: Served, tally: Tally, facts: dict[str, Any], long: list[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    clients = [Mix(server.port, seed, long) for seed in range(CLIENTS)]
    work = asyncio.gather(*(client.run(lambda: time.monotonic() > end) for client in clients))
    began, samples = time.monotonic(), []
    while not work.done():
        samples.append({"at": round(time.monotonic() - began, 1), **await asyncio.to_thread(sample, server)})
        await asyncio.wait([work], timeout=SAMPLE_SECONDS)
    facts["requests"] = dict(sum((Counter(client.done) for client in clients), Counter()))
    facts["samples"] = samples[:: max(1, len(samples) // 60)]
    with tally("every answer of the mixed load is a right one"):
        wrong = [line for client in clients for line in client.wrong]
        expect(not wrong, f"{len(wrong)}: {wrong[:5]}")
    with tally("memory is flat after the first sixth of the time"):
        later = [one["rss_mb"] for one in samples if one["at"] >= WARM_SHARE * seconds]
        tenth = max(1, len(later) // 10)
        facts["rss_mb"] = first, last = statistics.median(later[:tenth]), statistics.median(later[-tenth:])
        expect(last <= GROWTH * first, f"{first:g} MB, then {last:g} MB")


def sample(server: Served) -> dict[str, Any]:
    return {
        "rss_mb": round(server.memory / 1024, 1),
        "descriptors": server.descriptors,
        "threads": server.threads,
        "pages": server.speculation()["pages_held"],
    }


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor()}, {platform.system()}"


if __name__ == "__main__":
    main()
