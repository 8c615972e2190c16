"""Options that several commands share.

Options of the engine and of sampling are derived from the dataclasses that they fill: a new field needs only a line of
help here.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.checks import check_number
from paceline.config import GPU, EngineConfig
from paceline.errors import InvalidRequest
from paceline.models.advice import GENERATION
from paceline.progress import progress_bar
from paceline.rules import BUILT_IN, Rule
from paceline.sizes import parse_size
from paceline.types import Grammar, SamplingParams, Speculation
from paceline.work_kinds import WorkKind, read_threshold

if TYPE_CHECKING:
    from paceline.llm import LLM

LOSSY = ", ".join(rule for rule in BUILT_IN if not rule.lossless)
FORMATS = ("auto", "native", "fp32", "bf16", "fp8", "int8", "int4", "int4-all")

ENGINE_HELP = {
    "max_sequences": "sequences that run at once",
    "max_step_tokens": "rows of one forward pass, shared by decoding, drafts and prompts",
    "max_prompt_seconds": "seconds that prompts may take of a step in which other sequences decode; 0: no limit",
    "max_context": "longest sequence in tokens (default: the model's, as far as memory allows)",
    "kv_memory": "memory for keys and values, such as 512M or 2G (default: at most 4G, a quarter of what is free; on a "
    "GPU all that weights and the largest passes leave)",
    "kv_format": "of keys and values on a GPU: bf16 or fp8",
    "tensor_parallel": "processes that the model is split over: one for each GPU, or at most one for each core of a "
    "CPU (docs/scale.md)",
    "drafter_tensor_parallel": "of these, processes that a draft model is split over: 1 or all",
    "same_bits_across_degrees": "the same bits with every --tensor-parallel that it allows, such as 1, 2, 4 and 8; "
    "slower",
    "rank_timeout": "seconds that a process of a split model may keep the others waiting, before all requests fail",
    "prefix_cache": "share the pages of equal beginnings",
    "default_drafter": "drafter of requests that name none, such as eagle (default: the portfolio, else the first one)",
    "measure_cost": "draft no token that costs more time than it saves",
    "measure_speedup": "draw about 1 %% of steps to run plain, which measures what speculation brings",
    "max_draft": "longest draft of a sequence",
    "max_draft_tokens": "drafted tokens a step, over all sequences",
    "max_draft_batch": "no speculation with more sequences running (default: where measurements say that it pays)",
    "max_draft_context": "no speculation beyond this many tokens of a sequence",
    "min_acceptance": "share of drafted tokens accepted, below which a sequence pauses drafting",
    "acceptance_window": "drafted tokens of a sequence before its acceptance is judged",
    "pause_tokens": "length of the first pause; doubles while drafts stay bad",
    "corpus": "text file from which the drafter suffix drafts, too; may be given several times",
    "drafter_timeout": "seconds that a drafter of your own may think",
    "fixed_draft": "for measurements: drafts as long as the limits allow, whatever comes of them",
    "synthetic_acceptance": "for measurements on a GPU: accept drafted tokens by a coin; the text means nothing",
}
SAMPLING_HELP = {
    "temperature": "0 takes the most likely token always",
    "top_k": "only the k most likely tokens; 0: off",
    "top_p": "only the most likely tokens that add up to this probability",
    "min_p": "only tokens at least this likely, relative to the most likely one",
    "repetition_penalty": "over prompt and output; 1: off",
    "presence_penalty": "once for each token of the output",
    "frequency_penalty": "for each time a token stands in the output",
    "logit_bias": "added to logits, such as 198=-5,11=2.5",
    "allowed_tokens": "nothing but these token ids, such as 11,198",
    "min_tokens": "no stop before",
    "max_tokens": "longest answer (default: %(default)s)",
    "stop": "end before this text; may be given several times",
    "stop_ids": "end at these token ids, such as 0,2",
    "include_stop": "keep the stop string in the text",
    "ignore_eos": "do not end where the model wants to",
    "seed": "same seed, same text (default: drawn anew)",
    "n": "answers to each prompt",
    "logprobs": "report log-probabilities and this many alternatives",
    "prompt_logprobs": "report log-probabilities of the prompt and this many alternatives",
    "grammar": "what the answer must look like: json, schema:FILE, regex:PATTERN or choice:yes|no",
}


def add_model_options(parser: ArgumentParser, *, default_target: str | None = None, optional: bool = False) -> None:
    """Add the model, the drafters, and every option of the engine. `optional`: no model need be named."""
    target = "a directory, a .gguf file, 'smollm2', or a hub id such as org/name or org/name:Q4_K_M"
    if default_target is None:
        parser.add_argument("target", metavar="MODEL", nargs="?" if optional else None, help=target)
    else:
        parser.add_argument(
            "target", metavar="MODEL", nargs="?", default=default_target, help=f"{target} (default: {default_target})"
        )
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="DRAFTER",
        help="ngram, ngram:min_ngram=1, suffix, a model, eagle:PATH, block:PATH, mtp, mtp:PATH, medusa:PATH, "
        "self:int4, layers:auto, recycling, lookahead, one of another installed package, or none; may be given several "
        "times: on a CPU the portfolio of all drafts, with suffix beside a head or a model, on a GPU the first one "
        "(default: the model's head, with suffix on a CPU, with ngram on a GPU)",
    )
    parser.add_argument("--format", default="auto", metavar="FORMAT", help=f"of the weights: {', '.join(FORMATS)}")
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto, cpu or cuda (default: a GPU if there)"
    )
    parser.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="of each process, on a CPU (default: by a measurement; in torch as many as torch takes; over several "
        "processes the cores, divided by them)",
    )
    _add_fields(parser.add_argument_group("engine"), EngineConfig, ENGINE_HELP, on_gpu=GPU)


def add_answer_options(parser: ArgumentParser, *, max_tokens: int) -> None:
    """Add the options of speculation and of sampling."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--no-speculation", action="store_true", help="plain decoding")
    group.add_argument(
        "--rule",
        type=rule,
        default=Rule.COUPLED,
        metavar="RULE",
        help=f"how drafts are accepted: {', '.join(BUILT_IN)}, or a rule of an installed package; {LOSSY} "
        "change the text (default: coupled)",
    )
    group.add_argument(
        "--threshold",
        type=threshold,
        metavar="X|KIND",
        help=f"how likely a token must be, of {LOSSY}: a number, or a kind of work: {', '.join(WorkKind)}",
    )
    group.add_argument("--p-min", type=float, metavar="X", help="a draft ends when its confidence falls below this")
    group = parser.add_argument_group("sampling (`paceline inspect` says what the model's authors advise)")
    _add_fields(group, SamplingParams, SAMPLING_HELP)
    parser.set_defaults(max_tokens=max_tokens)


def engine_config(args: Namespace, *, device: str = "cpu") -> EngineConfig:
    return EngineConfig.of(device=device, **given(args, EngineConfig))


def drafters_of(args: Namespace, *, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """List the drafters that --drafter names, completed; none for `--drafter none`, the defaults without --drafter.
    `progress`: of a model that is fetched, to see whether it comes with a head."""
    from paceline.drafters.registry import asked_drafters
    from paceline.runner.loading.models import choose_device

    return asked_drafters(args.drafter, args.target, choose_device(args.device), progress=progress)


def measured_drafters(args: Namespace, llm: LLM) -> list[str]:
    """List the drafters that --drafter names, without those that complete them; all that are loaded without it."""
    from paceline.drafters.recipe import name_by

    loaded = llm.parts.drafters
    return [name_by(words, loaded) for words in args.drafter] if loaded and args.drafter else [*loaded]


def load(
    args: Namespace, *, drafters: bool = True, report: Callable[[int, int], None] = lambda done, total: None
) -> LLM:
    """Load the model with the shared options. `report`: called with bytes done and bytes in all."""
    from paceline.llm import LLM

    check_rules(_rules(args), device=args.device)
    options = given(args, EngineConfig)
    with progress_bar(f"loading {Path(args.target).name}") as shown:
        latest = (0, 0)  # bytes

        def progress(done: int, total: int) -> None:
            nonlocal latest
            latest = done, total
            shown(done, total)
            report(done, total)

        def recording(done: int, total: int) -> None:
            if shown.unit != "graphs":
                shown.phase("recording graphs", unit="graphs", total=total)
            shown(done, total)
            report(*latest)  # all bytes are read; who waits may end the loading here

        return LLM(
            args.target,
            drafter=drafters_of(args, progress=progress) if drafters else [],
            format=args.format,
            device=args.device,
            threads=args.threads,
            progress=progress,
            recording=recording,
            **options,
        )


def sampling_of(args: Namespace, default: SamplingParams) -> SamplingParams:
    return replace(default, **given(args, SamplingParams))


def speculation_of(args: Namespace) -> Speculation:
    return Speculation(enabled=not args.no_speculation, rule=args.rule, threshold=args.threshold, p_min=args.p_min)


def check_rules(rules: Iterable[Rule], *, device: str) -> None:
    """Raise InvalidRequest for a rule that cannot run on the device, before any weights are read."""
    from paceline.runner.loading.models import choose_device

    chosen = choose_device(device)
    for each in rules:
        each.check_device(chosen)


def _rules(args: Namespace) -> list[Rule]:
    """The rules that a command was given: one, several, or none."""
    given = getattr(args, "rule", None) or []
    return [given] if isinstance(given, Rule) else given


def given(args: Namespace, cls: type[Any]) -> dict[str, Any]:
    """Fields of `cls` that the user gave; the others keep their defaults."""
    values = {field.name: getattr(args, field.name, None) for field in fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def _add_fields(
    group: argparse._ArgumentGroup, cls: type[Any], help: Mapping[str, str], *, on_gpu: Mapping[str, Any] | None = None
) -> None:
    """Add an option for every field of `cls`. `on_gpu`: defaults that differ on a GPU, for the help text."""
    hints, other = get_type_hints(cls), on_gpu or {}
    for field in fields(cls):
        option = f"--{field.name.replace('_', '-')}"
        reader = READERS_BY_NAME.get(field.name) or READERS[hints[field.name]]
        text = _described(field, help[field.name], on_gpu=other.get(field.name))
        group.add_argument(option, dest=field.name, default=None, help=text, **reader)


def _described(field: Field[Any], text: str, *, on_gpu: Any = None) -> str:
    if field.default is MISSING or field.default in (None, ()):
        return text
    advised = "as advised, else " if field.name in GENERATION else ""
    beside = "" if on_gpu is None else f", on a GPU {_spoken(on_gpu)}"
    return f"{text} (default: {advised}{_spoken(field.default)}{beside})"


def _spoken(default: Any) -> Any:
    return ("on" if default else "off") if isinstance(default, bool) else default


def rule(text: str) -> Rule:
    try:
        return Rule(text)
    except InvalidRequest as error:
        raise ArgumentTypeError(str(error)) from None


def threshold(text: str) -> float | WorkKind:
    """A threshold of a lossy rule: a kind of work, or a number in (0, 1]."""
    try:
        number: object = float(text)
    except ValueError:
        number = text
    try:
        return read_threshold(number)
    except InvalidRequest as error:
        raise ArgumentTypeError(str(error)) from None


def thresholds(text: str) -> tuple[float | WorkKind, ...]:
    return tuple(threshold(word) for word in text.split(","))


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number from 1 on is needed, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"a whole number from 0 on is needed, not {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    found = tuple(count(word) for word in text.split(","))
    _check_repeats(found, text)
    return found


def numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"numbers such as 0,0.7,1 are needed, not {text!r}") from None
    if not all(0 <= value < float("inf") for value in found):
        raise ArgumentTypeError(f"numbers from 0 on are needed, not {text!r}")
    return found


def temperatures(text: str) -> tuple[float, ...]:
    found = numbers(text)
    _check_repeats(found, text)
    try:
        for value in found:
            check_number("temperature", value, 0, 100)
    except InvalidRequest as error:
        raise ArgumentTypeError(str(error)) from None
    return found


def _check_repeats(found: tuple[float, ...], text: str) -> None:
    if len(set(found)) != len(found):
        raise ArgumentTypeError(f"a number stands twice in {text!r}")


def _bytes(text: str) -> int:
    size = parse_size(text)
    if size is None:
        raise ArgumentTypeError(f"a size such as 512M or 2G is needed, not {text!r}")
    return size


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_number(int, word) for word in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {_number(int, token): _number(float, bias) for token, _, bias in pairs}


def _grammar(text: str) -> Grammar:
    kind, _, rest = text.partition(":")
    try:
        if kind == "schema":
            return Grammar.json_schema(Path(rest).read_text(encoding="utf-8"))
        if kind == "regex":
            return Grammar.regex(rest)
        if kind == "choice":
            return Grammar.choice(rest.split("|"))
        if text == "json":
            return Grammar.json_object()
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from None
    raise ArgumentTypeError(f"json, schema:FILE, regex:PATTERN or choice:A|B is needed, not {text!r}")


def _number(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number; write it as in the example of --help") from None


READERS: Mapping[Any, Mapping[str, Any]] = {
    bool: {"action": BooleanOptionalAction},
    int: {"type": int, "metavar": "N"},
    int | None: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "X"},
    str: {"metavar": "NAME"},
    str | None: {"metavar": "NAME"},
    tuple[str, ...]: {"action": "append", "metavar": "TEXT"},
    tuple[int, ...]: {"type": _integers, "metavar": "IDS"},
    tuple[int, ...] | None: {"type": _integers, "metavar": "IDS"},
    Grammar | None: {"type": _grammar, "metavar": "GRAMMAR"},
    Mapping[int, float]: {"type": _biases, "metavar": "ID=BIAS"},
}
READERS_BY_NAME: Mapping[str, Mapping[str, Any]] = {"kv_memory": {"type": _bytes, "metavar": "BYTES"}}
