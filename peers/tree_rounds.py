"""The cost of trees: verification, acceptance and move of a tree of 8 tokens against those of a chain of 8.

Drafts have a fixed shape, and drafted tokens are accepted at random, with the same probability on each level. All
shapes take turns, each for a few rounds, and every round begins with the same context. The chain takes part twice: its
second ratio shows the noise. Times are those of the device, without the draft.

    python -m peers.tree_rounds --target llama-3.1-8b
    python -m peers.tree_rounds --target smollm2-135m
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch

from paceline.bench.machine import describe
from paceline.bench.statistics import paired_ratio
from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.runner.loading.models import ready_shape
from paceline.runner.rounds.protocol import Chunk, DraftingRound, Rounds, Seat
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

CHAIN = tuple(range(-1, 7))
SHAPES = {  # parents of the tokens of a draft
    "chain": CHAIN,
    "tree": (-1, 0, 1, 2, -1, 0, 1, 4),  # four leaves, the likely path first
    "wide tree": (-1, -1, 0, 0, 1, 1, 0, 1),  # six leaves
    "chain again": CHAIN,
}
ACCEPTANCE = 0.8  # probability that a level of a draft is accepted
EACH = 10  # rounds of a shape in each of its turns
MAX_DRAFT = len(CHAIN)


class FixedShape:
    """Implements DeviceDrafter: the tokens that happen to stand behind the text, in a fixed shape."""

    reader, finds_fewer = None, False

    def __init__(self, parents: Sequence[int], device: torch.device | str) -> None:
        self.tree = tuple(parents) != CHAIN
        self._parents = torch.tensor(parents, dtype=torch.int32, device=device)

    def draft(self, round: DraftingRound) -> None:
        round.state.parents[:, : len(self._parents)] = self._parents


class Shapes:
    """Rounds with drafts of every shape, over lanes of `context` random tokens."""

    def __init__(self, rounds: Rounds, *, lanes: int, context: int, vocab_size: int) -> None:
        self._rounds = rounds
        self._context = context
        rng = np.random.default_rng(0)
        self._texts = [rng.integers(0, vocab_size, context).astype(np.int32) for _ in range(lanes)]
        params = SamplingParams.of(temperature=0.0)
        self._samplers = [Sampler(params, seed=i, vocab_size=vocab_size, eos_ids=()) for i in range(lanes)]

    def read(self) -> None:
        """Compute keys and values of all texts but their last tokens."""
        self._write(len(self._texts))
        chunks = [Chunk(lane, 0, self._context - 1, draws=False) for lane in range(len(self._texts))]
        self._rounds.collect(self._rounds.launch(chunks, [], drafter=None, context=self._context))

    def run(self, shape: str, batch: int) -> float:
        """Run one round; return the seconds of its verification, acceptance and move."""
        self._write(batch)
        seats = [Seat(lane, MAX_DRAFT) for lane in range(batch)]
        longest = self._context + MAX_DRAFT + 1
        times = self._rounds.collect(self._rounds.launch([], seats, drafter=shape, context=longest))[2]
        return times.verify + times.accept

    def _write(self, lanes: int) -> None:
        pages = -(-(self._context + MAX_DRAFT + 1) // PAGE_SIZE)
        for lane in range(lanes):
            self._rounds.write(lane, self._texts[lane], self._samplers[lane])
            self._rounds.set_pages(lane, 0, range(lane * pages, (lane + 1) * pages))


def measure(shapes: Shapes, batch: int, turns: int) -> dict[str, dict[str, Any]]:
    """Let all shapes take turns. Return, for each, its median milliseconds and its ratio to the chain by turns."""
    seconds: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    for _ in range(turns):
        for shape in SHAPES:
            seconds[shape].append(median(shapes.run(shape, batch) for _ in range(EACH)))
    return {shape: compared(each, seconds["chain"]) for shape, each in seconds.items()}


def compared(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    ratio = paired_ratio([(each, 1.0) for each in mine], [(each, 1.0) for each in theirs])
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {
        "ms": round(median(mine) * 1e3, 4),
        "median_ratio": round(median(ratios), 4),
        "ratio": None if ratio is None else ratio.record(),
    }


def on_cuda(target: str, *, lanes: int, context: int) -> tuple[Rounds, Forward]:
    from paceline.runner.forwards.cuda import CudaForward
    from paceline.runner.rounds.cuda import CudaRounds

    pages = lanes * -(-(context + MAX_DRAFT + 1) // PAGE_SIZE)
    forward = ready_shape(target, device="cuda").forward(num_pages=pages, threads=None, max_context=2 * context)
    assert isinstance(forward, CudaForward), "the target was made for a GPU"
    drafters = {shape: FixedShape(parents, "cuda") for shape, parents in SHAPES.items()}
    return CudaRounds(forward, lanes=lanes, max_context=2 * context, max_draft=MAX_DRAFT, drafters=drafters), forward


def warm(shapes: Shapes, batches: Sequence[int], *, device: str) -> None:
    """Run every kind of round until it is a recorded graph. Kernels are compiled beside each other before."""
    from paceline.kernels.cuda.compiling import compiling

    for block in (compiling() if device == "cuda" else nullcontext(), *(nullcontext() for _ in range(3))):
        with block:
            shapes.read()
            for batch in batches:
                for shape in SHAPES:
                    shapes.run(shape, batch)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rounds, forward = on_cuda(args.target, lanes=max(args.batch), context=args.context)
    rounds.synthetic_acceptance = ACCEPTANCE
    shapes = Shapes(rounds, lanes=max(args.batch), context=args.context, vocab_size=forward.vocab_size)
    warm(shapes, args.batch, device="cuda")
    found: Mapping[str, Any] = {f"batch {batch}": measure(shapes, batch, args.turns) for batch in args.batch}
    command = f"python -m peers.tree_rounds --target {args.target} --context {args.context} --turns {args.turns}"
    print(json.dumps({"command": command, "setup": vars(args), "machine": describe(torch.device("cuda")), **found}))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a shape, see `paceline bench engine`")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--context", type=int, default=300, help="tokens of every sequence")
    parser.add_argument("--turns", type=int, default=25)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
