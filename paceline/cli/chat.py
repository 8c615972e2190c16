"""Chat: talk with a model; what its drafter guessed right is in colour.

paceline chat
paceline chat ./model.gguf --system "Answer in one sentence."
paceline chat ./qwen2.5-1.5b --drafter ./qwen2.5-0.5b --temperature 0

Ctrl-C stops an answer, Ctrl-D leaves. /help lists what else can be typed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from paceline.cli.conversation import Conversation, Speaker
from paceline.cli.options import add_answer_options, add_model_options, load, sampling_of, speculation_of
from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.llm import LLM

MAX_TOKENS = 1024  # default for an answer: a small model may never stop by itself


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser, default_target="smollm2")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_answer_options(parser, max_tokens=MAX_TOKENS)


def run(args: Namespace) -> int:
    llm = load(args)
    conversation_of(args, llm, speaker=llm).run(greeting(args, llm))
    return 0


def conversation_of(args: Namespace, llm: LLM, *, speaker: Speaker) -> Conversation:
    """Make the conversation that the arguments ask for. `speaker` answers for `llm`: itself, or through a server."""
    if llm.tokenizer.chat_template is None:
        raise InvalidRequest(f"{args.target} has no chat template: it continues text; use `paceline generate`")
    sampling = sampling_of(args, llm.default_sampling)
    if sampling.n > 1:
        raise InvalidRequest("a conversation goes on from one answer; leave --n at 1")
    return Conversation(speaker, sampling=sampling, speculation=speculation_of(args), system=args.system)


def greeting(args: Namespace, llm: LLM) -> str:
    from paceline.models.resolve import served_name

    drafters = [name for name in llm.parts.drafters if not args.no_speculation]
    drafting = f"drafts with {', '.join(drafters)}: accepted guesses are in colour" if drafters else "no drafter"
    return f"{served_name(args.target)} · {drafting}\n/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves"
