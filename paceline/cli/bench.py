"""Bench: measure this machine, or a server.

paceline bench serve --url http://127.0.0.1:8000 --prompts spec_bench --compare on,off
paceline bench offline smollm2 --prompts code_edit --count 20
paceline bench ramp smollm2
paceline bench program smollm2 --runs 64 --forks 8
paceline bench compare before.json after.json --html report.html
paceline bench engine --target smollm2 --drafter ngram
paceline bench engine --target llama-3.1-8b --drafter llama-3.2-1b --acceptance 0.8 --batch 1,8,32,64
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.cli import bench_compare, bench_offline, bench_program, bench_ramp, bench_serve
from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import FORMATS, count, counts
from paceline.errors import InvalidRequest
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.bench.engine import Setup
    from paceline.bench.reading import Prompts

ENGINE = """The engine alone: random prompts in batches, greedy, plain and speculative in turns.

paceline bench engine --target smollm2 --drafter ngram
paceline bench engine --target llama-3.1-8b --drafter llama-3.2-1b --acceptance 0.8 --batch 1,8,32,64
paceline bench engine --target llama-3.1-8b --drafter eagle-shape --acceptance 0.8 --batch 1,32,64
paceline bench engine --target smollm2 --drafter eagle:smollm2 --prompts mt_bench --prompt-tokens 200 --batch 1,16,64

tok/s is decode speed at the size of the batch: tokens by seconds from the moment every request has its first token to
the moment the first of them has its last. `to the end` goes on until all have, when fewer and fewer run; `total` counts
all output tokens and all seconds, prompts included. `of limit` is the time that memory
alone would need to read what a step must read (weights of the target once and of the drafter once a drafted token, keys
and values of the mean context), by the time that the step took; memory is taken to be as fast as a measured copy.

--mix json:1,json:16,logprobs:1 measures each of these batches beside the others: `× plain` is then the speed by that of
the same mode without the mix.

A shape has random weights, so a drafter guesses nothing right: --acceptance then lets each drafted token count as right
with that probability. Such numbers are SYNTHETIC, and are called so wherever they appear: they show what a round costs
and what it would give, not what a model says.
"""
SHAPES = "llama-3.1-8b, llama-3.2-1b, qwen3-32b, qwen3-1.7b, smollm2-135m"


def add_arguments(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="BENCHMARK", required=True, parser_class=type(parser))
    serve = _kind(kinds, "serve", "any OpenAI server under load", bench_serve.SERVE, bench_serve.run)
    bench_serve.add_arguments(serve)
    offline = _kind(
        kinds, "offline", "prompts on the engine, plain and speculative", bench_offline.OFFLINE, bench_offline.run
    )
    bench_offline.add_arguments(offline)
    ramp = _kind(kinds, "ramp", "a load that rises and falls", bench_ramp.RAMP, bench_ramp.run)
    bench_ramp.add_arguments(ramp)
    programs = _kind(
        kinds, "program", "runs of a program at once, and one by one", bench_program.PROGRAM, bench_program.run
    )
    bench_program.add_arguments(programs)
    compare = _kind(kinds, "compare", "two saved results", bench_compare.COMPARE, bench_compare.run)
    bench_compare.add_arguments(compare)
    engine = _kind(kinds, "engine", "decode speed of the engine, by batch size", ENGINE, _engine)
    _add_models(engine)
    _add_work(engine)


def _kind(kinds: Any, name: str, help: str, description: str, measure: Callable[[Namespace], int]) -> ArgumentParser:
    parser: ArgumentParser = kinds.add_parser(
        name, help=help, description=description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.set_defaults(parser=parser, measure=measure)
    parser.add_argument("--verbose", action="store_true", default=SUPPRESS, help="show the log, with tracebacks")
    return parser


def _add_models(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        required=True,
        metavar="MODEL",
        help=f"a model, or a shape with random weights: {SHAPES}, or a config.json",
    )
    parser.add_argument(
        "--drafter",
        metavar="DRAFTER",
        help="a model, a shape, ngram, self:FORMAT, eagle:PATH, prediction, with which each request predicts its own "
        "prompt, or a head with random weights: eagle-shape (EAGLE-3) or block-shape (DSpark) (default: plain runs "
        "only)",
    )
    formats = ", ".join(FORMATS)
    parser.add_argument(
        "--portfolio", action="store_true", help="load ngram beside the drafter, and draft with the portfolio of both"
    )
    parser.add_argument("--format", choices=FORMATS, default="auto", metavar="FORMAT", help=f"of the target: {formats}")
    parser.add_argument(
        "--drafter-format", choices=FORMATS, metavar="FORMAT", help="of the drafter (default: as the engine chooses)"
    )
    parser.add_argument(
        "--kv-format", choices=("bf16", "fp8"), default="bf16", help="of keys and values on a GPU (default: bf16)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: cuda, if there)")
    parser.add_argument("--threads", type=count, metavar="N", help="on a CPU (default: by a measurement)")


def _add_work(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=counts, default=(1,), metavar="N,N,…", help="requests at once, such as 1,8,32,64 (default: 1)"
    )
    parser.add_argument("--draft", type=count, default=4, metavar="K", help="tokens of every draft (default: 4)")
    parser.add_argument(
        "--governed", action="store_true", help="let the engine choose the lengths of drafts, of at most --draft tokens"
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="SYNTHETIC: each drafted token counts as right with this probability (default: real comparison)",
    )
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE|SET",
        help="real prompts of at most --prompt-tokens, such as mt_bench, and drafts as the engine chooses, of at most "
        "--draft tokens (default: random tokens)",
    )
    parser.add_argument("--prompt-tokens", type=count, default=128, metavar="N", help="of each request (default: 128)")
    parser.add_argument("--output-tokens", type=count, default=320, metavar="N", help="of each request (default: 320)")
    parser.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="repetitions, of which the median counts (default: 3)"
    )
    parser.add_argument(
        "--tensor-parallel", type=count, default=1, metavar="N", help="GPUs that the target is split over (default: 1)"
    )
    parser.add_argument(
        "--same-bits-across-degrees", action="store_true", help="the same bits with every --tensor-parallel, but slower"
    )
    parser.add_argument("--off", action="store_true", help="also measure: drafter configured, speculation off")
    parser.add_argument(
        "--mix",
        metavar="KIND:N,…",
        help="also measure batches whose first N requests have logprobs, penalty, bias, filters or a json schema",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and random weights (default: 0)")
    parser.add_argument(
        "--prompt-speed",
        type=_prompts,
        default=(),
        metavar="N,NxN,…",
        help="measure the reading of prompts instead, such as 8192,16x2048: tokens a second until the first token",
    )
    parser.add_argument(
        "--beside",
        type=count,
        metavar="N",
        help="measure instead how long decoding sequences, one fewer than --batch, wait while a prompt of N is read",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON in the last line")


def _prompts(text: str) -> tuple[Prompts, ...]:
    from paceline.bench.reading import Prompts

    try:
        return tuple(Prompts.parse(word) for word in text.split(","))
    except InvalidRequest as error:
        raise ArgumentTypeError(str(error)) from None


def run(args: Namespace) -> int:
    measure: Callable[[Namespace], int] = args.measure
    return measure(args)


def _engine(args: Namespace) -> int:
    from paceline.bench.engine import measure
    from paceline.bench.engine_record import record, text

    if args.prompt_speed or args.beside is not None:
        return _reading(args)
    with progress_bar("loading", unit="runs") as progress:

        def say(what: str, done: int, total: int) -> None:
            progress.doing = what
            progress(done, total)

        measured = measure(_setup(args), say=say)
    found = record(measured, command=shlex.join(["paceline", *sys.argv[1:]]))
    print(text(found))
    if args.json:
        print(json.dumps(found))
    return interrupted_status() if measured.interrupted else 0


def _reading(args: Namespace) -> int:
    from paceline.bench.reading import measure, text

    with progress_bar("loading", unit="runs") as progress:

        def say(what: str, done: int, total: int) -> None:
            progress.doing = what
            progress(done, total)

        found = measure(_setup(args), args.prompt_speed, args.beside, say=say)
    found["command"] = shlex.join(["paceline", *sys.argv[1:]])
    print(text(found))
    if args.json:
        print(json.dumps(found))
    return 0


def _setup(args: Namespace) -> Setup:
    from paceline.bench.engine import Setup
    from paceline.bench.mix import mixes
    from paceline.runner.loading.models import choose_device

    return Setup(
        target=args.target,
        drafter=args.drafter,
        portfolio=args.portfolio,
        batches=args.batch,
        draft=args.draft,
        governed=args.governed,
        acceptance=args.acceptance,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        prompts=tuple(args.prompts),
        format=args.format,
        drafter_format=args.drafter_format,
        kv_format=args.kv_format,
        device=choose_device(args.device),
        threads=args.threads,
        tensor_parallel=args.tensor_parallel,
        same_bits=args.same_bits_across_degrees,
        rounds=args.rounds,
        off=args.off,
        mixes=mixes(args.mix) if args.mix else (),
        seed=args.seed,
    )
