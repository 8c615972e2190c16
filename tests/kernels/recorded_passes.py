"""Passes of small random models that use every function, operation and format of the C kernels, to be recorded."""

from __future__ import annotations

import random
from ctypes import addressof, c_float
from dataclasses import replace

import numpy as np
import torch

from paceline.kernels.cpu.abi import Format, Stored
from paceline.kernels.cpu.build import Library, load_library
from paceline.kernels.cpu.pack import Layout, Pack, Rows
from paceline.llm import LLM
from paceline.models.heads import EagleHead
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.share import Share
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.medusa import CompiledMedusa
from paceline.runner.heads.protocol import TreeRequest
from paceline.runner.heads.trees import OF_MODEL, TreeProgram
from paceline.sampling.sampler import Stream, noise_keys
from paceline.types import SamplingParams
from tests.heads import random_medusa
from tests.kernels import test_cpu_pack
from tests.kernels.recording import Recording
from tests.kernels.test_cpu_trees import WIDTH, planted, random_tree, text_and_pages
from tests.kernels.tiny_forward import CONFIGS, compiled, ints, rows_of
from tests.runner.heads.test_compiled_block import NETWORKS, anchors, drafted, make, network
from tests.runner.heads.test_prefetch import Pair, drafts_of, large, small
from tests.runner.heads.test_torch import CONFIG, FEATURES, FIRST, HEADS, drawing
from tests.runner.heads.test_torch import compiled as compiled_target

DECODERS = [("everything", "mixed"), ("plain", "int4"), ("many-heads", "group8")]
# The sums of a rank that is alone, in three shards and two.
SHARDS = Share(vocab_size=90, first_token=0, inputs={"o": (32, 64, 32), "down": (32, 64)}, segment=None)
SIZES = (3, 2, 1, 5, 4, 6, 7, 8, 100, 9, 16, 1)  # rows of passes over one text: two chunks of keys
FILTERS = ({}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.05})


def record_small_models() -> Recording:
    recording = Recording(load_library())
    with recording.recorded():
        for config, format in DECODERS:
            decode(compiled(CONFIGS[config], format, num_pages=2 * WIDTH, threads=2))
        decode(compiled(CONFIGS["plain"], "int4", num_pages=2 * WIDTH, threads=2, share=SHARDS))
        draft_with_a_model(compiled_target())
        normed = HEADS["norms of features, output, q and k"].in_format("int8")
        draft_greedily_and_with_noise(CompiledHead(normed, compiled_target(), num_pages=12, max_context=48))
        for head in (small(), large()):
            draft_greedily_and_with_noise(CompiledHead(head, compiled_target(), num_pages=12, max_context=48))
            for inverse_temperature in (0.0, 1.0):
                verify_and_draft(head, inverse_temperature)
        guess()
        pack_every_type()
        make_noise(load_library())
        draft_a_block()
    return recording


def draft_a_block() -> None:
    """Draft with convolutions, which no other network has."""
    head = network(**NETWORKS["DFlash2"])
    drafted(make(head), anchors(head))


def record_smollm2() -> Recording:
    """A few steps of the embedded model with its shipped head, greedy and with noise; no packing of its weights."""
    recording = Recording(load_library())
    with recording.recorded(without=["paceline_pack_stored"]):
        llm = LLM("smollm2", device="cpu", threads=2, max_context=256, max_sequences=1, measure_cost=False)
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(max_tokens=6, seed=1, temperature=temperature)
            llm.generate("The capital of France is", sampling)
    return recording


def decode(forward: CompiledForward) -> None:
    """Read two texts in passes of many sizes, then a tree of drafts in each; move and read KV slots."""
    source = random.Random(0)
    texts = [text_and_pages(source, sequence, sum(SIZES)) for sequence in range(2)]
    start = 0
    for size in SIZES:
        forward(rows_of(*((tokens, start, start + size, pages) for tokens, pages in texts)))
        start += size
    for deep in (0.9, 0.3):
        works = [random_tree(source, *text, base, 9, deep) for text, base in zip(texts, (150, 129), strict=True)]
        forward(replace(planted(works), states=True))
    chosen = ints(range(0, 32 * WIDTH, 3))
    forward.kv.move(chosen[:20].tolist(), chosen[7:27].tolist())
    forward.kv.read(chosen)
    forward.embed(ints([0, 5, 89]))


def draft_greedily_and_with_noise(head: CompiledHead) -> None:
    """Draft chains and trees with every filter, from hidden states and from the head's own output."""
    for seed, filters in enumerate(FILTERS):
        batch = drawing([seed, seed + 1, 7], 0.0, 0.8, 1.2)
        head.draft(batch, FEATURES, [TreeRequest(6, 0.0, 0.0, **filters)] * 3, width=1 + 2 * (seed % 2))
    logits = head(FIRST, features=FEATURES).logits
    head(replace(FIRST, tokens=FIRST.tokens.flip(0)), carry=range(len(FIRST.tokens)))
    keys = torch.from_numpy(noise_keys(3, np.arange(3), Stream.TOKEN))
    head.pick(logits, torch.tensor([0.0, 0.7, 1.3]), keys)


def draft_with_a_model(forward: CompiledForward) -> None:
    """Draft chains and trees of a decoder, greedy and with noise."""
    drafter = TreeProgram(forward.program, ints(range(CONFIG.vocab_size)), OF_MODEL)
    for width in (1, 3):
        drafter.draft(drawing([1, 2, 7], 0.0, 0.8, 1.2), None, [TreeRequest(6, 0.0, 0.0)] * 3, width=width)


def verify_and_draft(head: EagleHead, inverse_temperature: float) -> None:
    """Verify drafts, draw tokens, and draft again from a pass that was prefetched."""
    pair = Pair.of(head, sequences=3, inverse_temperature=inverse_temperature)
    for _ in range(2):
        pair.draft(*pair.verify(drafts_of(pair)))


def guess() -> None:
    """Run Medusa heads."""
    heads = [head.in_format("int8") for head in random_medusa(CONFIG, heads=2, layers=2)]
    CompiledMedusa(heads, threads=2)(FEATURES[:, : CONFIG.hidden_size])


def pack_every_type() -> None:
    """Pack each stored type in each format, with the file's integers and with new ones."""
    torch.manual_seed(0)
    for kind in Stored:
        for format in (Format.CHANNEL8, Format.GROUP8, Format.GROUP4):
            layout = Layout(load_library())
            layout.tiles(("w", format, test_cpu_pack.OUTPUTS, test_cpu_pack.INPUTS))
            Pack(layout, threads=2).write_rows("w", Rows(kind, test_cpu_pack.rows_of(kind)))


def make_noise(library: Library) -> None:
    out = (c_float * 1000)()
    library.paceline_gumbel(17, 4, 1000, addressof(out))
