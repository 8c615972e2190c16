"""The cost of the same bits across degrees on one GPU: decoding and reading prompts, with the mode and without.

Two engines of the same random weights take turns. The mode cuts o and down into 8 shards, whose products are added in
one tree, as ranks of 2, 4 or 8 GPUs would.

    python -m peers.split_cost --target llama-3.1-8b
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from paceline.bench.engine import Setup, build, requests, run_batch
from paceline.bench.engine_prompts import prompts_of
from paceline.bench.machine import describe
from paceline.bench.statistics import paired_ratio
from paceline.engine.assemble import Parts
from paceline.types import OFF, Request, SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    longest = max(args.prompt)
    setup = Setup(args.target, batches=tuple(args.batch), prompt_tokens=128, output_tokens=args.tokens, device="cuda")
    engines = [build(replace(setup, same_bits=mode), drafting=False) for mode in (False, True)]
    reading = replace(setup, batches=(1,), prompt_tokens=longest, output_tokens=2)
    readers = [build(replace(reading, same_bits=mode), drafting=False) for mode in (False, True)]
    found: dict[str, Any] = {}
    for batch in args.batch:
        found[f"decoding, batch {batch}"] = in_turns(
            engines, args.rounds, lambda parts, turn, batch=batch: decode(parts, setup, batch, turn)
        )
    for tokens in args.prompt:
        found[f"prompt of {tokens}"] = in_turns(
            readers, args.rounds, lambda parts, turn, tokens=tokens: read(parts, tokens, turn)
        )
    command = f"python -m peers.split_cost --target {args.target}"
    print(json.dumps({"command": command, "setup": vars(args), "machine": describe(torch.device("cuda")), **found}))


def in_turns(engines: Sequence[Parts], rounds: int, speed: Any) -> dict[str, Any]:
    """Measure tokens a second without the mode and with it; the first turn warms up."""
    speeds = [[speed(parts, turn) for parts in engines] for turn in range(rounds + 1)][1:]
    without, mode = ([each[index] for each in speeds] for index in (0, 1))
    ratio = paired_ratio([(each, 1.0) for each in mode], [(each, 1.0) for each in without])
    return {
        "without_tok_s": round(median(without), 1),
        "mode_tok_s": round(median(mode), 1),
        "ratio": None if ratio is None else ratio.record(),
    }


def decode(parts: Parts, setup: Setup, batch: int, turn: int) -> float:
    asked = requests(setup, batch, mode="plain", round=turn, prompts=prompts_of(setup, parts))
    return run_batch(parts.engine, asked, mode="plain", round=turn).tok_s


def read(parts: Parts, tokens: int, turn: int) -> float:
    """Return the tokens a second at which a prompt is read, until its first token."""
    generator = torch.Generator().manual_seed(turn)
    vocab = parts.target.model.config.vocab_size
    prompt = tuple(torch.randint(0, vocab, (tokens,), generator=generator).tolist())
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    parts.engine.submit(Request(id=f"{turn}", prompt=prompt, sampling=sampling, speculation=OFF))
    began = time.perf_counter()
    while parts.engine.has_work:
        parts.engine.step()
    return tokens / (time.perf_counter() - began)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a shape, see `paceline bench engine`")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--prompt", type=lambda text: [int(n) for n in text.split(",")], default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=160, help="decoded by each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
