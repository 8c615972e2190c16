from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.cuda.attend import Attention, Rotation, block_for, tile_for
from paceline.kernels.cuda.division import Work, division, paths_of
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.rotate import rotate
from paceline.kernels.quant import FP8
from paceline.kernels.reference import ReferenceBackend, ReferenceKV
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from tests.kernels.cuda.conftest import ON_GPU

PAGES, CONTEXT, LAYER = 40, 112, 1
FORMS = ("splits", "runs", "solo")  # a program to each split, to two adjacent splits, to everything
TREE = (-1, 0, 0, -1, 3, 2)  # parents; of node 1 there is no child


def share(lane: int, start: int, count: int, *parents: int) -> Share:
    return Share(lane=lane, start=start, count=count, draft=Draft(tokens=(7,) * len(parents), parents=parents))


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


PREFILL, DECODE, VERIFY = share(0, 0, 7), share(1, 89, 1), share(2, 45, 1, *chain(4))
BRANCHED, SHORT = share(3, 61, 1, *TREE), share(4, 0, 1)
MIXED = (PREFILL, DECODE, VERIFY)


class Scene:
    """A KV memory full of noise, five sequences in it, and queries for any of their rows."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.heads, kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(sum(shape))
        size = {"layers": 2, "num_pages": PAGES, "kv_heads": kv_heads, "head_dim": head_dim, "device": device}
        self.kv = CudaKV(**size, dtype=dtype)
        slots = torch.arange(PAGES * PAGE_SIZE, device=device)
        for layer in range(2):
            noise = torch.randn((2, len(slots), kv_heads, head_dim), generator=generator).to(device)
            self.kv.store(layer, slots, *noise)
        self.oracle = ReferenceKV(**size)
        self.oracle.keys, self.oracle.values = self.kv.read(slots)
        self.lanes = Lanes(count=5, max_context=CONTEXT - 9, max_draft=8)
        self.lanes.pages[:] = torch.randperm(PAGES, generator=generator)[:35].view(5, 7)
        kind = torch.float32 if dtype == FP8 else dtype
        self.queries = torch.randn((5, CONTEXT, self.heads, head_dim), generator=generator).to(device, kind)

    def batch(self, *shares: Share) -> Batch:
        batch = build_batch(self.lanes, shares)
        there = self.kv.keys.device
        return Batch(**{name: x.to(there) if isinstance(x, torch.Tensor) else x for name, x in fields(batch)})

    def rows(self, *shares: Share) -> Tensor:
        return torch.cat([self.queries[s.lane, s.start : s.start + s.rows] for s in shares])

    def attend(self, attention: Attention, *shares: Share, window: int = 0, **options: int) -> Tensor:
        queries = self.rows(*shares)
        out = torch.full_like(queries, float("nan"))
        return run(attention, self.kv, self.batch(*shares), queries, out, window=window, **options)

    def reference(self, *shares: Share, window: int = 0) -> Tensor:
        backend = ReferenceBackend(self.oracle)
        backend.begin(self.batch(*shares))
        return backend.attend(LAYER, self.rows(*shares), window=window, scale=0.4)


def fields(batch: Batch) -> list[tuple[str, Tensor | None]]:
    return [(name, getattr(batch, name)) for name in Batch.__slots__]


def run(
    attention: Attention, kv: CudaKV, batch: Batch, queries: Tensor, out: Tensor, *, window: int = 0, **options: Any
) -> Tensor:
    starts = batch.row_starts.tolist()
    options.setdefault("leads", torch.arange(len(batch.tokens), dtype=torch.int32, device=queries.device))
    return attention(
        queries,
        kv,
        LAYER,
        row_starts=batch.row_starts,
        positions=batch.positions,
        page_table=batch.page_table,
        bases=batch.bases,
        tails=batch.tails,
        out=out,
        seats=len(batch.bases),
        max_rows=max(b - a for a, b in pairwise(starts)),
        max_context=int(batch.positions.max()) + 1,
        scale=0.4,
        window=window,
        **options,
    )


def made(device: torch.device, form: str = "splits", *, blocks: int = 0) -> Attention:
    """Make an Attention that divides work in the given form; `blocks` is the number of blocks of the call."""
    return Attention(device=device, tile=16, tiles=2, fill={"splits": 1000, "runs": 2 * blocks, "solo": 1}[form])


def check_form(attention: Attention, form: str, *, blocks: int, head_dim: int = 16, context: int = 90) -> None:
    """Check by its scratch memory that attention worked in the given form: with partials of splits or without."""
    units = 0 if form == "solo" else -(-context // 32)
    padded = max(16, 1 << (head_dim - 1).bit_length())
    assert attention.partials.numel() == blocks * units * 16 * (padded + 2)
    assert not attention.counters.any(), "the next call would merge too early"


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 1, 20, 40])
def test_attention_as_the_reference_does_it(window, form, dtype, device):
    scene, attention = Scene((4, 2, 16), dtype, device), made(device, form, blocks=6)
    close(scene.attend(attention, *MIXED, window=window), scene.reference(*MIXED, window=window))
    if not window:
        check_form(attention, form, blocks=6)


@pytest.mark.parametrize("shape", [(3, 3, 64), (5, 1, 80), (7, 1, 96), (16, 1, 16), (2, 1, 128), (3, 1, 256)], ids=str)
def test_sizes_of_heads_and_groups(shape, dtype, device):
    """Three rows are several blocks if many query heads share a KV head."""
    scene, (heads, kv_heads, _) = Scene(shape, dtype, device), shape
    blocks = 2 * kv_heads * -(-3 // (16 // (heads // kv_heads)))
    shares, attention = (DECODE, share(2, 45, 1, *chain(2))), made(device, "runs", blocks=blocks)
    close(scene.attend(attention, *shares), scene.reference(*shares))
    check_form(attention, "runs", blocks=blocks, head_dim=shape[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 4, 30])
def test_trees_beside_chains(window, form, dtype, device):
    scene, shares = Scene((2, 1, 16), dtype, device), (BRANCHED, VERIFY, share(0, 0, 3))
    attention = made(device, form, blocks=3)
    close(scene.attend(attention, *shares, window=window), scene.reference(*shares, window=window))
    assert not attention.counters.any()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))])
def test_any_batch(seed, device):
    random = Random(seed)
    scene = Scene((2, 1, 8), torch.float32, device)
    shares = [
        share(lane, random.randint(0, 60), random.randint(1, 6), *chain(random.randint(0, 5)))
        for lane in range(random.randint(1, 3))
    ]
    window, attention = random.choice([0, 9, 33]), made(device, random.choice(FORMS), blocks=random.randint(1, 4))
    close(scene.attend(attention, *shares, window=window), scene.reference(*shares, window=window))


@pytest.mark.parametrize("window", [0, 21])
def test_a_row_is_the_same_whoever_rides_along_and_whoever_computes_it(window, dtype, device):
    scene, shares = Scene((4, 2, 16), dtype, device), (VERIFY, PREFILL, DECODE)
    together = scene.attend(made(device), *shares, window=window)
    for form in ("runs", "solo"):
        assert torch.equal(scene.attend(made(device, form, blocks=6), *shares, window=window), together)
    first = 0
    for part in shares:
        alone = scene.attend(made(device, "solo"), part, window=window)
        assert torch.equal(alone, together[first : first + part.rows])
        first += part.rows


def test_a_verified_row_is_a_decoded_row_bit_by_bit(dtype, device):
    scene, attention = Scene((4, 2, 16), dtype, device), made(device)
    verified = scene.attend(attention, VERIFY)
    for row in range(VERIFY.rows):
        assert torch.equal(scene.attend(attention, share(2, 45 + row, 1))[0], verified[row])


@pytest.mark.parametrize("window", [0, 5])
def test_a_path_of_a_tree_is_a_chain_bit_by_bit(window, dtype, device):
    """Position 45, then a tree whose third node follows the first; without the second node it is a chain."""
    scene, attention = Scene((2, 1, 16), dtype, device), made(device)
    tree = scene.attend(attention, share(2, 45, 1, -1, -1, 0), window=window)
    slots = scene.batch(share(2, 45, 4)).slots
    scene.kv.move(slots[3:].tolist(), slots[2:3].tolist())
    batch = scene.batch(share(2, 45, 1, *chain(2)))
    queries = scene.queries[2, [45, 46, 48]]  # the nodes of the path
    path = run(attention, scene.kv, batch, queries, torch.empty_like(queries), window=window)
    assert torch.equal(path, tree[[0, 1, 3]])


BRANCHINGS = [(-1,) * 8, (-1, -1, 1, 0, 2, 4, 5, 3), (-1, 0, 1, 2, 3, 4, 5, 5), (-1, 0, 0, 1, 1, 2)]
PLACES = [27, 31, 45, 62]
PLANTED = list(product(BRANCHINGS, PLACES))
if not ON_GPU:  # each shape at two places, each place with two shapes
    PLANTED = [(shape, PLACES[(at + by) % 4]) for at, shape in enumerate(BRANCHINGS) for by in (0, 1)]


@pytest.mark.unwatched
@pytest.mark.parametrize(("shape", "start"), PLANTED)
def test_every_path_of_a_tree_is_a_chain_bit_by_bit(shape, start, dtype, device):
    """Many leaves, and long paths across the end of a tile or split."""
    scene, attention, works = Scene((2, 1, 16), dtype, device), made(device), (share(2, start, 1, *shape), DECODE)
    batch, queries = scene.batch(*works), scene.rows(*works)
    tails, leads = by_leaves(batch, *works)
    options = {"leads": leads, "block_m": 32}
    tree = run(attention, scene.kv, replace(batch, tails=tails), queries, torch.empty_like(queries), **options)
    slots, saved = batch.slots.tolist(), (scene.kv.keys.clone(), scene.kv.values.clone())
    for leaf in {*range(len(shape))} - {*shape}:
        path = [leaf]
        while shape[path[0]] >= 0:
            path.insert(0, shape[path[0]])
        scene.kv.move([slots[1 + node] for node in path], slots[1 : 1 + len(path)])
        rows = [0, *(1 + node for node in path)]
        asked = queries[rows].contiguous()
        chained = scene.batch(share(2, start, 1, *chain(len(path))))
        assert torch.equal(run(attention, scene.kv, chained, asked, torch.empty_like(asked)), tree[rows])
        scene.kv.keys.copy_(saved[0]), scene.kv.values.copy_(saved[1])


def by_leaves(batch: Batch, *shares: Share) -> tuple[Tensor, Tensor]:
    """Tails of leaves alone, and the tail that each row reads."""
    assert batch.tails is not None
    tails, leads, first = torch.zeros_like(batch.tails), list(range(len(batch.tokens))), 0
    for one in shares:
        start, parents = first + one.count, one.draft.parents
        leaves = [node for node in range(len(parents)) if node not in parents]
        for order, leaf in reversed([*enumerate(leaves)]):
            tails[first + order] = batch.tails[start + leaf]
            while leaf >= 0:
                leads[start + leaf] = first + order
                leaf = parents[leaf]
            leads[first:start] = [first] * one.count
        first += one.rows
    return tails, torch.tensor(leads, dtype=torch.int32, device=tails.device)


@pytest.mark.unwatched
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 5])
def test_rows_of_a_path_share_a_tail_bit_by_bit(window, form, dtype, device):
    scene, works = Scene((4, 2, 16), dtype, device), (VERIFY, BRANCHED, share(0, 17, 1, *TREE), share(4, 3, 1, -1, -1))
    batch, queries = scene.batch(*works), scene.rows(*works)
    tails, leads = by_leaves(batch, *works)
    assert len({*leads[VERIFY.rows :][: BRANCHED.rows].tolist()}) == 3
    apart, shared = (
        run(made(device, form, blocks=8), scene.kv, each, queries, torch.empty_like(queries), window=window, **options)
        for each, options in ((batch, {}), (replace(batch, tails=tails), {"leads": leads}))
    )
    assert torch.equal(apart, shared)


@pytest.mark.parametrize("form", FORMS)
def test_a_node_of_a_tree_is_blind_to_its_siblings_even_if_they_are_huge(form, dtype, device):
    scene, attention = Scene((2, 1, 16), dtype, device), made(device, form, blocks=1)
    before = scene.attend(attention, BRANCHED)
    huge = torch.full((1, 1, 16), 3e38, device=device)
    scene.kv.store(LAYER, scene.batch(BRANCHED).slots[2:3], torch.zeros_like(huge), huge)  # node 1
    after = scene.attend(attention, BRANCHED)
    others = [row for row in range(BRANCHED.rows) if row != 2]
    assert torch.equal(before[others], after[others])
    assert (after[2] > 1e30).all()


def test_the_shape_of_a_block_leaves_no_trace(dtype, device):
    scene, attention = Scene((4, 2, 16), dtype, device), made(device)
    small = scene.attend(attention, *MIXED, block_m=16)
    assert torch.equal(scene.attend(attention, *MIXED, block_m=32), small)


@pytest.mark.parametrize("block_m", [64, 128])
def test_large_blocks(block_m, dtype, device):
    scene = Scene((4, 2, 16), dtype, device)
    close(scene.attend(made(device, "solo"), *MIXED, block_m=block_m), scene.reference(*MIXED))


def test_what_a_sequence_does_not_have_is_never_seen(dtype, device):
    """A sequence reads no slots past its end, no pages past its last (their entries are arbitrary), no other layers."""
    scene, attention = Scene((2, 1, 16), dtype, device), made(device)
    wanted = scene.attend(attention, VERIFY, SHORT)
    batch = scene.batch(VERIFY, SHORT)
    batch.page_table[0, 4:] = 1 << 27
    batch.page_table[1, 1:] = -1
    seen = [batch.page_table[0, p // PAGE_SIZE].item() * PAGE_SIZE + p % PAGE_SIZE for p in range(45 + VERIFY.rows)]
    seen.append(batch.page_table[1, 0].item() * PAGE_SIZE)
    others = torch.tensor([slot for slot in range(PAGES * PAGE_SIZE) if slot not in seen], device=device)
    nothing = torch.full((len(others), 1, 16), float("nan"), device=device)
    scene.kv.store(LAYER, others, nothing, nothing)
    scene.kv.keys[0], scene.kv.values[0] = float("nan"), float("nan")
    queries = scene.rows(VERIFY, SHORT)
    assert torch.equal(run(attention, scene.kv, batch, queries, torch.empty_like(queries)), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_padding(form, dtype, device):
    """A seat without rows, a seat on the scratch page, a row before all positions, and rows of no seat."""
    scene = Scene((2, 1, 16), dtype, device)
    batch = scene.batch(DECODE)
    scratch = torch.full_like(batch.page_table, scene.kv.scratch_page)
    batch = replace(
        batch,
        row_starts=torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=device),
        positions=torch.tensor([89, 0, -1, 55], dtype=torch.int32, device=device),
        page_table=torch.cat([batch.page_table, scratch, scratch, scratch]),
        bases=batch.bases.expand(4).contiguous(),
    )
    queries = scene.rows(DECODE).expand(4, -1, -1).contiguous()
    attention = made(device, form, blocks=4)
    out = run(attention, scene.kv, batch, queries, torch.full_like(queries, 5.0))
    check_form(attention, form, blocks=4)
    close(out[:1], scene.reference(DECODE))
    assert not out[1:3].any(), "the scratch page holds zeros"
    assert (out[3] == 5.0).all(), "written, though of no seat"


def test_pages_are_found_through_lanes(dtype, device):
    scene, attention = Scene((2, 1, 16), dtype, device), made(device)
    wanted = scene.attend(attention, VERIFY, SHORT)
    lanes = torch.tensor([VERIFY.lane, SHORT.lane], dtype=torch.int32, device=device)
    batch = replace(scene.batch(VERIFY, SHORT), page_table=scene.lanes.pages.to(device))
    queries = scene.rows(VERIFY, SHORT)
    got = run(attention, scene.kv, batch, queries, torch.empty_like(queries), lanes=lanes)
    assert torch.equal(got, wanted)


def test_memory_in_float8(device):
    scene = Scene((4, 2, 16), FP8, device)
    close(scene.attend(made(device), *MIXED), scene.reference(*MIXED))


NARROW, WINDOWED, WIDE = ((4, 2, 16), 0), ((6, 2, 24), 8), ((8, 1, 64), 0)  # and the window
ROTATED = list(product([NARROW, WINDOWED, WIDE], FORMS, [False, True]))
if not ON_GPU:  # each shape, form and kind of memory somewhere
    ROTATED = [(NARROW, form, False) for form in FORMS] + [(WINDOWED, form, False) for form in FORMS[:2]]
    ROTATED.append((WIDE, "solo", True))


@pytest.mark.unwatched
@pytest.mark.parametrize(("sizes", "form", "fp8"), ROTATED, ids=str)
@pytest.mark.parametrize("branches", [chain(1), (-1,) * 3 + (1,)], ids=["chain", "tree"])
def test_rotation_in_passing_is_rotation_bit_by_bit(sizes, form, fp8, branches, dtype, device):
    """Rows that cross from one tile or split into the next, a single one, and a first token without a slot. A window
    of the single one begins in the third tile and the second split: programs count from there. With a tree, the rows of
    the first tile are not those of its slots."""
    (heads, kv_heads, head_dim), window = sizes
    single = share(1, 41 if window else 89, 1)
    works = (share(0, 14, 1, *branches), single, share(2, 30, 1, *chain(1)), SHORT)
    here, there = (Scene(sizes[0], FP8 if fp8 else dtype, device) for _ in range(2))
    batch, activations = here.batch(*works), here.queries.dtype
    batch.slots[-1] = -1  # stored nowhere
    generator = torch.Generator().manual_seed(3)
    rows, block_m = len(batch.tokens), 16 if len(branches) == 1 else 64
    packed = torch.randn((rows, heads + 2 * kv_heads, head_dim), generator=generator).to(device, activations)
    angles = torch.rand((95, head_dim // 2), generator=generator).to(device) * 6
    cos, sin = angles.cos(), angles.sin()
    queries = torch.empty((rows, heads, head_dim), device=device, dtype=activations)
    rotate(packed, queries, here.kv, LAYER, positions=batch.positions, slots=batch.slots, cos=cos, sin=sin, pdl=ON_GPU)
    options = {"window": window, "block_m": block_m, "pdl": ON_GPU}
    outs, rotation = torch.full((2, *queries.shape), torch.nan).to(queries), Rotation(batch.slots, cos, sin)
    apart = run(made(device, "solo"), here.kv, batch, queries, outs[0], **options)
    attention = made(device, form, blocks=4 * kv_heads)
    at_once = run(attention, there.kv, batch, packed, outs[1], rotation=rotation, **options)
    assert torch.equal(at_once, apart)
    if not window and block_m == 16:
        check_form(attention, form, blocks=4 * kv_heads, head_dim=head_dim)
    for one, other in ((here.kv.keys, there.kv.keys), (here.kv.values, there.kv.values)):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_the_projection_are_added_in_passing(parts, dtype, device):
    """Attention adds the parts in order and rounds their sum, as a product that adds them itself."""
    heads, kv_heads, head_dim = 4, 2, 32
    works = share(0, 14, 1, *chain(1)), share(1, 89, 1)
    here, there = (Scene((heads, kv_heads, head_dim), dtype, device) for _ in range(2))
    batch, generator = here.batch(*works), torch.Generator().manual_seed(4)
    sums = torch.randn((parts, 3, heads + 2 * kv_heads, head_dim), generator=generator).to(device)
    packed = torch.zeros_like(sums[0])
    for part in sums:
        packed += part
    cos, sin = torch.rand((2, 95, head_dim // 2), generator=generator).to(device).unbind()
    outs = torch.full((2, 3, heads, head_dim), torch.nan).to(device, dtype)
    for scene, queries, count, out in ((here, packed.to(dtype), 1, outs[0]), (there, sums, parts, outs[1])):
        rotation = Rotation(batch.slots, cos, sin, parts=count)
        run(made(device, "solo"), scene.kv, batch, queries, out, rotation=rotation, pdl=ON_GPU)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(here.kv.keys, there.kv.keys)
    assert torch.equal(here.kv.values, there.kv.values)


def test_scratch_memory_grows_but_is_never_freed(dtype, device):
    """A captured graph keeps the scratch memory that it was captured with."""
    scene, attention = Scene((2, 1, 16), dtype, device), made(device)
    scene.attend(attention, share(0, 40, 1))
    small = attention.partials
    scene.attend(attention, *MIXED)
    assert attention.partials.numel() > small.numel() > 0
    assert any(old is small for old in attention._outgrown)
    close(scene.attend(attention, share(0, 40, 1)), scene.reference(share(0, 40, 1)))


def test_many_narrow_blocks_have_two_warps():
    """Then all programs of 64 sequences of Llama-3.2-1B are on the device at once."""
    narrow, wide = Work(16, 64, 2), Work(16, 128, 2)
    assert division(512, 2, narrow) == (1, 2, 2)
    assert division(512, 2, wide) == (1, 4, 2)
    assert division(256, 2, narrow) == (1, 4, 2)
    assert division(512, 32, narrow) == (1, 8, 2)


def test_paths_have_programs_of_their_own_where_there_is_room():
    """A sequence of SmolLM2, sixteen of them, and sixteen of Llama-3.1-8B whose chains fill the device."""
    assert [paths_of(programs, 9) for programs in (9, 144, 256)] == [4, 2, 1]
    assert paths_of(9, 3) == 3, "there are no more paths than rows"


def test_tiles_and_splits_of_real_size(dtype, device):
    scene = Scene((4, 1, 64), dtype, device)
    shares = DECODE, share(2, 60, 1, *chain(4))
    close(scene.attend(Attention(device=device), *shares), scene.reference(*shares))
    assert (tile_for(64), tile_for(128), tile_for(256)) == (128, 128, 64)


def test_the_block_that_holds_the_rows():
    assert block_for(4, 1) == block_for(4, 4) == block_for(16, 1) == 16
    assert block_for(4, 5) == block_for(4, 500) == 32
    assert block_for(4, 500, most=64) == 64
