"""Seconds of a pass: bytes over bandwidth, operations over their rate, fixed costs by layer, and sums across ranks.

    pass     (reading ^ x + computing ^ x) ^ (1 / x) + keys and values + layers · (fixed + sequences + rows) + sums
    sums     two for each layer and one for the embedding, of rows · hidden floats; and the logits are gathered

Constants are those of `plan.gpus`. Ranks have equal parts of the matrices and of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench.arithmetic import prompt_arithmetic
from paceline.plan.gpus import Gpu, Pace
from paceline.plan.size import ModelSize

PARTIAL_BYTES = 4  # of a partial sum that crosses ranks: float32
LOGIT_BYTES = 4
PROMPT_ROWS = 8192  # rows of a pass over prompts: the default `max_step_tokens` of a GPU


@dataclass(frozen=True, slots=True)
class Place:
    """GPUs that hold one copy of a model together."""

    gpu: Gpu
    ranks: int = 1


def pass_seconds(
    size: ModelSize, place: Place, *, rows: float, sequences: float, context: float, outs: float | None = None
) -> float:
    """Compute the seconds of a pass. `context`: mean tokens before the rows; `outs`: rows with logits; None: all."""
    keys = sequences * size.seen(context) * size.kv_token(place.ranks) / place.gpu.pace.bandwidth
    return keys + _products(size, place, rows=rows, outs=rows if outs is None else outs, sequences=sequences)


def prompt_seconds(size: ModelSize, place: Place, length: int) -> float:
    """Compute the seconds to read a prompt in passes of its own, until its first token."""
    passes = -(-length // PROMPT_ROWS)
    whole = passes * _products(size, place, rows=length / passes, outs=1 / passes, sequences=1)
    return whole + prompt_attention(size, place, length)


def prompt_attention(size: ModelSize, place: Place, length: int) -> float:
    """Compute the seconds of attention of a whole prompt."""
    work = 2 * prompt_arithmetic(size.config, length).attention / place.ranks
    return work / place.gpu.pace.attention


def _products(size: ModelSize, place: Place, *, rows: float, outs: float, sequences: float) -> float:
    pace, layers = place.gpu.pace, size.config.num_layers
    reading = size.reading(rows)
    bytes = reading.bytes / place.ranks
    operations = 2 * (size.inner_products * rows + size.head_products * outs) / place.ranks
    rate = pace.narrow_products if reading.narrow else pace.products
    both = overlapped(bytes / pace.bandwidth, operations / rate, pace)
    fixed = pace.start + layers * (pace.layer + pace.sequence * sequences + pace.row * rows)
    return both + fixed + sum_seconds(size, place, rows=rows, outs=outs)


def overlapped(one: float, other: float, pace: Pace) -> float:
    """Compute the seconds of two kinds of work that run partly at once."""
    return float((one**pace.overlap + other**pace.overlap) ** (1 / pace.overlap))


def sum_seconds(size: ModelSize, place: Place, *, rows: float, outs: float) -> float:
    """Compute the seconds in which ranks exchange sums and logits in one pass."""
    if place.ranks == 1:
        return 0.0
    link, others = place.gpu.link, place.ranks - 1
    share = others / place.ranks
    each = link.start + 2 * others * link.hop
    bytes = 2 * share * rows * size.config.hidden_size * PARTIAL_BYTES
    sums = (2 * size.config.num_layers + 1) * (each + bytes / link.bandwidth)
    gathered = share * outs * size.config.vocab_size * LOGIT_BYTES / link.bandwidth
    return sums + link.start + others * link.hop + gathered
