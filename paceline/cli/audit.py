"""Audit: prove that speculation leaves the text alone.

Replays prompts plain and speculative, over drafters, rules, batch sizes and sampling parameters, and compares every
token. A difference is a near-tie where arithmetic alone can explain it, and otherwise a bug: the exit status is 1.

paceline audit smollm2 --drafter ngram --prompts questions.txt
paceline audit ./qwen2.5-1.5b --drafter ./qwen2.5-0.5b --prompts spec_bench --count 40 --html audit.html
paceline audit smollm2 --prompts questions.txt --quick
paceline audit --url http://a:8000 --url http://b:8000 --prompts questions.txt

With --url it asks running servers instead, and compares their texts: the same seed gives the same text everywhere.

Ctrl-C or SIGTERM ends it with a report on what is complete.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import audit_servers
from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import (
    add_model_options,
    count,
    counts,
    load,
    measured_drafters,
    rule,
    temperatures,
    thresholds,
    whole,
)
from paceline.cli.prompts_and_results import add_data, data_of, write
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest
from paceline.progress import Progress, progress_bar
from paceline.rules import BUILT_IN, Rule

if TYPE_CHECKING:
    from paceline.audit.run import Scope
    from paceline.llm import LLM
    from paceline.prompts.files import Prompt

LOSSLESS = tuple(known for known in BUILT_IN if known.lossless)
# Values of options that are not given: of a whole audit, and with --quick.
FULL: Mapping[str, Any] = {"count": 20, "max_tokens": 64, "rule": LOSSLESS, "samples": 512, "places": 4}
QUICK: Mapping[str, Any] = {"count": 6, "max_tokens": 32, "rule": (Rule.COUPLED,), "samples": 0, "places": 4}


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser, optional=True)
    audit_servers.add_arguments(parser)
    group = parser.add_argument_group("what is replayed")
    group.add_argument(
        "--prompts",
        required=True,
        metavar="FILE|SET",
        help="JSON lines, one prompt a line, requests that a server recorded, or a set such as spec_bench",
    )
    add_data(group)
    group.add_argument("--count", type=count, metavar="N", help="prompts, evenly spread over all (default: 20)")
    group.add_argument(
        "--quick",
        action="store_true",
        help="a first look: 6 prompts, 32 tokens, the rule coupled, no distribution test, unless options say more",
    )
    group.add_argument("--raw", action="store_true", help="continue prompts as they are, without the chat template")
    group.add_argument("--max-tokens", type=count, metavar="N", help="longest answer (default: 64)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the first prompt (default: 0)")
    _add_grid(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained report, too")
    parser.add_argument("--json", action="store_true", help="everything as JSON in the last line")


def _add_grid(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("over what")
    rules = ", ".join(LOSSLESS)
    group.add_argument(
        "--rule",
        type=rule,
        action="append",
        metavar="RULE",
        help=f"may be given several times (default: {rules})",
    )
    group.add_argument(
        "--threshold",
        type=thresholds,
        metavar="X|KIND,…",
        help="of lossy rules: each with each of these, such as code,json,narrative,auto,0.3 (default: the rule's own)",
    )
    group.add_argument(
        "--at-once", type=counts, default=(1, 8), metavar="N,N,…", help="requests that run side by side (default: 1,8)"
    )
    group.add_argument("--temperature", type=temperatures, default=(0.0, 1.0), metavar="X,X,…", help="(default: 0,1)")
    group.add_argument(
        "--edits",
        action=BooleanOptionalAction,
        default=True,
        help="each temperature also with penalties, and with filters where it samples (default: on)",
    )
    group.add_argument(
        "--samples",
        type=whole,
        metavar="N",
        help="seeds at each place of a distribution test, for rules that keep the distribution but not the tokens; "
        "0: no test (default: 512)",
    )
    group.add_argument("--places", type=count, metavar="N", help="of a distribution test (default: 4)")


def run(args: Namespace) -> int:
    from paceline.audit.arithmetic import Arithmetic
    from paceline.audit.page import page
    from paceline.audit.report import record
    from paceline.audit.run import audit
    from paceline.audit.text import text

    if args.url:
        audit_servers.check(args)
        return audit_servers.run(_filled(args))
    if args.key or args.repeats or args.logprobs:
        raise InvalidRequest("--key, --repeats and --logprobs are for servers: name them with --url")
    if args.target is None:
        raise InvalidRequest("name a MODEL, or servers with --url; see `paceline audit --help`")
    args = _filled(args)
    if args.threshold and not any(known.threshold is not None for known in args.rule):
        raise InvalidRequest("--threshold is for lossy rules: name one, such as --rule threshold")
    prompts = _prompts(args)
    if args.html is not None:
        write(args.html, "", mode="a")  # raises before the work if the file cannot be written
    llm = load(_repeatable(args))
    kept, tokens = _encoded(llm, prompts, raw=args.raw)
    with progress_bar("preparing") as progress:
        found = audit(
            llm.engine, kept, tokens, _scope(args, llm), arithmetic=Arithmetic.of(llm.parts), say=_counter(progress)
        )
    facts = _facts(args, llm, left_out=len(prompts) - len(kept)) | record(found, show=llm.tokenizer.decode)
    print(text(facts))
    if args.html is not None:
        write(args.html, page(facts))
    if args.json:
        print(json.dumps(facts))
    return 1 if not found.passed else interrupted_status() if found.interrupted else 0


def _filled(args: Namespace) -> Namespace:
    """Give the options that were not given their values."""
    usual = QUICK if args.quick else FULL
    return Namespace(**vars(args) | {name: value for name, value in usual.items() if getattr(args, name) is None})


def _not_audited(args: Namespace) -> str | None:
    """Name what --quick leaves out; None for a whole audit."""
    if not args.quick:
        return None
    rules = [str(rule) for rule in LOSSLESS if rule not in args.rule]
    parts = [f"prompts beyond {args.count}", f"answers beyond {args.max_tokens} tokens"]
    parts += [f"the rules {' and '.join(rules)}"] if rules else []
    parts += [] if args.samples else ["distribution tests"]
    return f"--quick leaves out: {', '.join(parts)}"


def _prompts(args: Namespace) -> list[Prompt]:
    from paceline.prompts.files import read_prompts

    return read_prompts(args.prompts, data=data_of(args), count=args.count)


def _repeatable(args: Namespace) -> Namespace:
    """Set engine options so that drafts do not depend on the clock, and no batch is too large to draft for."""
    from paceline.audit.distribution import AT_ONCE

    usual, most = EngineConfig(), max(*args.at_once, AT_ONCE)
    defaults: dict[str, Any] = {"measure_cost": False, "measure_speedup": False, "min_acceptance": 0.0}
    if most > usual.max_sequences:
        defaults["max_sequences"] = most
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _encoded(llm: LLM, prompts: Sequence[Prompt], *, raw: bool) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Prompts and their tokens, without those that do not fit the context."""
    most = llm.parts.memory.max_context
    pairs = [(prompt, _tokens(llm, prompt, raw=raw)) for prompt in prompts]
    kept = [(prompt, tokens) for prompt, tokens in pairs if len(tokens) < most]
    if not kept:
        raise InvalidRequest(f"every prompt has {most} tokens or more, which fills the context: raise max_context")
    if len(kept) < len(pairs):
        longer = f"{len(pairs) - len(kept)} of {len(pairs)} prompts do not fit into a context of {most} tokens"
        print(f"paceline: {longer}: left out", file=sys.stderr)
    return [prompt for prompt, _ in kept], [tokens for _, tokens in kept]


def _tokens(llm: LLM, prompt: Prompt, *, raw: bool) -> tuple[int, ...]:
    if prompt.tokens:
        return prompt.tokens
    if raw or llm.tokenizer.chat_template is None:
        return llm.encode(prompt.text)
    return llm.encode_chat(prompt.messages)


def _scope(args: Namespace, llm: LLM) -> Scope:
    from paceline.audit.cases import variants
    from paceline.audit.run import Scope

    return Scope(
        drafters=measured_drafters(args, llm),
        rules=args.rule,
        at_once=args.at_once,
        variants=variants(args.temperature, edits=args.edits, max_tokens=args.max_tokens),
        seed=args.seed,
        samples=args.samples,
        places=args.places,
        thresholds=args.threshold or (None,),
    )


def _facts(args: Namespace, llm: LLM, *, left_out: int) -> dict[str, Any]:
    import torch

    from paceline.bench.machine import describe

    return {
        "target": args.target,
        "how": llm.parts.target.why,
        "drafters": {name: made.how for name, made in llm.parts.drafters.items()},
        "left_out": left_out,
        "not_audited": _not_audited(args),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "machine": describe(torch.device(llm.parts.target.device)),
    }


def _counter(progress: Progress) -> Callable[[str, int], Callable[[], None]]:
    """Make the `say` of an audit: each part is a phase of the progress, and each answer is counted."""

    def say(what: str, answers: int) -> Callable[[], None]:
        progress.phase(what, unit="answers", total=answers)
        return progress.count

    return say
