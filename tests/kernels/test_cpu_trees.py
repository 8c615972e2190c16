"""Trees in the compiled forward: every node has the bits that it has as the end of a plain text.

This holds wherever pages, chunks of 128 keys and windows end, beside any other sequences, and in any KV slots.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch
from tests.kernels.tiny_forward import CONFIGS, PLAIN, RUNNABLE, compiled, ints, rows_of

WIDTH = 12  # pages of a sequence
SHAPES = {
    "everything": CONFIGS["everything"],  # windows of 70 and none
    "short-window": replace(PLAIN, windows=(5,)),  # a window that ends among the nodes
    "many-heads": CONFIGS["many-heads"],  # eight rows in a query block
    "wide-heads": CONFIGS["wide-heads"],
}


@dataclass(frozen=True)
class Work:
    """`count` committed tokens that end at `base`, then a tree; no parents: no tree."""

    tokens: list[int]
    pages: list[int]
    base: int
    parents: Sequence[int] = ()
    drafted: Sequence[int] = ()
    slots: Sequence[int] = ()
    count: int = 1

    def path(self, node: int) -> list[int]:
        return [*([] if self.parents[node] < 0 else self.path(self.parents[node])), node]


def slot_of(work: Work, position: int) -> int:
    return work.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def random_tree(source: random.Random, tokens: list[int], pages: list[int], base: int, nodes: int, deep: float) -> Work:
    """A tree whose nodes follow the one before with probability `deep`; slots in the order of rows, as in a runner."""
    parents = [i - 1 if source.random() < deep else source.randrange(-1, i) if i else -1 for i in range(nodes)]
    work = Work(
        tokens, pages, base, parents, [source.randrange(90) for _ in parents], count=source.randint(1, min(3, base))
    )
    return replace(work, slots=[slot_of(work, base + i) for i in range(nodes)])


def planted(works: Sequence[Work]) -> Batch:
    """A batch of all works, with logits of every row."""
    depth = max(len(work.path(node)) for work in works for node in range(len(work.parents)))
    tokens, positions, slots, starts, tails = [], [], [], [0], []
    for work in works:
        committed = range(work.base - work.count, work.base)
        paths = [work.path(node) for node in range(len(work.parents))]
        tokens += [*(work.tokens[place] for place in committed), *work.drafted]
        positions += [*committed, *(work.base + len(path) - 1 for path in paths)]
        slots += [*(slot_of(work, place) for place in committed), *work.slots]
        own = [[work.slots[node] for node in path] for path in paths]
        tails += [[-7] * depth for _ in committed] + [(row + [-7] * depth)[:depth] for row in own]
        starts.append(len(tokens))
    return Batch(
        tokens=ints(tokens),
        positions=ints(positions),
        slots=ints(slots),
        row_starts=ints(starts),
        bases=ints([work.base for work in works]),
        page_table=torch.tensor([work.pages for work in works], dtype=torch.int32),
        logit_rows=ints(range(len(tokens))),
        tails=torch.tensor(tails, dtype=torch.int32),
    )


def check(alone, works: Sequence[Work], logits: Tensor) -> None:
    """Compare each row of a batch of trees with the text that ends with it, computed without any tree."""
    for work in works:
        mine, logits = logits[: work.count + len(work.parents)], logits[work.count + len(work.parents) :]
        committed = alone(rows_of((work.tokens, work.base - work.count, work.base, work.pages))).logits
        assert torch.equal(mine[: work.count], committed), f"committed rows before {work.base}"
        for node in range(len(work.parents)):
            text = [*work.tokens[: work.base], *(work.drafted[each] for each in work.path(node))]
            wanted = alone(rows_of((text, work.base, len(text), work.pages))).logits[-1]
            assert torch.equal(mine[work.count + node], wanted), f"node {node} of {work.parents} behind {work.base}"


def text_and_pages(source: random.Random, sequence: int, length: int) -> tuple[list[int], list[int]]:
    pages = list(range(sequence * WIDTH, (sequence + 1) * WIDTH))
    source.shuffle(pages)
    return [source.randrange(90) for _ in range(length)], pages


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("base", [2, 15, 17, 112, 122, 128, 129, 142])
def test_trees_where_pages_chunks_and_windows_end(variant, shape, base, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    source = random.Random(f"{shape} {base}")
    tokens, pages = text_and_pages(source, 0, 150)
    alone, forward = (compiled(SHAPES[shape], num_pages=WIDTH, threads=threads) for threads in (1, 2))
    for one in (alone, forward):
        one(rows_of((tokens, 0, base, pages)))
    for nodes, deep in ((16, 0.9), (16, 0.3), (6, 1.0), (3, 0.0)):
        work = random_tree(source, tokens, pages, base, nodes, deep)
        check(alone, [work], forward(planted([work])).logits.clone())


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("window", [0, 4, 5])
@pytest.mark.parametrize("base", [6, 7, 127, 128, 129])
def test_values_of_two_positions_are_a_pair_in_any_slots(variant, window, base, monkeypatch):
    """Kernels add the values of positions 2i and 2i + 1 at once; slots and windows begin and end at either."""
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    source = random.Random(base)
    tokens, pages = text_and_pages(source, 0, 150)
    alone, forward = (compiled(replace(PLAIN, windows=(window,)), num_pages=2 * WIDTH, threads=n) for n in (1, 2))
    for one in (alone, forward):
        one(rows_of((tokens, 0, base, pages)))
    first = WIDTH * PAGE_SIZE
    for slots in (range(first, first + 18, 2), range(first + 9, first, -1), source.sample(range(first, 2 * first), 9)):
        for deep in (1.0, 0.6):
            work = replace(random_tree(source, tokens, pages, base, 9, deep), slots=list(slots))
            check(alone, [work], forward(planted([work])).logits.clone())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_trees_beside_each_other_and_beside_sequences_without(threads):
    source = random.Random(threads)
    alone, forward = (compiled(CONFIGS["everything"], num_pages=4 * WIDTH, threads=n) for n in (1, threads))
    lengths = (20, 126, 150, 131)
    texts = [text_and_pages(source, sequence, length) for sequence, length in enumerate(lengths)]
    for tokens, pages in texts:
        for one in (alone, forward):
            one(rows_of((tokens, 0, len(tokens), pages)))
    for _ in range(6):
        works = [Work(*texts[0], base=20, count=source.choice((1, 19)))]
        works += [
            random_tree(source, *text, base=len(text[0]), nodes=source.randint(1, 16), deep=0.6) for text in texts[1:]
        ]
        source.shuffle(works)
        check(alone, works, forward(planted(works)).logits.clone())


def test_nodes_of_earlier_passes_in_any_slots():
    """A tree level by level, as a head drafts it: ancestors were computed by earlier passes."""
    source = random.Random(8)
    tokens, pages = text_and_pages(source, 0, 130)
    alone, forward = (compiled(CONFIGS["everything"], num_pages=3 * WIDTH, threads=2) for _ in range(2))
    for one in (alone, forward):
        one(rows_of((tokens, 0, 127, pages)))
    work = random_tree(source, tokens, pages, 127, 12, 0.5)
    far = source.sample(range(WIDTH * PAGE_SIZE, 3 * WIDTH * PAGE_SIZE), len(work.parents))
    work = replace(work, slots=far, count=1)
    whole, rows = planted([work]), 1 + len(work.parents)
    logits = torch.zeros(rows, 90)
    for position in sorted(set(whole.positions.tolist())):
        level = [row for row in range(rows) if whole.positions[row] == position]
        some = {name: getattr(whole, name)[level] for name in ("tokens", "positions", "slots", "tails")}
        logits[level] = forward(
            replace(whole, **some, row_starts=ints([0, len(level)]), logit_rows=ints(range(len(level))))
        ).logits
    check(alone, [work], logits)
