"""Plan: what a model needs on GPUs that one does not have yet, and how fast it would be.

paceline plan llama-3.1-8b --gpus h200
paceline plan qwen3-32b --gpus h100:8 --drafter qwen3-1.7b --draft 3 --acceptance 0.7
paceline plan llama-3.1-8b --gpus h200 --drafter eagle-shape --acceptance 0.8 --replicas 1,4,16 --rate-each 12
paceline plan --against docs/results/engine-llama-3.1-8b.json

MODEL is a model on this machine, a config.json, or a shape: llama-3.1-8b, llama-3.2-1b, qwen3-32b, qwen3-1.7b,
smollm2-135m. Only headers are read and nothing is fetched. Speeds come from constants that were measured on one H200;
for other GPUs they are estimates from data sheets, and the output says so. An acceptance is the probability that a
drafted token is right when all before it are: `paceline tune` measures it for your prompts.

With --replicas a cluster is simulated: Poisson arrivals, a router, and replicas that read prompts and decode batches.
docs/planning.md says what is modelled and what is not. Exit status: 0 planned; 1 a figure of --against differs by more
than 15 %; 2 the plan is impossible, such as a model that does not fit.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import FORMATS, count, counts, whole
from paceline.errors import InvalidRequest
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.plan.cluster_report import Study
    from paceline.plan.fleet import Plan, Question

MAX_ERROR = 0.15  # by which a measured figure of --against may differ
CLUSTER_ONLY = ("rate", "rate_each", "router_rate", "routing", "prefixes", "prefix_tokens")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a model on this machine, a config.json, or a shape")
    parser.add_argument("--gpus", metavar="KIND[:N]", help="such as h100:8; kinds: h100, h100-pcie, h200, b200")
    parser.add_argument(
        "--tensor-parallel", type=count, metavar="T", help="GPUs a replica (default: the fewest that hold the model)"
    )
    parser.add_argument("--context", type=count, default=2048, metavar="N", help="tokens of a sequence (default: 2048)")
    parser.add_argument("--batch", type=counts, metavar="N,…", help="(default: powers of two up to the largest)")
    parser.add_argument(
        "--max-sequences", type=count, default=256, metavar="N", help="sequences of a replica at once (default: 256)"
    )
    parser.add_argument("--format", default="auto", metavar="FORMAT", help=f"of the weights: {', '.join(FORMATS)}")
    parser.add_argument("--kv-format", default="bf16", metavar="FORMAT", help="bf16 or fp8 (default: bf16)")
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        default="none",
        metavar="DRAFTER",
        help="a model or a shape, eagle:PATH, eagle-shape, block:PATH, block-shape, self, ngram, suffix, "
        "prediction, or none (default: none)",
    )
    group.add_argument(
        "--drafter-tensor-parallel",
        type=count,
        default=1,
        metavar="T",
        help="GPUs of a drafter: 1 or as many as the model's (default: 1)",
    )
    group.add_argument("--draft", type=count, default=4, metavar="K", help="tokens of the longest draft (default: 4)")
    group.add_argument(
        "--acceptance", type=float, metavar="A", help="0 to 1, for each drafted token (default: not known)"
    )
    _add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--markdown", action="store_true", help="the table of the cluster for a page, and nothing else")
    parser.add_argument(
        "--against", nargs="+", metavar="FILE", help="instead of a plan: compare records of `bench engine --json`"
    )


def _add_cluster(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("a simulated cluster")
    group.add_argument("--replicas", type=counts, metavar="N,…", help="numbers of replicas, such as 1,4,16,64,256,1000")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second, of the whole cluster")
    group.add_argument("--rate-each", type=float, metavar="R", help="instead of --rate: for each replica")
    group.add_argument("--router-rate", type=float, metavar="R", help="requests a second that the router takes at most")
    group.add_argument(
        "--routing",
        metavar="NAME,…",
        help="random, least-waiting, prefix (default: all; prefix if there are --prefixes)",
    )
    group.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of arrivals (default: 60)")
    group.add_argument("--prompt-tokens", type=count, default=512, metavar="N", help="in the mean (default: 512)")
    group.add_argument("--output-tokens", type=count, default=256, metavar="N", help="in the mean (default: 256)")
    group.add_argument("--lengths", default="geometric", metavar="KIND", help="fixed or geometric (default: geometric)")
    group.add_argument("--prefixes", type=count, metavar="N", help="different beginnings of prompts")
    group.add_argument("--prefix-tokens", type=count, metavar="N", help="tokens of each beginning, of --prompt-tokens")
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="(default: 0)")


def run(args: Namespace) -> int:
    if args.against is not None:
        return _against(args)
    if args.model is None or args.gpus is None:
        raise InvalidRequest("name a MODEL and --gpus KIND:N, such as `paceline plan llama-3.1-8b --gpus h200`")
    if args.replicas is None:
        given = [name for name in CLUSTER_ONLY if getattr(args, name) is not None]
        if given or args.markdown:
            option = given[0].replace("_", "-") if given else "markdown"
            raise InvalidRequest(f"--{option} is for a simulated cluster: give --replicas, too")
    from paceline.plan.fleet import make_plan

    plan = make_plan(_question(args))
    return _print_plan(args, plan) if args.replicas is None else _cluster(args, plan)


def _question(args: Namespace) -> Question:
    from paceline.plan.fleet import Question
    from paceline.plan.gpus import read_gpus

    gpu, number = read_gpus(args.gpus)
    return Question(
        model=args.model,
        gpu=gpu,
        count=number,
        tensor_parallel=args.tensor_parallel,
        drafter=args.drafter,
        drafter_tensor_parallel=args.drafter_tensor_parallel,
        draft=args.draft,
        acceptance=args.acceptance,
        context=args.context,
        max_sequences=args.max_sequences,
        batches=args.batch or (),
        format=args.format,
        kv_format=args.kv_format,
    )


def _print_plan(args: Namespace, plan: Plan) -> int:
    from paceline.plan.report import record, text

    print(json.dumps(record(plan)) if args.json else text(plan))
    return 0


def _study(args: Namespace) -> Study:
    from paceline.plan.cluster_report import Study
    from paceline.plan.routing import ROUTINGS
    from paceline.plan.workload import Workload

    if (args.rate is None) == (args.rate_each is None):
        raise InvalidRequest("give --rate R for the whole cluster, or --rate-each R for each replica: one of the two")
    routings = tuple(args.routing.split(",")) if args.routing else ROUTINGS if args.prefixes else ROUTINGS[:2]
    workload = Workload(
        rate=args.rate if args.rate_each is None else args.rate_each,
        seconds=args.seconds,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        lengths=args.lengths,
        prefixes=args.prefixes or 0,
        prefix_tokens=args.prefix_tokens or 0,
        seed=args.seed,
    )
    return Study(
        replicas=args.replicas,
        workload=workload,
        rate_each=args.rate_each is not None,
        routings=routings,
        router_rate=args.router_rate,
    )


def _cluster(args: Namespace, plan: Plan) -> int:
    """Simulate, and print what is complete; Ctrl-C ends it early."""
    from paceline.plan.cluster_report import rows

    study = _study(args)
    found: list[dict[str, Any]] = []
    interrupted = False
    with progress_bar("simulating") as progress:

        def say(name: str, total: int, done: int) -> None:
            if not done:
                progress.phase(f"simulating {name}", unit="requests", total=total)
            progress(done, total)

        try:
            for row in rows(plan, study, say=say):
                found.append(row)  # noqa: PERF402 - Ctrl-C keeps what is simulated
        except KeyboardInterrupt:
            interrupted = True
    _print_cluster(args, plan, study, found, interrupted=interrupted)
    return interrupted_status() if interrupted else 0


def _print_cluster(
    args: Namespace, plan: Plan, study: Study, found: list[dict[str, Any]], *, interrupted: bool
) -> None:
    from paceline.plan.cluster_report import about, markdown, notes, table
    from paceline.plan.report import record, text

    if args.json:
        print(json.dumps(record(plan) | {"cluster": about(plan, study), "rows": found, "interrupted": interrupted}))
    elif args.markdown:
        print("\n".join(markdown(found)))
    else:
        lines = [text(plan), "", *(table(found) if found else []), "", *notes(plan, study, found)]
        print("\n".join([*lines, "interrupted: further rows are missing"] if interrupted else lines))


def _against(args: Namespace) -> int:
    from paceline.plan.against import cells
    from paceline.plan.report import aligned

    found = [cell for path in args.against for cell in cells(_read(path))]
    if args.json:
        print(
            json.dumps([{"name": c.name, "ms": c.measured, "planned_ms": c.planned, "error": c.error} for c in found])
        )
    else:
        header = ["measured ms", "planned ms", "error", "what"]
        table = [[f"{c.measured:.3f}", f"{c.planned:.3f}", f"{c.error:+.1%}", c.name] for c in found]
        widest = max(len(row[3]) for row in [header, *table])
        print("\n".join(aligned([[*row[:3], row[3].ljust(widest)] for row in [header, *table]])))
    return int(any(abs(cell.error) > MAX_ERROR for cell in found))


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"--against {path}: {error}; give a file that `paceline bench engine --json` wrote"
        ) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"--against {path}: no record; give a file that `paceline bench engine --json` wrote")
    return found
