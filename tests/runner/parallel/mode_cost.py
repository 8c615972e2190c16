"""Measure what the same bits across degrees cost: `python -m tests.runner.parallel.mode_cost`.

Forward passes of a random Llama (12 layers of 1024, 16 heads, 8 key/value heads, 205 M parameters), in one process and
over two ranks of one thread each, with the mode and without, in turns. The mode cuts it into 8 shards. Costs are ratios
of neighbouring measurements, so that a machine that gets slower meanwhile does not decide.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from paceline.kernels.base import Batch, Forward
from paceline.models.load import load_model
from paceline.models.weights import Format
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.loading.pack_store import SIZE_VARIABLE
from paceline.runner.parallel.ranks import Ranks
from tests.runner.parallel.split_models import PATIENCE, split_over, write_tiny
from tests.tiny_batches import chunks_of
from tests.tiny_models import TARGET, random_weights

CONFIG = replace(
    TARGET.config,
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=12,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_context=1024,
)
PROMPT, TOKENS = 256, 64  # rows of the pass that reads a prompt, and passes of one row after it
PAGES = tuple(range(32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4", choices=get_args(Format), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    args = parser.parse_args()
    os.environ[SIZE_VARIABLE] = "0"  # nothing is kept
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(Path(folder), CONFIG, random_weights(CONFIG, seed=1))
        ranks = Ranks(2, threads=1, timeout=PATIENCE)
        measure(forwards(path, args.format, ranks), args.rounds)
        ranks.close()


def forwards(path: Path, format: Format, two: Ranks) -> Mapping[str, tuple[Forward, Forward]]:
    """Make forwards without the mode and with it, by the number of processes."""
    model, count = load_model(str(path), format=format), len(PAGES)
    whole: Forward
    if format.startswith("int"):
        whole = CompiledForward(model.config, model.weights, num_pages=count, threads=1, max_context=1024)
    else:
        dtype = torch.bfloat16 if format == "bf16" else torch.float32
        whole = TorchForward(model.config, model.weights, num_pages=count, dtype=dtype)

    def split(ranks: Ranks, same_bits: bool) -> Forward:
        return split_over(ranks, path, same_bits=same_bits, num_pages=count, format=format)

    return {
        "one process": (whole, split(Ranks(1, threads=1), True)),
        "two ranks": (split(two, False), split(two, True)),
    }


def measure(pairs: Mapping[str, tuple[Forward, Forward]], rounds: int) -> None:
    tokens = [(7 * i * i + 3) % CONFIG.vocab_size for i in range(PROMPT + TOKENS)]
    [prompt, *steps] = chunks_of(tokens, [PROMPT, *[1] * TOKENS], pages=PAGES)
    prompt = last_row_alone(prompt)
    same = [pair[1](prompt).logits.clone() for pair in pairs.values()]
    assert torch.equal(*same), "one process and two ranks have other bits in the mode"
    for name, pair in pairs.items():
        for what, passes in (("a prompt's tokens", [prompt]), ("decoded tokens", steps)):
            times = [[seconds(forward, passes) for forward in pair] for _ in range(rounds + 1)][1:]
            report(f"{name}, {what}", times, sum(len(each.tokens) for each in passes))


def last_row_alone(batch: Batch) -> Batch:
    """Want logits of the last row alone, as of a prompt."""
    parts = {name: getattr(batch, name) for name in batch.__slots__}
    return Batch(**parts | {"logit_rows": batch.logit_rows[-1:]})


def seconds(forward: Callable[[Batch], object], passes: list[Batch]) -> float:
    torch.set_num_threads(1)
    began = time.perf_counter()
    for each in passes:
        forward(each)
    return time.perf_counter() - began


def report(name: str, times: list[list[float]], tokens: int) -> None:
    without, mode = (statistics.median(column) for column in zip(*times, strict=True))
    costs = sorted(mode / without - 1 for without, mode in times)
    low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
    print(
        f"{name}: {tokens / without:.1f} tokens/s without, {tokens / mode:.1f} with; "
        f"costs {statistics.median(costs):+.1%} [{low:+.1%}, {high:+.1%}]",
        flush=True,
    )


if __name__ == "__main__":
    main()
