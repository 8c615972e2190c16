"""What HTTP adds to the time of a token: SmolLM2 offline and over a stream, one after the other, many times.

python clients/overhead.py --rounds 5 --pairs 12
python clients/overhead.py --drafter ngram --usage

Each round starts a fresh server and a fresh process with `LLM`, because where weights come to lie in memory can make a
process a little faster or slower for all its life; within a round the two take turns, and which is first changes. The
client is a bare socket that reads and looks at its clock: what a client does with a chunk is not the server's time.
Needs a quiet machine. Prints medians and the added share with a 95 % interval (bootstrap, rounds first and then
pairs), the CPU time that each thread of the server took for a token where Linux tells, and JSON as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from served import ROOT, served

PROMPT = "The history of the bicycle begins with"
RESAMPLES = 4000
PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Pair:
    """Seconds a token, after the first."""

    offline: float
    http: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes (default: 5)")
    parser.add_argument("--pairs", type=int, default=12, help="in each round (default: 12)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer (default: 128)")
    parser.add_argument("--drafter", default="none", help="default: none, plain decoding")
    parser.add_argument("--usage", action="store_true", help="with the usage in every chunk")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        answer_offline(args)
        return
    rounds, threads = [], []
    for number in range(args.rounds):
        options = ("--kv-memory", "512M", "--drafter", args.drafter)
        with offline(args) as ask, served(sys.executable, *options) as server:
            pairs, spent = measure(args, ask, server.port, server.process.pid)
        rounds.append(pairs)
        threads.append(spent)
        print(f"round {number + 1}: {said(pairs)}", flush=True)
    report(args, rounds, threads)


def measure(args: argparse.Namespace, ask: Any, port: int, pid: int) -> tuple[list[Pair], dict[str, float]]:
    """The pairs of a round, and microseconds of CPU a token by thread of the server."""
    for _ in range(2):  # to warm up
        ask(), stream(args, port)
    spent: dict[str, float] = {}
    pairs = []
    for number in range(args.pairs):
        alone = ask() if number % 2 else None
        before = cpu_times(pid)
        over_http = stream(args, port)
        for thread, seconds in cpu_times(pid).items():
            spent[thread] = spent.get(thread, 0.0) + seconds - before.get(thread, 0.0)
        pairs.append(Pair(offline=ask() if alone is None else alone, http=over_http))
    return pairs, {thread: 1e6 * seconds / (args.pairs * args.tokens) for thread, seconds in spent.items()}


def stream(args: argparse.Namespace, port: int) -> float:
    """Seconds a token over HTTP."""
    body = {"prompt": PROMPT, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    if args.usage:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode())
        arrivals, parts = [], []
        while data := connection.recv(65536):
            arrivals.append(time.perf_counter())
            parts.append(data)
    whole = b"".join(parts)
    assert whole.startswith(b"HTTP/1.1 200"), whole[:1000]
    chunks = [at for at, part in zip(arrivals, parts, strict=True) if b'"choices":[{' in part]
    assert b"data: [DONE]" in whole, whole[-1000:]
    return (chunks[-1] - chunks[0]) / (args.tokens - 1)  # the first chunk is that of the first token


# ── offline ──


def answer_offline(args: argparse.Namespace) -> None:
    """For each line of input, seconds a token of `LLM.stream`."""
    sys.path.insert(0, str(ROOT))
    from paceline import LLM, SamplingParams

    llm = LLM("smollm2", drafter=[] if args.drafter == "none" else args.drafter, kv_memory=512 << 20)
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    print("ready", flush=True)
    for _ in sys.stdin:
        arrivals = [time.perf_counter() for event in llm.stream(PROMPT, sampling) if event.tokens]
        print((arrivals[-1] - arrivals[0]) / (args.tokens - 1), flush=True)


@contextmanager
def offline(args: argparse.Namespace) -> Iterator[Any]:
    options = ["--offline", "--tokens", str(args.tokens), "--drafter", args.drafter]
    process = subprocess.Popen(
        [sys.executable, __file__, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    questions, answers = process.stdin, process.stdout
    try:
        while (line := answers.readline()).strip() != "ready":
            if not line:
                raise SystemExit("the offline process did not start")

        def ask() -> float:
            questions.write("\n")
            return float(answers.readline())

        yield ask
    finally:
        questions.close()
        process.wait(30)


# ── server ──


def cpu_times(pid: int) -> dict[str, float]:
    """Seconds of CPU: of the main thread, which is the event loop, and of the others, which step and compute."""
    times: dict[str, float] = {}
    for task in (PROCESSES / str(pid) / "task").glob("*"):
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (OSError, ValueError, IndexError):  # it ended, or this is no Linux
            continue
        name = "event loop" if task.name == str(pid) else "others"
        times[name] = times.get(name, 0.0) + seconds
    return times


# ── what came of it ──


def added(pairs: list[Pair]) -> float:
    """The share that HTTP adds: the median over pairs."""
    return statistics.median(pair.http / pair.offline - 1 for pair in pairs)


def interval(rounds: list[list[Pair]]) -> tuple[float, float]:
    draw = random.Random(0)
    found = []
    for _ in range(RESAMPLES):
        chosen = [draw.choices(pairs, k=len(pairs)) for pairs in draw.choices(rounds, k=len(rounds))]
        found.append(statistics.median(added(pairs) for pairs in chosen))
    found.sort()
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def said(pairs: list[Pair]) -> str:
    alone, over = (statistics.median(getattr(pair, name) for pair in pairs) for name in ("offline", "http"))
    return f"{1e3 * alone:.3f} ms a token offline, {1e3 * over:.3f} ms over HTTP, added {added(pairs):+.1%}"


def report(args: argparse.Namespace, rounds: list[list[Pair]], threads: list[dict[str, float]]) -> None:
    low, high = interval(rounds)
    share = statistics.median(added(pairs) for pairs in rounds)
    spent = {name: statistics.median(each.get(name, 0.0) for each in threads) for name in threads[0]}
    print(f"all: {said([pair for pairs in rounds for pair in pairs])}")
    print(f"added: {share:+.1%}, 95 % between {low:+.1%} and {high:+.1%}")
    print("CPU µs a token: " + ", ".join(f"{name} {us:.0f}" for name, us in sorted(spent.items())))
    facts: dict[str, Any] = {"options": vars(args), "cores": os.cpu_count(), "added": share, "low": low, "high": high}
    facts |= {"cpu_us_per_token": spent, "rounds": [[asdict(pair) for pair in pairs] for pairs in rounds]}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
