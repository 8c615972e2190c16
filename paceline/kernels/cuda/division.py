"""Division of attention among programs. It only matters for speed: results are the same to the bit."""

from __future__ import annotations

from typing import NamedTuple

ALONE = 132  # programs that each have a multiprocessor of an H200, with two tiles in flight
SHARED = 396  # programs that share them by three, with one tile in flight each
PATHS = 4  # programs that share the paths of a tree; more of them are mostly idle, and still cost time


class Work(NamedTuple):
    """The work of a block of rows."""

    block: int  # rows times query heads that share a KV head
    head_dim: int
    size: int  # bytes of a number of keys and values


def division(blocks: int, splits: int, work: Work, *, fill: int = 0) -> tuple[int, int, int]:
    """Choose the programs of a block, their warps and their stages. `fill`: programs in all, at most (0: by the work).

    Many narrow blocks, of few rows and small heads, take less time if all are on the device at once, with two warps
    each."""
    even = blocks * (ALONE // blocks) > 3 * ALONE // 4  # programs of their own leave few multiprocessors idle
    programs = min(splits, max(1, (fill or (ALONE if even else SHARED)) // blocks))
    long = programs == 1 and splits > 8 and blocks > ALONE and work.block == 16
    narrow = work.head_dim <= 64 and work.block == 16
    stages = 3 if blocks * programs <= ALONE and work.size < 4 else 2
    return programs, 8 if long else 2 if narrow and blocks > SHARED else 4, stages


def paths_of(programs: int, rows: int, *, fill: int = 0) -> int:
    """Choose how many programs share the paths of a tree of `rows` rows, where a chain has `programs` in all."""
    return max(1, min(rows, PATHS, (fill or SHARED) // programs))


def splits_of(split: int, max_context: int, window: int, rows: int) -> int:
    """Count the splits of `split` positions that a block of `rows` rows may see."""
    span = min(max_context, window + rows + split) if window else max_context  # a window may start within a split
    return max(1, -(-span // split))
