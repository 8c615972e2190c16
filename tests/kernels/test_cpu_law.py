"""The law of the compiled forward: a row's bits depend on its own tokens alone.

They do not depend on the rows beside it, the number of threads, or whether its context was a prefill, decoded, a chain
or a tree.
"""

from __future__ import annotations

import random

import pytest
import torch

from paceline.kernels.base import PAGE_SIZE, Batch
from tests.kernels.tiny_forward import CONFIGS, RUNNABLE, compiled, ints, rows_of

LENGTHS = (165, 40, 131)
TABLES = ([20, 3, 14, 0, 7, 1, 11, 5, 2, 6, 8], [4, 9, 10], [12, 13, 15, 16, 17, 18, 19, 21, 22])
NUM_PAGES = 27  # 23 … 26 hold the slots of trees


def texts(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(90) for _ in range(length)] for length in LENGTHS]


def plain(forward, tokens, pages):
    """Logits [length, vocab] of a sequence on its own, token by token, and its keys and values."""
    rows = [forward(rows_of((tokens, i, i + 1, pages))).logits[0].clone() for i in range(len(tokens))]
    return torch.stack(rows), forward.kv.read(rows_of((tokens, 0, len(tokens), pages)).slots)


def random_passes(source: random.Random) -> list[list[tuple[int, int, int]]]:
    """Passes of (sequence, start, stop): chunks of random sizes beside random other ones, until all are done."""
    done = [0] * len(LENGTHS)
    passes = []
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        works = []
        for s in source.sample(range(len(LENGTHS)), source.randint(1, len(LENGTHS))):
            stop = min(LENGTHS[s], done[s] + source.choice((1, 1, 2, 3, 5, 8, 13, 30, 90)))
            if stop > done[s]:
                works.append((s, done[s], stop))
                done[s] = stop
        if works:
            passes.append(works)
    return passes


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("format", ["mixed", "int4"])
def test_chunks_neighbours_and_threads_change_no_bit(variant, format, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    config = CONFIGS["everything"]
    sequences = texts(1)
    alone = compiled(config, format, num_pages=NUM_PAGES, threads=1)
    wanted = [plain(alone, tokens, pages) for tokens, pages in zip(sequences, TABLES, strict=True)]
    source = random.Random(2)
    for threads in (1, 2, 3):
        forward = compiled(config, format, num_pages=NUM_PAGES, threads=threads)
        for works in random_passes(source):
            logits = forward(rows_of(*[(sequences[s], start, stop, TABLES[s]) for s, start, stop in works])).logits
            for s, start, stop in works:
                mine, logits = logits[: stop - start], logits[stop - start :]
                assert torch.equal(mine, wanted[s][0][start:stop]), f"sequence {s}, rows {start} to {stop}"
        for s, (_, memory) in enumerate(wanted):
            slots = rows_of((sequences[s], 0, LENGTHS[s], TABLES[s])).slots
            for mine, other in zip(forward.kv.read(slots), memory, strict=True):
                assert torch.equal(mine, other)


def tree_batch(tokens, base, parents, drafted, slots, pages) -> Batch:
    """The last committed token at base - 1, then a tree behind it, beside a prefill of 20 rows without a tree."""
    chains: list[list[int]] = []
    for node, parent in enumerate(parents):
        chains.append([*([] if parent < 0 else chains[parent]), node])
    depth = max(map(len, chains))
    positions = [base - 1] + [base + len(chain) - 1 for chain in chains]
    tails = torch.full((1 + len(parents) + 20, depth), -7, dtype=torch.int32)
    for row, chain in enumerate(chains, start=1):
        tails[row, : len(chain)] = ints([slots[node] for node in chain])
    beside = rows_of((texts(5)[1], 0, 20, TABLES[1]))
    root = pages[(base - 1) // PAGE_SIZE] * PAGE_SIZE + (base - 1) % PAGE_SIZE
    table = torch.full((2, len(pages)), -1, dtype=torch.int32)
    table[0] = ints(pages)
    table[1, :3] = ints(TABLES[1])
    rows = 1 + len(parents)
    return Batch(
        tokens=torch.cat([ints([tokens[base - 1], *drafted]), beside.tokens]),
        positions=torch.cat([ints(positions), beside.positions]),
        slots=torch.cat([ints([root, *slots]), beside.slots]),
        row_starts=ints([0, rows, rows + 20]),
        bases=ints([base, 20]),
        page_table=table,
        logit_rows=ints(range(rows)),
        tails=tails,
    )


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("base", [3, 16, 75, 127, 130, 142])
def test_a_tree_gives_each_node_the_bits_of_its_own_path(variant, base, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    config, tokens, pages = CONFIGS["everything"], texts(3)[0], TABLES[0]
    alone = compiled(config, num_pages=NUM_PAGES, threads=1)
    forward = compiled(config, num_pages=NUM_PAGES, threads=2)
    for one in (alone, forward):
        one(rows_of((tokens, 0, base - 1, pages)))
    source = random.Random(base)
    parents = [-1, -1, 0, 0, 1, 2, 5, 3, 6, 8]  # ancestors of 9: 8 6 5 2 0
    drafted = [source.randrange(90) for _ in parents]
    slots = source.sample(range(23 * PAGE_SIZE, NUM_PAGES * PAGE_SIZE), len(parents))
    got = forward(tree_batch(tokens, base, parents, drafted, slots, pages)).logits.clone()
    for leaf in (4, 7, 9):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        text = [*tokens[:base], *[drafted[node] for node in path]]
        wanted = alone(rows_of((text, base - 1, len(text), pages))).logits
        assert torch.equal(got[[0, *[1 + node for node in path]]], wanted)
    places = rows_of((text, base, len(text), pages)).slots  # accept the deepest path
    forward.kv.move([slots[node] for node in path], places.tolist())
    follow_up = rows_of(([*text, 5], len(text), len(text) + 1, pages))
    assert torch.equal(forward(follow_up).logits, alone(follow_up).logits)
