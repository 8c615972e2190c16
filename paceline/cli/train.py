"""Train: make a drafter for a model of your own.

paceline train eagle smollm2 --prompts prompts.jsonl.gz --out drafter --minutes 15
paceline train eval smollm2 drafter --eval mt_bench
torchrun --nproc-per-node 4 -m paceline.cli.main train eagle MODEL --prompts prompts.jsonl --out drafter
"""

from __future__ import annotations

import shlex
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import FORMATS, count
from paceline.cli.prompts_and_results import data_of_environment
from paceline.errors import InvalidRequest
from paceline.progress import CLEAR_LINE, progress_bar
from paceline.prompts.files import SETS, find

if TYPE_CHECKING:
    from paceline.train.options import EvalOptions, TargetOptions, TrainOptions

EAGLE = """An EAGLE-3 head: the target answers the prompts, and a small layer over three of its hidden states learns to
guess ahead. The normal case is one GPU and some minutes; a CPU will do for toys.

paceline train eagle smollm2 --prompts prompts.jsonl.gz --out drafter --minutes 15

Everything made on the way is kept in OUT.work: answers, and a checkpoint every two minutes or less. The same command
goes on where the last one ended, however it ended. Prompts that share thirteen words in a row with a set given by
--eval or --exclude are not trained on.
"""


BLOCK = """A block drafter: a few layers over hidden states of the target draft a whole block of tokens in one pass
(DFlash, or with a markov head DSpark). Embedding and output layer are the target's. The normal case is one GPU.

paceline train block smollm2 --prompts prompts.jsonl.gz --out block --packing int4 --minutes 30

The same command goes on where the last one ended, as with `train eagle`.
"""
MTP = """An MTP head, as models come with in their checkpoints: one layer like the target's own, over its last hidden
state. It uses the target's embedding and output layer, which are not trained, and drafts the whole vocabulary. The file
has the layout of `speculators`, and loads as mtp:PATH.

paceline train mtp smollm2 --prompts prompts.jsonl.gz --out head --minutes 15
"""
MEDUSA = """Medusa-1 heads: each guesses one token further ahead from the target's last hidden state alone. All of them
draft in one pass; each has a product over the whole vocabulary, so they suit targets that are large beside it.

paceline train medusa ./qwen2.5-1.5b --prompts prompts.jsonl --out heads --minutes 15
"""
SMALL = """A small Llama that learns to talk like the target: an ordinary model directory, loaded as model:PATH. It
begins from nothing and needs the most prompts and the most time of all kinds.

paceline train small ./qwen2.5-1.5b --prompts prompts.jsonl --out small --minutes 60
"""
EVAL = """Tokens per round of a trained drafter: the target answers the prompts of each set greedily, and rounds are
replayed over the answers as the engine would accept drafts.

paceline train eval smollm2 drafter --eval mt_bench=question.jsonl
"""
KINDS = {
    "eagle": ("an EAGLE-3 head", EAGLE),
    "block": ("a block drafter", BLOCK),
    "mtp": ("an MTP head", MTP),
    "medusa": ("Medusa-1 heads", MEDUSA),
    "small": ("a small model", SMALL),
}
MAX_AHEAD = 8  # tokens of the longest draft that is trained over or measured


def add_arguments(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="train", metavar="KIND", required=True, parser_class=type(parser))
    for kind, (help, description) in KINDS.items():
        one = kinds.add_parser(kind, help=help, description=description, formatter_class=RawDescriptionHelpFormatter)
        one.set_defaults(parser=one, work=_train)
        _add_data(one)
        _add_answers(one)
        _add_shape(one, kind)
        _add_schedule(one)
        one.add_argument("--verbose", action="store_true", default=SUPPRESS, help="show the log, with tracebacks")
    one = kinds.add_parser(
        "eval", help="measure a trained drafter", description=EVAL, formatter_class=RawDescriptionHelpFormatter
    )
    one.set_defaults(parser=one, work=_eval)
    _add_eval(one)
    one.add_argument("--verbose", action="store_true", default=SUPPRESS, help="show the log, with tracebacks")


def _add_eval(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="a directory, a .gguf file, 'smollm2', or a hub id")
    parser.add_argument("drafter", type=Path, metavar="DRAFTER", help="the directory that was trained")
    parser.add_argument(
        "--eval", type=_named, action="append", required=True, metavar="SET|NAME=FILE", help="prompts; repeatable"
    )
    parser.add_argument("--draft", type=_unroll, default=4, metavar="K", help="tokens of a draft (default: 4)")
    _add_answers(parser)


def _add_data(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="a directory, a .gguf file, 'smollm2', or a hub id")
    parser.add_argument(
        "--prompts", type=_file, required=True, metavar="FILE|SET", help=".jsonl, .jsonl.gz, text, or a set"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the drafter goes")
    parser.add_argument(
        "--eval",
        type=_named,
        action="append",
        default=[],
        metavar="SET|NAME=FILE",
        help="prompts to measure on; repeatable",
    )
    parser.add_argument(
        "--exclude", type=Path, action="append", default=[], metavar="FILE", help="texts not to train on; repeatable"
    )
    parser.add_argument("--license", default="other", metavar="NAME", help="of the drafter, for its card")
    parser.add_argument("--max-prompts", type=count, metavar="N", help="use at most N (default: all)")
    parser.add_argument(
        "--held-out", type=count, metavar="N", help="prompts to judge by (default: 256, or a quarter of few prompts)"
    )


def _add_answers(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: cuda, if there)")
    group.add_argument("--format", default="auto", choices=FORMATS, metavar="FORMAT", help="of the answering target")
    group.add_argument(
        "--serving",
        choices=FORMATS,
        metavar="FORMAT",
        help="of the target that the drafter will serve (default: unquantised)",
    )
    group.add_argument("--threads", type=count, metavar="N", help="on a CPU (default: one a core)")
    group.add_argument(
        "--max-length", type=count, default=1024, metavar="N", help="tokens of prompt and answer (default: 1024)"
    )
    group.add_argument("--max-new", type=count, default=320, metavar="N", help="tokens of an answer (default: 320)")
    group.add_argument(
        "--samples", type=count, metavar="N", help="answers to each prompt, all but the first sampled (default: 1)"
    )
    group.add_argument(
        "--sampled",
        type=_share,
        default=0.3,
        metavar="P",
        help="share of first answers that are sampled (default: 0.3)",
    )
    group.add_argument(
        "--temperature", type=_positive, default=0.8, metavar="T", help="of sampled answers (default: 0.8)"
    )
    group.add_argument(
        "--answer-batch", type=count, default=256, metavar="N", help="answers at once, per worker (default: 256)"
    )
    group.add_argument("--answer-workers", type=count, default=4, metavar="N", help="processes per GPU (default: 4)")


def _add_shape(parser: ArgumentParser, kind: str) -> None:
    group = parser.add_argument_group("drafter")
    if kind == "eagle":
        group.add_argument(
            "--begin",
            dest="initial_head",
            metavar="HEAD",
            help="go on with this one: a directory, 'smollm2', or a hub id",
        )
        group.add_argument("--draft-vocab", type=count, metavar="N", help="tokens it knows (default: 16384, or HEAD's)")
        group.add_argument(
            "--intermediate", type=count, metavar="N", help="width of its MLP (default: the target's, or HEAD's)"
        )
    elif kind == "block":
        group.add_argument("--layers", type=count, default=3, metavar="N", help="(default: 3)")
        group.add_argument("--block", type=count, metavar="N", help="rows of a block (default: 8)")
        group.add_argument("--taps", type=count, metavar="N", help="hidden states it reads (default: 3)")
        group.add_argument("--markov", type=_rank, metavar="R", help="rank of its markov head, 0: none (default: 64)")
    elif kind == "mtp":
        group.add_argument("--intermediate", type=count, metavar="N", help="width of its MLP (default: the target's)")
    elif kind == "medusa":
        group.add_argument("--heads", type=count, metavar="N", help="tokens ahead (default: 4)")
    else:
        group.add_argument("--hidden", type=count, metavar="N", help="its width (default: 192)")
        group.add_argument("--layers", type=count, metavar="N", help="(default: 4)")
        group.add_argument("--intermediate", type=count, metavar="N", help="width of its MLP (default: 8/3 of hidden)")
    if kind in ("eagle", "mtp"):
        group.add_argument("--unroll", type=_unroll, metavar="N", help="steps ahead it learns (default: 5)")
    if kind != "small":
        group.add_argument("--packing", choices=("bf16", "int8", "int4"), help="of the file (default: bf16)")


def _add_schedule(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--minutes", type=_positive, default=15.0, metavar="M", help="of training (default: 15)")
    group.add_argument("--max-steps", type=count, metavar="N", help="instead of minutes")
    group.add_argument("--evaluations", type=count, default=24, metavar="N", help="in all (default: 24)")
    group.add_argument("--batch-tokens", type=count, metavar="N", help="per step (default: 16384, on a CPU 2048)")
    group.add_argument("--learning-rate", type=_positive, default=4e-3, metavar="R", help="its peak (default: 0.004)")
    group.add_argument("--aim", choices=("likelihood", "overlap"), help="overlap: for drawn text (default: likelihood)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")


def run(args: Namespace) -> int:
    work: Callable[[Namespace], int] = args.work
    return work(args)


def _train(args: Namespace) -> int:
    from paceline.train.run import train

    options = _train_options(args, kind=args.train)
    try:
        with progress_bar("starting") as progress:
            train(options, _say, progress)
    except KeyboardInterrupt:
        _say(f"stopped; the same command goes on with what is in {options.work}")
        raise
    return 0


def _eval(args: Namespace) -> int:
    from paceline.train.measure import measure

    with progress_bar("measuring") as progress:
        measure(_eval_options(args), print, progress)
    return 0


def _say(text: str) -> None:
    print(f"{CLEAR_LINE if sys.stderr.isatty() else ''}{text}", file=sys.stderr, flush=True)


def _train_options(args: Namespace, *, kind: str) -> TrainOptions:
    from paceline.train.options import CPU_BATCH_TOKENS, TrainOptions

    target = _target_options(args)
    made = {"kind": kind, "target": target, "evals": dict(args.eval), "excludes": args.exclude}
    if args.batch_tokens is None and target.device == "cpu":
        made["batch_tokens"] = CPU_BATCH_TOKENS
    if kind == "block":
        made["draft"] = MAX_AHEAD  # all that a block drafts, as far as rounds are replayed
    made["command"] = shlex.join(["paceline", *sys.argv[1:]])
    return TrainOptions(**_given(args, TrainOptions) | made)


def _eval_options(args: Namespace) -> EvalOptions:
    from paceline.train.options import EvalOptions

    return EvalOptions(target=_target_options(args), drafter=args.drafter, evals=dict(args.eval), draft=args.draft)


def _target_options(args: Namespace) -> TargetOptions:
    from paceline.runner.loading.models import choose_device
    from paceline.train.options import TargetOptions

    given = _given(args, TargetOptions) | {"device": choose_device(args.device)}
    return TargetOptions(model=args.target, **given)


def _given(args: Namespace, options: type) -> dict[str, Any]:
    """Arguments that the user gave, by the fields of `options`; the other fields keep their defaults."""
    names = {field.name for field in fields(options)}
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def _named(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not name or name in ("train", "held-out") or (not separator and name not in SETS):
        raise ArgumentTypeError(f"NAME=FILE or a set ({', '.join(SETS)}) is needed, not {text!r}")
    return name, Path(path) if separator else _file(name)


def _file(text: str) -> Path:
    """The path of a file that may not be there yet, or the file of a set."""
    try:
        return find(text, data=data_of_environment()) if text in SETS else Path(text)
    except InvalidRequest as error:
        raise ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    """A share from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"a share from 0 to 1 is needed, not {text!r}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value


def _rank(text: str) -> int:
    return 0 if text == "0" else count(text)


def _unroll(text: str) -> int:
    if count(text) > MAX_AHEAD:
        raise ArgumentTypeError(f"at most {MAX_AHEAD} steps ahead, not {text}")
    return count(text)
