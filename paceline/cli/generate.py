"""Generate: continue prompts, or answer them with --chat.

paceline generate smollm2 "Once upon a time" --temperature 0.7 --seed 1
paceline generate ./qwen2.5-1.5b --drafter ./qwen2.5-0.5b --chat --file questions.txt --json
echo "Why is the sky blue?" | paceline generate smollm2 --chat

One prompt is streamed, several are batched. Prompts come from the command line, from --file (one a line), or from
standard input (one a line).
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import add_answer_options, add_model_options, load, sampling_of, speculation_of
from paceline.cli.report import stats_line, stats_record
from paceline.cli.screen import show
from paceline.cli.style import Style
from paceline.errors import InvalidRequest
from paceline.types import Finish, SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM, Answer, Sample

MAX_TOKENS = 256  # default for an answer


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="what to continue; none: read standard input")
    parser.add_argument("--file", metavar="PATH", help="prompts, one a line")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user: apply the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument("--prediction", metavar="PATH", help="a file that much of the answer may repeat: drafted from")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    add_answer_options(parser, max_tokens=MAX_TOKENS)


def run(args: Namespace) -> int:
    prompts = _prompts(args)
    prediction = None if args.prediction is None else _read(args.prediction)[1]
    llm = load(args, drafters=not args.no_speculation)
    sampling = sampling_of(args, llm.default_sampling)
    tokens = [_encode(llm, prompt, args) for prompt in prompts]
    if len(prompts) == 1 and sampling.n == 1 and not args.json:
        _stream(llm, tokens[0], sampling, prediction, args)
        return 0
    answers = llm.generate(tokens, sampling, speculation=speculation_of(args), prediction=prediction)
    if args.json:
        for prompt, answer in zip(prompts, answers, strict=True):
            print(json.dumps(_record(prompt, answer)))
    else:
        _print(answers)
    return 0


def _prompts(args: Namespace) -> list[str]:
    if args.system is not None and not args.chat:
        raise InvalidRequest("--system is a message of a chat: add --chat")
    if args.prompts and args.file:
        raise InvalidRequest("prompts were given both as arguments and with --file; choose one")
    if args.prompts:
        return list(args.prompts)
    if args.file is None and sys.stdin.isatty():
        raise InvalidRequest("no prompt; give one as an argument, with --file, or on standard input")
    source, text = _read(args.file)
    lines = text.removesuffix("\n").split("\n")
    if not text:
        raise InvalidRequest(f"{source} holds no prompt; write one a line")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise InvalidRequest(f"{source}: line {number} is empty; write one prompt a line")
    return lines


def _read(path: str | None) -> tuple[str, str]:
    source = path or "standard input"
    try:
        return source, sys.stdin.read() if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source} cannot be read: {error}") from None


def _encode(llm: LLM, prompt: str, args: Namespace) -> tuple[int, ...]:
    if not args.chat:
        return llm.encode(prompt)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return llm.encode_chat([*system, {"role": "user", "content": prompt}])


def _stream(llm: LLM, tokens: Sequence[int], sampling: SamplingParams, prediction: str | None, args: Namespace) -> None:
    from paceline.llm import Sample

    sample = Sample()
    events = llm.stream(tokens, sampling, speculation=speculation_of(args), prediction=prediction)
    show(llm.tokenizer, events, Style(sys.stdout), into=sample)
    print(flush=True)
    _remark(sample)


def _print(answers: Sequence[Answer]) -> None:
    style = Style(sys.stdout)
    for i, answer in enumerate(answers, start=1):
        for j, sample in enumerate(answer.samples, start=1):
            which = f"prompt {i}" + (f", answer {j}" if len(answer.samples) > 1 else "")
            print(style.bold(f"── {which} ──"), flush=True)
            print(style.plain(sample.text), flush=True)
            _remark(sample)


def _remark(sample: Sample) -> None:
    """Print statistics if stderr is a terminal; programs read --json."""
    if sys.stderr.isatty():
        cut = " · cut: see --max-tokens" if sample.finish is Finish.LENGTH else ""
        print(Style(sys.stderr).dim(f"[{stats_line(sample.stats)}{cut}]"), file=sys.stderr)


def _record(prompt: str, answer: Answer) -> dict[str, Any]:
    record = {"prompt": prompt, "prompt_tokens": list(answer.prompt_tokens), **_sample(answer.samples[0])}
    if len(answer.samples) > 1:
        record["samples"] = [_sample(sample) for sample in answer.samples]
    if answer.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None if score is None else asdict(score) for score in answer.prompt_logprobs]
    return record


def _sample(sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": sample.text,
        "tokens": sample.tokens,
        "finish": sample.finish,
        "stop": sample.stop,
        "stats": stats_record(sample.stats),
    }
    if sample.logprobs:
        record["logprobs"] = [asdict(score) for score in sample.logprobs]
    return record
