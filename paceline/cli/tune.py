"""Tune: the drafter and draft length that are fastest on this machine for your prompts, and a file for `serve`.

paceline tune smollm2
paceline tune smollm2 --prompts requests.jsonl --save tune.jsonl --config paceline.yaml
paceline tune ./target.gguf --candidates ./small.gguf,ngram --slo tpot=40ms --html tune.html

One plain run is recorded. Every drafter is scored on it at every length, steps are timed, and the speed of each is
predicted. The best three, the default settings and plain decoding are then measured in turns. Prompts are yours, those
that a server wrote with --record, or a mix that comes with Paceline. With --save a run that was stopped goes on.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.bench_offline import encoded
from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import add_model_options, count, counts, drafters_of, given, load
from paceline.cli.prompts_and_results import add_prompts, check_place, check_places, data_of, write
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.bench.workloads import BenchPrompt
    from paceline.llm import LLM
    from paceline.tune.candidates import Group
    from paceline.tune.study import Study
    from paceline.tune.ways import Asking

MIX = ("mt_bench", "humaneval", "code_edit")  # prompts that come with Paceline: chats, code, edits of code
LOOKUPS = ("suffix", "ngram")  # candidates that cost nothing but host time
Record = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser)
    parser.set_defaults(measure_speedup=False)  # the check compares with plain decoding itself
    add_prompts(parser, required=False)
    parser.add_argument("--raw", action="store_true", help="continue prompts as they are, without the chat template")
    group = parser.add_argument_group("over what")
    group.add_argument(
        "--candidates",
        metavar="A,B,…",
        help="drafters to judge beside the usual ones, and whether each will help; use --drafter for one whose options "
        "have commas",
    )
    group.add_argument(
        "--draft", type=counts, default=(1, 2, 3, 4, 6, 8), metavar="K,K,…", help="draft lengths (default: 1,2,3,4,6,8)"
    )
    group.add_argument("--batch", type=counts, default=(1, 8), metavar="N,N,…", help="prompts at once (default: 1,8)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of all answers (default: 0)")
    group.add_argument("--ignore-eos", action="store_true", help="answers of full length")
    group.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="TIME",
        help="tpot=40ms or ttft=0.5s: choose within it, in medians",
    )
    group.add_argument("--best", type=best, default=3, metavar="N", help="ways to measure: N, or all (default: 3)")
    group.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help="batches that each way decodes when it is measured (default: all prompts)",
    )
    group.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="begin no part later (default: 10; --save lets it go on)",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", help="everything as JSON in the last line")
    group.add_argument("--save", type=Path, metavar="FILE", help="keep each part, so that a stopped run goes on")
    group.add_argument("--config", type=Path, metavar="FILE", help="write the choice, for `paceline serve --config`")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained report")


def best(text: str) -> int | None:
    """Read the number of ways to measure; None: all."""
    if text != "all" and not text.isdecimal():
        raise ArgumentTypeError(f"a whole number from 0 on, or all, is needed, not {text!r}")
    return None if text == "all" else int(text)


def run(args: Namespace) -> int:
    from paceline.tune.choice import Slo
    from paceline.tune.shown import page, text
    from paceline.tune.tuning import Wanted, tune

    slos = [Slo.read(each) for each in args.slo]
    _check(args)
    study = study_of(args)
    wanted = Wanted(best=args.best, slos=slos, advises=args.candidates is not None)
    with progress_bar("tuning", unit="parts") as progress:
        study.begin = lambda name: progress.phase(name, unit="parts", done=len(study.known), total=study.planned)
        found = tune(study, wanted, _facts(args, study))
    print(text(found))
    if args.html is not None:
        write(args.html, page(found))
    _write_choice(args, found, study)
    if args.json:
        print(json.dumps(found))
    if found["interrupted"]:
        _say_how_to_go_on(args)
        return interrupted_status()
    return 1 if found["cells"] and found["choice"] is None else 0


def _check(args: Namespace) -> None:
    if args.minutes <= 0:
        raise InvalidRequest(f"--minutes must be above 0, not {args.minutes:g}")
    if not 0 <= args.temperature <= 100:
        raise InvalidRequest(f"--temperature must be from 0 to 100, not {args.temperature:g}")
    check_places(Namespace(save=args.save, html=args.html))
    if args.config is not None:
        check_place(args.config)


def study_of(args: Namespace) -> Study:
    """Load the target with its usual drafters, and return the study of the options, with what --save has of it."""
    from paceline.bench.grid import Budget
    from paceline.bench.grid_file import append, resume
    from paceline.tune.candidates import Engines, groups
    from paceline.tune.study import Study

    with progress_bar(f"reading {args.target}") as progress:
        chosen = groups(drafters_of(args, progress=progress), _candidates(args))
    engines = Engines(lambda words: load(Namespace(**{**vars(_with_room(args)), "drafter": [*words] or ["none"]})))
    llm = engines.of(chosen[0])
    asking = _asking(args, llm)
    setup = _setup(args, llm, chosen, asking)
    known = [] if args.save is None else resume(args.save, setup, of="tune")
    return Study(
        groups=chosen,
        engines=engines,
        asking=asking,
        known={each["name"]: each for each in known},
        keep=(lambda part: None) if args.save is None else (lambda part: append(args.save, part)),
        budget=Budget(args.minutes),
    )


def _candidates(args: Namespace) -> list[str]:
    """List the drafters to compare beside those that are loaded by default or by --drafter."""
    if args.candidates is not None:
        words = [each.strip() for each in args.candidates.split(",")]
        if not all(words):
            raise InvalidRequest(f"--candidates is such as ngram,./small.gguf, not {args.candidates!r}")
        return words
    return [] if args.drafter else [*LOOKUPS]


def _with_room(args: Namespace) -> Namespace:
    """Raise the engine's limits so that all prompts of a batch run at once, with the longest drafts."""
    usual, most, longest = EngineConfig(), max(args.batch), max(args.draft)
    wanted = {
        "max_sequences": most,
        "max_draft": longest,
        "max_draft_tokens": most * longest,
        "max_step_tokens": most * (longest + 1),
    }
    raised = {name: max(value, getattr(usual, name)) for name, value in wanted.items() if getattr(args, name) is None}
    return Namespace(**{**vars(args), **raised})


def _asking(args: Namespace, llm: LLM) -> Asking:
    from paceline.bench.workloads import workload
    from paceline.tune.ways import Asking

    chosen = workload(
        args.prompts or MIX,
        data=data_of(args),
        count=args.count,
        max_tokens=args.max_tokens,
        seed=args.seed,
        words=lambda kind: args.input_tokens,
    )
    prompts, tokens = encoded(llm, _mixed(chosen), args)
    _check_tokens(prompts, tokens, llm)
    return Asking(
        prompts=prompts,
        tokens=tokens,
        drafts=args.draft,
        batches=args.batch,
        temperature=args.temperature,
        rounds=args.rounds,
        ignore_eos=args.ignore_eos,
    )


def _mixed(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Order prompts so that neighbours come from all parts of their sources: batches are then alike."""
    golden = (5**0.5 - 1) / 2  # multiples of it are spread evenly, however many there are
    return [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: i * golden % 1)]


def _check_tokens(prompts: Sequence[BenchPrompt], tokens: Sequence[tuple[int, ...]], llm: LLM) -> None:
    """Refuse recorded requests of a model with a larger vocabulary."""
    size = llm.parts.target.model.config.vocab_size
    for prompt, ids in zip(prompts, tokens, strict=True):
        if max(ids) >= size:
            raise InvalidRequest(
                f"the recorded request {prompt.id!r} has token {max(ids)}, and {llm.parts.target.name} knows {size}: "
                "it was recorded with another model; give a record of this one, or prompts as text"
            )


def _setup(args: Namespace, llm: LLM, chosen: Sequence[Group], asking: Asking) -> Record:
    """Collect what must be the same for a file to go on."""
    import torch

    from paceline.bench.machine import describe

    names = ("max_tokens", "input_tokens", "seed", "rounds", "raw", "ignore_eos", "threads", "temperature")
    return {
        "target": args.target,
        "how": llm.parts.target.why,
        "drafters": [list(group.words) for group in chosen],
        "draft": list(args.draft),
        "batch": list(args.batch),
        "sources": args.prompts or list(MIX),
        "prompts": _digest(asking),
        **{name: getattr(args, name) for name in names},
        "engine": given(args, EngineConfig),
        "machine": describe(torch.device(llm.parts.target.device)),
    }


def _digest(asking: Asking) -> str:
    """Return what tells the prompts of two runs apart."""
    import hashlib

    return hashlib.sha256(repr(list(asking.tokens)).encode()).hexdigest()[:16]


def _facts(args: Namespace, study: Study) -> Record:
    setup = _setup(args, study.engines.of(study.groups[0]), study.groups, study.asking)
    return {**setup, "answers": len(study.asking.prompts), "command": shlex.join(["paceline", *sys.argv[1:]])}


def _write_choice(args: Namespace, found: Record, study: Study) -> None:
    """Write the choice as a file for `serve`, or show it if no file is named."""
    from paceline.tune.choice import Choice, settings, yaml

    if found["choice"] is None:
        return
    choice = Choice(**{name: value for name, value in found["choice"].items() if name != "way"})
    group = study.groups[choice.group]
    loaded = study.known.get(f"lengths of {choice.drafter}", {"loaded_as": ""})["loaded_as"]
    options = settings(choice, group.words, name=loaded, given=_given(args))
    shown = yaml(options, comments=[found["conclusion"], f"by {found['command']}"])
    if args.config is None:
        print(f"\n{shown}", end="")
        return
    write(args.config, shown)
    print(f"\nWritten to {args.config}: paceline serve --config {shlex.quote(str(args.config))}")


def _given(args: Namespace) -> Record:
    """Collect what the user set of the model and the engine."""
    loading = {"model": args.target} | {
        name: value for name in ("format", "device") if (value := getattr(args, name)) != "auto"
    }
    threads = {} if args.threads is None else {"threads": args.threads}
    engine = {name: value for name, value in given(args, EngineConfig).items() if name != "measure_speedup"}
    return {**loading, **threads, **engine}


def _say_how_to_go_on(args: Namespace) -> None:
    done = f"the same command with --save {args.save} goes on" if args.save else "with --save FILE a run can go on"
    print(f"paceline: interrupted; {done}", file=sys.stderr)
