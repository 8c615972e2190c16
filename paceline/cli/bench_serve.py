"""The command `paceline bench serve`: its options, progress, interruption and exit status."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import count, counts, numbers, temperatures, whole
from paceline.cli.prompts_and_results import add_prompts, add_results, check_places, data_of, prompts_of, write_results
from paceline.errors import InvalidRequest
from paceline.progress import Progress, progress_bar

if TYPE_CHECKING:
    from paceline.bench.arrivals import Load
    from paceline.bench.client import Client, RequestOutcome
    from paceline.bench.serve import Arm, LoadPlan, LoadRun
    from paceline.bench.workloads import BenchPrompt

SERVE = """Load on any OpenAI server (Paceline, vLLM, SGLang, llama-server), and how it does.

paceline bench serve --url http://127.0.0.1:8000 --prompts spec_bench --concurrency 1,2,4,8
paceline bench serve --url http://127.0.0.1:8000 --prompts chats.jsonl --rate 4 --goodput ttft:200 tpot:50
paceline bench serve --url http://127.0.0.1:8000 --prompts mt_bench --compare on,off --html report.html
paceline bench serve --prompts random --input-tokens 512 --compare http://one:8000,http://other:8000

TTFT is to the first chunk with text, TPOT the time after it by the tokens after it, ITL between two chunks. A round of
speculation sends several tokens in one chunk: ITL is then long and says little; TPOT is what a reader feels. Arms of
--compare take turns block by block on the same prompts; ratios have 95 % intervals. Exit status: 0 all answered, 1 some
requests failed or the server went away (what came is kept), 2 nothing could be measured.
"""
SLOS = ("ttft", "tpot", "e2el")


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="(default: chat)")
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server names)")
    group.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a silent server (default: 600)")
    group.add_argument(
        "--compare",
        metavar="ARM,ARM,…",
        help="on, off, the name of a drafter that the server has, or several addresses; each is held against the last",
    )
    add_prompts(parser)
    _add_load(parser)
    add_results(parser)


def _add_load(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--concurrency", type=counts, metavar="N,N,…", help="requests open at once (default: 1)")
    group.add_argument(
        "--rate", type=_rates, metavar="R,R,…", help="requests a second; 1:8 grows from 1 to 8 over the run"
    )
    group.add_argument(
        "--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate (default: poisson)"
    )
    group.add_argument("--temperature", type=temperatures, default=(0.0,), metavar="X,X,…", help="(default: 0)")
    group.add_argument("--ignore-eos", action="store_true", help="answers of full length; not every server knows it")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of every request")
    group.add_argument("--rounds", type=count, default=1, metavar="N", help="repetitions of everything (default: 1)")
    group.add_argument("--warm-up", type=whole, default=1, metavar="N", help="requests that do not count (default: 1)")
    group.add_argument(
        "--goodput",
        type=_slo,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"count requests a second that keep these limits: {', '.join(SLOS)}, such as ttft:200 tpot:50",
    )
    group.add_argument(
        "--cache-salt",
        action=BooleanOptionalAction,
        default=True,
        help="no run finds prompts of an earlier run, arm or load in the server's prefix cache; off for servers that "
        "refuse the field (default: on)",
    )
    group.add_argument("--bursts", action="store_true", help="have the server count the tokens of every chunk")


def run(args: Namespace) -> int:
    from paceline.bench.serve_record import record
    from paceline.bench.serve_text import text
    from paceline.bench.workloads import SYNTHETIC

    runs: list[LoadRun] = []
    plans: list[LoadPlan] = []
    interrupted = False
    check_places(args)
    synthetic = bool(set(args.prompts) & set(SYNTHETIC))
    # Here a bad file is an error before any request is sent. Without synthetic prompts nobody asks for their length.
    chosen = None if synthetic else prompts_of(args, words=dict[str, int]().__getitem__)
    try:
        asyncio.run(_measure(args, chosen, runs, plans))
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    found = record(plans[0], runs, _facts(args, interrupted=interrupted), goodput=dict(args.goodput))
    print(text(found))
    write_results(args, found, title=f"Load on {runs[0].arm.model}" if runs else "Load")
    return interrupted_status() if interrupted else 0 if all(run.complete for run in runs) else 1


async def _measure(
    args: Namespace, chosen: list[BenchPrompt] | None, runs: list[LoadRun], plans: list[LoadPlan]
) -> None:
    """Measure into `runs` and `plans`, which keep what there is if this is interrupted. `chosen`: None for synthetic
    prompts, whose length in words depends on the server's tokenizer."""
    from paceline.bench.serve import measure

    clients: list[Client] = []
    try:
        arms = await _arms(args, clients)
        lengths = {} if chosen else await _lengths(args, arms[0])
        plans.append(_plan(args, chosen or prompts_of(args, words=lengths.__getitem__)))
        with progress_bar("warming up") as progress:
            progress.phase("warming up", unit="requests", total=plans[0].requests * len(arms))
            await measure(plans[0], arms, runs, tick=partial(_counted, progress))
    finally:
        for client in clients:
            await client.close()


async def _arms(args: Namespace, clients: list[Client]) -> list[Arm]:
    from paceline.bench.client import Client
    from paceline.bench.serve import Arm

    names = args.compare.split(",") if args.compare else [""]
    if len(set(names)) < len(names) or "" in names[1:] or (args.compare and len(names) < 2):
        raise InvalidRequest(f"--compare takes two different arms or more, such as on,off; not {args.compare!r}")
    key, arms = args.api_key or os.environ.get("OPENAI_API_KEY"), []
    for name in names:
        url = name if "://" in name else args.url
        clients.append(Client(url, endpoint=args.endpoint, key=key, timeout=args.timeout))
        model = args.model or await clients[-1].first_model()
        fields = _common_fields(args) | ({} if "://" in name or not name else _speculation(name))
        arms.append(Arm(name or "all", clients[-1], model, fields))
    return arms


def _common_fields(args: Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"ignore_eos": True} if args.ignore_eos else {}
    if args.bursts:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return {**fields, **args.extra_body}


def _speculation(arm: str) -> dict[str, Any]:
    return {"speculation": {"enabled": arm == "on"} if arm in ("on", "off") else {"enabled": True, "drafter": arm}}


async def _lengths(args: Namespace, arm: Arm) -> dict[str, int]:
    """Words of each kind of synthetic prompt."""
    from paceline.bench.serve import words_for
    from paceline.bench.workloads import SYNTHETIC

    kinds = [source for source in args.prompts if source in SYNTHETIC]
    return {kind: await words_for(arm, kind, tokens=args.input_tokens, data=data_of(args)) for kind in kinds}


def _plan(args: Namespace, chosen: Sequence[BenchPrompt]) -> LoadPlan:
    from paceline.bench.serve import LoadPlan

    return LoadPlan(
        prompts=chosen,
        loads=_loads(args),
        temperatures=args.temperature,
        arrivals=args.arrivals,
        rounds=args.rounds,
        warm_up=args.warm_up,
        seed=args.seed,
        salt=args.cache_salt,
    )


def _loads(args: Namespace) -> list[Load]:
    from paceline.bench.arrivals import Load

    at_once: Sequence[int | None] = args.concurrency or ([None] if args.rate else [1])
    rates = args.rate or [(None, None)]
    return [Load(at_once=n, rate=rate, last_rate=last) for rate, last in rates for n in at_once]


def _facts(args: Namespace, *, interrupted: bool) -> dict[str, Any]:
    import torch

    from paceline.bench.machine import describe

    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if args.endpoint == "chat" else "openai",
        "command": shlex.join(["paceline", *without_key(sys.argv[1:])]),
        "client_machine": describe(torch.device("cpu")),
        "prompts": args.prompts,
        "interrupted": interrupted,
    }


def without_key(words: Sequence[str]) -> list[str]:
    """The words of the command line without the API key, for the record."""
    hidden = [word.partition("=")[0] + "=…" if word.startswith("--api-key=") else word for word in words]
    return ["…" if before == "--api-key" else word for before, word in zip(["", *hidden], hidden, strict=False)]


def _counted(progress: Progress, run: LoadRun) -> Callable[[RequestOutcome], None]:
    """Make the function that shows each outcome of a run: its speed so far, and how many requests failed."""
    began, failed, tokens = time.perf_counter(), 0, 0

    def tick(outcome: RequestOutcome) -> None:
        nonlocal failed, tokens
        failed, tokens = failed + (not outcome.good), tokens + outcome.output_tokens
        speed = tokens / (run.seconds or time.perf_counter() - began)
        progress.doing = f"{run.load.title} T={run.temperature:g} {run.arm.name}"
        progress.note = f"{speed:.0f} tokens/s" + (f", {failed} failed" if failed else "")
        progress.count()

    return tick


def _rates(text: str) -> list[tuple[float, float | None]]:
    found: list[tuple[float, float | None]] = []
    for word in text.split(","):
        ends = numbers(word.replace(":", ","))
        if len(ends) > 2 or min(ends) <= 0:
            raise ArgumentTypeError(f"requests a second above 0, such as 4 or 1:8, are needed, not {word!r}")
        found.append((ends[0], ends[1] if len(ends) == 2 else None))
    return found


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in SLOS or not limit:
        raise ArgumentTypeError(f"limits such as ttft:200 are needed, of {', '.join(SLOS)}; not {text!r}")
    return name, numbers(limit)[0]


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"a JSON object is needed, not {text!r}")
    return found
