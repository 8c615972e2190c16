"""Speculative against plain decoding on a prompt set: speed, tokens per round, and whether every token is the same.

For each prompt the two arms take turns, `--rounds` times; speeds are decode speeds (after the first token), each arm's
median over rounds, summed over prompts. `--concurrency` prompts run as one batch.

    python -m bench.speculation smollm2 --drafter ngram --set code_edit --count 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench import prompts as prompt_sets
from paceline import LLM, OFF, SamplingParams, Speculation
from paceline.bench.machine import describe
from paceline.llm import Answer


@dataclass(slots=True)
class Arm:
    """One way of decoding: its answers, and the seconds it took in each round."""

    seconds: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


def run_arm(llm: LLM, arm: Arm, batch: Sequence[tuple[int, ...]], params: SamplingParams, how: Speculation) -> None:
    began = time.perf_counter()
    arm.answers = llm.generate(batch, params, speculation=how)
    first = max(answer.stats.time_to_first for answer in arm.answers)
    arm.seconds.append(time.perf_counter() - began - first)


def measure(
    llm: LLM, batch: Sequence[tuple[int, ...]], params: SamplingParams, how: Speculation, rounds: int
) -> tuple[Arm, Arm]:
    plain, speculative = Arm(), Arm()
    for turn in range(rounds):
        arms = [(plain, OFF), (speculative, how)]
        for arm, words in arms if turn % 2 == 0 else reversed(arms):
            run_arm(llm, arm, batch, params, words)
    return plain, speculative


def summarise(pairs: Sequence[tuple[Arm, Arm]]) -> dict[str, object]:
    plain_time = sum(statistics.median(plain.seconds) for plain, _ in pairs)
    speculative_time = sum(statistics.median(speculative.seconds) for _, speculative in pairs)
    answers = [(a, b) for plain, speculative in pairs for a, b in zip(plain.answers, speculative.answers, strict=True)]
    tokens = sum(len(a.tokens) - 1 for a, _ in answers)
    stats = [b.stats for _, b in answers]
    return {
        "prompts": len(answers),
        "tokens": tokens,
        "identical": sum(a.tokens == b.tokens for a, b in answers),
        "plain_tok_s": round(tokens / plain_time, 1),
        "speculative_tok_s": round(sum(len(b.tokens) - 1 for _, b in answers) / speculative_time, 1),
        "ratio": round(plain_time / speculative_time, 3),
        "tokens_per_round": round(sum(s.output_tokens for s in stats) / sum(s.steps for s in stats), 2),
        "acceptance": round(sum(s.accepted for s in stats) / max(sum(s.drafted for s in stats), 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--format", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--set", default="code_edit", help="a prompt set or a file of prompts")
    parser.add_argument("--category", help="only prompts of this category")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-draft", type=int)
    prompt_sets.add_arguments(parser)
    args = parser.parse_args()
    llm = LLM(args.target, drafter=args.drafter, format=args.format, threads=args.threads)
    chosen = prompt_sets.load(args.set, data=args.data)
    if args.category:
        chosen = [prompt for prompt in chosen if prompt.category == args.category]
    chosen = prompt_sets.spread(chosen, count=min(args.count, len(chosen)))
    encoded = [llm.encode_chat([{"role": "user", "content": prompt.prompt}]) for prompt in chosen]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=1)
    how = Speculation(max_draft=args.max_draft)
    pairs = []
    for start in range(0, len(encoded), args.concurrency):
        pairs.append(measure(llm, encoded[start : start + args.concurrency], params, how, args.rounds))
        print(chosen[start].id, json.dumps(summarise(pairs[-1:])), flush=True)
    command = {name: str(value) for name, value in vars(args).items() if value is not None and name != "data"}
    print(json.dumps({**summarise(pairs), "command": command, "machine": describe(torch.device("cpu"))}))


if __name__ == "__main__":
    main()
