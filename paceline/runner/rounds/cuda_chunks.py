"""Prompts on a CUDA device: passes over chunks of committed tokens, launched one by one, outside of graphs.

A pass over a prompt takes longer than its launches, so a graph would gain nothing, and its shapes are too many.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.rounds import accept
from paceline.kernels.cuda.sample import draw
from paceline.kernels.cuda.states import hold
from paceline.kernels.states_reference import HeldStates
from paceline.runner.forwards.cuda import CudaForward, DeviceBatch, padded_rows
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.rounds.cuda_round import on_cuda
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, head_of, taps_of
from paceline.runner.rounds.upload import Upload


class ChunkReader:
    """Reads chunks of prompts with the target, and with a drafter that reads along."""

    def __init__(self, target: CudaForward, state: DeviceState, upload: Upload) -> None:
        self._target = target
        self._state = state
        self._upload = upload

    def __call__(
        self, chunks: Sequence[Chunk], drafter: DeviceDrafter | None, held: HeldStates | None, context: int
    ) -> Tensor | None:
        """Run passes over prompt chunks, and draw the first token after each prompt that ends here.

        A head then reads the hidden states; `held` holds the last one of each prompt, with which a draft begins."""
        along = [chunk for chunk in chunks if chunk.drafts]
        reading = [chunk for chunk in chunks if chunk.target]
        if along and drafter is not None and drafter.reader is not None:
            reader = on_cuda(drafter.reader)
            reader.decoder.fill(self._rows(along, [], context), reader.kv)
        if not reading:
            return None
        ends = itertools.accumulate(chunk.count for chunk in reading)
        outs = [end - 1 for chunk, end in zip(reading, ends, strict=True) if chunk.draws]
        rows = self._rows(reading, outs, context)
        taps = () if drafter is None else taps_of(drafter)
        kept = self._memory(len(rows.tokens), held)
        if not outs:
            self._target.decoder.fill(rows, self._target.kv, taps=taps, kept=kept)
            self._show(reading, drafter, kept, context)
            return None
        lanes = self._upload.ints([chunk.lane for chunk in reading if chunk.draws])
        targets = torch.empty_like(lanes)
        pdl = self._target.decoder.pdl
        logits = self._target.decoder.logits(rows, self._target.kv, taps=taps, kept=kept)
        draw(logits, self._state, lanes=lanes, out=targets, pdl=pdl)
        out = torch.zeros((len(lanes), 4), dtype=torch.int32, device=lanes.device)
        accept(self._state, seats=lanes, targets=targets, out=out, roots=self._upload.ints(range(len(lanes))), pdl=pdl)
        if held is not None and kept is not None:
            starts = self._upload.ints(outs)
            hold(held, self._state, seats=lanes, starts=starts, outcomes=out, features=kept, pdl=pdl)
        self._show(reading, drafter, kept, context)
        memory = torch.empty(out.shape, dtype=torch.int32, pin_memory=out.is_cuda)
        return memory.copy_(out, non_blocking=True)  # valid once the step is done

    def _memory(self, rows: int, held: HeldStates | None) -> Tensor | None:
        """Allocate memory for the hidden states that a drafter reads."""
        if held is None:
            return None
        return torch.empty((rows, held.width), dtype=held.states.dtype, device=held.states.device)

    def _show(self, chunks: Sequence[Chunk], drafter: DeviceDrafter | None, kept: Tensor | None, context: int) -> None:
        """Let a head read the hidden states of chunks. A row needs the next token, which is drawn by now."""
        head = None if drafter is None else head_of(drafter)
        along = [chunk for chunk in chunks if chunk.drafts]
        if head is None or kept is None or not along:
            return
        assert isinstance(head, CudaHead), f"rounds on a CUDA device run CudaHeads, not a {type(head).__name__}"
        rows = self._rows(along, [], context, ahead=1)
        if len(along) < len(chunks):
            wanted = np.flatnonzero(np.repeat([chunk.drafts for chunk in chunks], [chunk.count for chunk in chunks]))
            kept = kept[self._upload(np.pad(wanted, (0, len(rows.tokens) - len(wanted))))]
        head.read(rows, kept)

    def _rows(self, chunks: Sequence[Chunk], outs: Sequence[int], context: int, *, ahead: int = 0) -> DeviceBatch:
        state, counts = self._state, [chunk.count for chunk in chunks]
        lanes = self._upload.ints([chunk.lane for chunk in chunks])
        padding = padded_rows(sum(counts)) - sum(counts)
        places = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        owners = self._upload(np.repeat([*(chunk.lane for chunk in chunks), state.dummy], [*counts, padding]))
        positions = self._upload(np.concatenate([*places, np.zeros(padding, dtype=np.int64)]))
        return DeviceBatch(
            tokens=state.tokens[owners, positions + ahead],
            positions=positions.int(),
            slots=state.pages[owners, positions // PAGE_SIZE] * PAGE_SIZE + (positions % PAGE_SIZE).int(),
            row_starts=self._upload.ints([0, *itertools.accumulate(counts)]),
            page_table=state.pages,
            lanes=lanes,
            seats=len(chunks),
            max_rows=max(counts),
            max_context=context,
            logit_rows=self._upload(np.array(outs, dtype=np.int64)),
        )
