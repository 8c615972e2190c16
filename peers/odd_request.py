"""Speed of a batch in which one request asks for a parameter that the others do not have, beside that of a plain batch.

Runs with each parameter alternate with plain runs of the same engine; a ratio is the median over rounds of the two
speeds of a round. The odd request is not counted as slower: all tokens of the batch count, while all of it decodes.

    python -m peers.odd_request --target llama-3.1-8b --batch 16
    python -m peers.odd_request --target llama-3.1-8b --drafter llama-3.2-1b --acceptance 0.8 --batch 16 --odd logprobs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from paceline.bench.engine import Setup, build, requests, run_batch
from paceline.bench.engine_prompts import prompts_of
from paceline.types import Request, Rule

ODD: Mapping[str, Mapping[str, Any]] = {
    "logprobs": {"logprobs": 5},
    "logprobs-20": {"logprobs": 20},
    "penalty": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {7: -100.0, 11: 1.0}},
    "penalty-logprobs": {"repetition_penalty": 1.1, "logprobs": 5},
    "rejection": {"temperature": 1.0},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    setup = Setup(
        target=args.target,
        drafter=args.drafter,
        batches=(args.batch,),
        draft=args.draft,
        acceptance=args.acceptance,
        device=args.device,
        output_tokens=args.tokens,
    )
    engine = (parts := build(setup, drafting=args.drafter is not None)).engine
    mode: Any = "speculative" if args.drafter else "plain"
    prompts = prompts_of(setup, parts)

    def speed(odd: str | None, round: int) -> float:
        asked = requests(setup, args.batch, mode=mode, round=round, prompts=prompts)
        return run_batch(engine, asked if odd is None else with_odd(asked, odd), mode=mode, round=round).tok_s

    found: dict[str, Any] = {}
    for odd in args.odd:
        pairs = [(speed(None, round), speed(odd, round)) for round in range(-1, args.rounds)][1:]
        plain, mixed = median(each for each, _ in pairs), median(each for _, each in pairs)
        found[odd] = {"plain": plain, "mixed": mixed, "ratio": median(mixed / plain for plain, mixed in pairs)}
        print(json.dumps({odd: found[odd]}), flush=True)
    print(json.dumps({"setup": vars(args), "found": found}))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--acceptance", type=float)
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--odd", choices=[*ODD], nargs="+", default=["logprobs", "penalty", "bias"])
    return parser.parse_args(argv)


def with_odd(asked: Sequence[Request], odd: str) -> list[Request]:
    """Give the first request the odd parameter."""
    first = replace(asked[0], sampling=replace(asked[0].sampling, **ODD[odd]))
    if odd == "rejection":
        first = replace(first, speculation=replace(first.speculation, rule=Rule.REJECTION))
    return [first, *asked[1:]]


if __name__ == "__main__":
    main()
