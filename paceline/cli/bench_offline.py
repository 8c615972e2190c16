"""The command `paceline bench offline`: its options, and the loading of its model and prompts."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.cli import bench_grid
from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import add_model_options, count, counts, load, rule, temperatures
from paceline.cli.prompts_and_results import add_prompts, add_results, check_places, prompts_of, write_results
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest
from paceline.progress import Progress, progress_bar
from paceline.rules import Rule

if TYPE_CHECKING:
    from paceline.bench.offline import Cell, Grid
    from paceline.bench.workloads import BenchPrompt
    from paceline.llm import LLM

BATCHES = "batches of prompts"
OFFLINE = """Prompts on the engine itself, plain and speculative in turns: how much faster, and is it the same text.

paceline bench offline smollm2 --prompts code_edit --count 20
paceline bench offline smollm2 --drafter ngram --drafter eagle:PATH --prompts spec_bench --draft 2,4,8 --batch 1,8
paceline bench offline MODEL --prompts mt_bench --temperature 0,1 --json --html report.html
paceline bench offline smollm2 --grid --minutes 60 --save grid.jsonl

Decode speed counts from the moment at which every request of a batch has its first token. With --json the last line has
plain_tok_s, speculative_tok_s, ratio, ratio_interval, tokens_per_step, identical and prompts of the first cell, and
all cells of the grid under `cells`.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser)
    parser.set_defaults(measure_speedup=False)  # the bench compares with plain decoding itself
    add_prompts(parser, required=False)  # a grid has kinds of its own
    parser.add_argument("--raw", action="store_true", help="continue prompts as they are, without the chat template")
    group = parser.add_argument_group("over what")
    group.add_argument(
        "--grid",
        action="store_true",
        help="every kind of prompts at every batch size and temperature: the default settings against plain decoding, "
        "and against fixed drafters and lengths",
    )
    group.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="of --grid: begin no cell later; --save FILE lets it go on another day",
    )
    group.add_argument(
        "--draft",
        type=counts,
        metavar="K,K,…",
        help="longest drafts (default: the governor's choice); of --grid: lengths of fixed drafts (default: 2,4,8)",
    )
    group.add_argument(
        "--batch", type=counts, metavar="N,N,…", help="prompts at once (default: 1; of --grid: 1,2,4,8,16,32)"
    )
    group.add_argument("--temperature", type=temperatures, metavar="X,X,…", help="(default: 0; of --grid: 0,1)")
    group.add_argument("--rule", type=rule, default=Rule.COUPLED, metavar="RULE", help="(default: coupled)")
    group.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help="turns of each cell, of which the median counts (default: 3; of --grid: 8, each of other prompts)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="answers of full length")
    add_results(parser)


# Values of options that are not given: of some cells, and of a grid.
CELLS: Mapping[str, Any] = {"batch": (1,), "temperature": (0.0,), "rounds": 3}
GRID: Mapping[str, Any] = {"batch": (1, 2, 4, 8, 16, 32), "temperature": (0.0, 1.0), "rounds": 8, "draft": (2, 4, 8)}


def run(args: Namespace) -> int:
    usual = GRID if args.grid else CELLS
    args = Namespace(**vars(args) | {name: value for name, value in usual.items() if getattr(args, name) is None})
    if args.grid:
        return bench_grid.run(_with_room(args), encode=encoded)
    if not args.prompts:
        raise InvalidRequest(
            "--prompts is needed: a file, or a set such as spec_bench; --grid takes all sets by itself"
        )
    if args.minutes is not None:
        raise InvalidRequest("--minutes is for --grid: leave it out")
    return _run_cells(args)


def _run_cells(args: Namespace) -> int:
    from paceline.bench.offline import measure
    from paceline.bench.offline_record import record, text

    chosen = prompts_of(args, words=lambda kind: args.input_tokens)
    check_places(args)
    llm = load(_with_room(args))
    kept, tokens = encoded(llm, chosen, args)
    measured, interrupted, grid = [], False, _grid(args, llm)
    try:
        with progress_bar("warming up", unit=BATCHES) as progress:
            for part in measure(llm.engine, kept, tokens, grid, tick=partial(_tick, progress)):
                measured.append(part)  # noqa: PERF402 - Ctrl-C keeps what is measured
    except KeyboardInterrupt:
        if not measured:
            raise
        interrupted = True
    facts = _facts(args, llm, left_out=len(chosen) - len(kept)) | {"interrupted": interrupted}
    found = record(measured, facts)
    print(text(found))
    write_results(args, found, title=f"Speculation on {args.target}")
    return interrupted_status() if interrupted else 0


def _with_room(args: Namespace) -> Namespace:
    """Raise the engine's limits so that all prompts of a batch run at once, and drafts are as long as --draft."""
    usual = EngineConfig()
    wanted = {"max_sequences": max(args.batch), "max_draft": max(args.draft or (1,))}
    for name, value in wanted.items():
        if getattr(args, name) is None and value > (getattr(usual, name) or value):
            setattr(args, name, value)
    return args


def _grid(args: Namespace, llm: LLM) -> Grid:
    """The grid of the options: each drafter named by --drafter, or the engine's default."""
    from paceline.bench.offline import Grid

    if not llm.parts.drafters:
        raise InvalidRequest("nothing drafts: name a --drafter, such as ngram")
    return Grid(
        drafters=list(llm.parts.drafters) if args.drafter else [None],
        drafts=args.draft or [None],
        batches=args.batch,
        temperatures=args.temperature,
        rule=args.rule,
        rounds=args.rounds,
        ignore_eos=args.ignore_eos,
    )


def encoded(
    llm: LLM, chosen: Sequence[BenchPrompt], args: Namespace
) -> tuple[list[BenchPrompt], list[tuple[int, ...]]]:
    """Prompts and their tokens, without those that leave no room for an answer."""
    most = llm.parts.memory.max_context - args.max_tokens
    pairs = [(prompt, _tokens(llm, prompt, args)) for prompt in chosen]
    kept = [(prompt, tokens) for prompt, tokens in pairs if len(tokens) <= most]
    if not kept:
        raise InvalidRequest(
            f"no prompt leaves room for an answer of {args.max_tokens} tokens in a context of "
            f"{llm.parts.memory.max_context}: raise --max-context, or lower --max-tokens"
        )
    if len(kept) < len(pairs):
        out = f"{len(pairs) - len(kept)} of {len(pairs)} prompts are too long for the context: left out"
        print(f"paceline: {out}", file=sys.stderr)
    return [prompt for prompt, _ in kept], [tokens for _, tokens in kept]


def _tokens(llm: LLM, prompt: BenchPrompt, args: Namespace) -> tuple[int, ...]:
    from paceline.bench.workloads import SYNTHETIC

    if prompt.tokens:
        return prompt.tokens
    if prompt.category in SYNTHETIC:
        return llm.encode(prompt.text)[: args.input_tokens]  # cut to the exact length
    if args.raw or llm.tokenizer.chat_template is None:
        return llm.encode(prompt.text)
    return llm.encode_chat(prompt.messages)


def _facts(args: Namespace, llm: LLM, *, left_out: int) -> dict[str, Any]:
    return {
        **facts_of(args, llm),
        "bitwise": llm.parts.bitwise,
        "rounds": args.rounds,
        "left_out": left_out,
    }


def facts_of(args: Namespace, llm: LLM) -> dict[str, Any]:
    """Describe a run on the engine: model, drafters, prompts, command and machine."""
    import torch

    from paceline.bench.machine import describe

    return {
        "target": args.target,
        "how": llm.parts.target.why,
        "drafters": {name: made.how for name, made in llm.parts.drafters.items()},
        "sources": args.prompts,
        "max_tokens": args.max_tokens,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "machine": describe(torch.device(llm.parts.target.device)),
    }


def _tick(progress: Progress, cell: Cell, done: int, total: int) -> None:
    doing = f"batch {cell.batch} T={cell.temperature:g}"
    if progress.doing != doing:
        progress.phase(doing, unit=BATCHES)
    progress(done, total)
