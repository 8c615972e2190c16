"""The sketch of a draft model's output layer, fitted when its weights are packed (docs/adr/0013).

The model reads the beginnings of some prompts of this package, and the directions of the sketch are those in which its
last hidden states lie. Which prompts hardly matters: fitted to 600 tokens of MT-bench, the sketch misses the best
output of 0.4 % of the rows of HumanEval; not fitted at all, of 8 % (docs/experiments.md, "A shortlist for a draft
model").
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.cpu.pack import Pack, Packed
from paceline.kernels.cpu.pool import default_threads
from paceline.models.config import ModelConfig
from paceline.prompts.files import read_prompts
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.decoder_pack import output_layer
from paceline.runner.heads.sketch import BLOCK_ROWS, directions, write_sketch
from paceline.runner.loading.stages import stage
from paceline.text.tokenizer import Tokenizer

SOURCES = {"spec_bench": 12, "code_edit": 4}  # sets of prompts → prompts that are read
PROMPT_TOKENS = 64  # tokens of a prompt that are read


def fill_shortlist(pack: Pack, config: ModelConfig, tokenizer: Tokenizer, *, threads: int | None) -> None:
    """Write the sketch of a model whose other weights are in the pack."""
    pages = -(-PROMPT_TOKENS // PAGE_SIZE)
    forward = CompiledForward(config, pack, num_pages=pages, threads=threads or default_threads())
    with stage("find the directions of a shortlist"):
        norm = pack.vector("norm")
        states = torch.cat([_last_states(forward, tokens) for tokens in beginnings(tokenizer, forward.vocab_size)])
        rows = torch.where(norm == 0, 0.0, states / norm)  # as they enter the last norm, with root mean square 1
        weight = _rows(forward, pack.matrix(output_layer(pack.layout.items)))
        write_sketch(pack, weight, norm, directions(weight, norm, rows.T @ rows / len(rows)))


def beginnings(tokenizer: Tokenizer, vocab_size: int, *, sources: Mapping[str, int] = SOURCES) -> list[Tensor]:
    """Return the beginnings of prompts, int32 [tokens] each, so many of each set."""
    prompts = [prompt for name, count in sources.items() for prompt in read_prompts(name, count=count)]
    texts = [tokenizer.encode(prompt.messages[-1]["content"]) for prompt in prompts]
    tokens = [torch.tensor(text[:PROMPT_TOKENS], dtype=torch.int32) for text in texts]
    return [each.clamp(max=vocab_size - 1) for each in tokens]


def _last_states(forward: CompiledForward, tokens: Tensor) -> Tensor:
    """Return the hidden states after the last norm, [tokens, hidden]."""
    positions, nothing = torch.arange(len(tokens), dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    table = torch.arange(forward.kv.num_pages, dtype=torch.int32)[None]
    batch = Batch(tokens, positions, positions, ends, ends[1:], table, logit_rows=nothing, states=True)
    states = forward(batch).states
    assert states is not None, "states were asked for"
    return states


def _rows(forward: CompiledForward, matrix: Packed) -> Tensor:
    """Unpack a matrix, in half precision: it is one of the largest."""
    whole = torch.empty((matrix.outputs, matrix.inputs), dtype=torch.float16)
    for start in range(0, matrix.outputs, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, matrix.outputs)
        whole[start:stop] = forward.program.rows_of(matrix, torch.arange(start, stop, dtype=torch.int32))
    return whole
