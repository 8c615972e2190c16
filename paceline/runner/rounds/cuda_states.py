"""Hidden states of prompts on a CUDA device: kept from the target's pass over chunks, read by a head, and held."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.cuda.states import hold, take
from paceline.kernels.states_reference import HeldStates, Taken
from paceline.runner.forwards.device_batch import DeviceBatch, padded_rows
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.heads.cuda_block import CudaBlock
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter
from paceline.runner.rounds.traits import head_of
from paceline.runner.rounds.upload import Upload


class PromptStates:
    """The hidden states of one step's chunks, for the drafter of its launch."""

    def __init__(self, drafter: DeviceDrafter, held: HeldStates, state: DeviceState, upload: Upload) -> None:
        self._drafter = drafter
        self._held = held
        self._state = state
        self._upload = upload

    def hold(self, chunks: Sequence[Chunk], kept: Tensor) -> None:
        """Hold the state of the last row of each prompt that ends here: a draft begins with it.

        `kept` [rows, …]: the states of the pass over the chunks, those of the drafter first."""
        ends = itertools.accumulate(chunk.count for chunk in chunks)
        last = [(chunk.lane, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.draws]
        if last:
            lanes, starts = (self._upload.ints(each) for each in zip(*last, strict=True))
            nothing = torch.zeros((len(last), 4), dtype=torch.int32, device=lanes.device)  # drafted or accepted
            hold(self._held, self._state, seats=lanes, starts=starts, outcomes=nothing, features=kept)

    def show(self, chunks: Sequence[Chunk], kept: Tensor, rows_of: Callable[[Sequence[Chunk]], DeviceBatch]) -> None:
        """Let a head read the states of chunks. A row needs the next token, which is drawn by now."""
        along = [chunk for chunk in chunks if chunk.drafts]
        if head_of(self._drafter) is None or not along:
            return
        rows, kept = rows_of(along), kept[:, : self._held.width].contiguous()
        if len(along) < len(chunks):
            wanted = np.flatnonzero(np.repeat([chunk.drafts for chunk in chunks], [chunk.count for chunk in chunks]))
            kept = kept[self._upload(np.pad(wanted, (0, len(rows.tokens) - len(wanted))))]
        self._head().read(rows, kept)

    def catch_up(self, lanes: Sequence[int], context: int) -> None:
        """Let a head read all held states of lanes but the last, which a draft begins with."""
        if not lanes:
            return
        state, held, head, seats = self._state, self._held, self._head(), self._upload.ints(lanes)
        rows = padded_rows(len(lanes) * held.capacity)
        features = held.states.new_empty((rows, held.width))
        taken = Taken.empty(seats=len(lanes), rows=rows, turns=0, features=features, device=state.device)
        take(held, state, seats=seats, limits=torch.ones_like(seats), most=held.capacity, into=taken, pdl=head.pdl)
        batch = DeviceBatch(
            tokens=taken.tokens,
            positions=taken.positions,
            slots=taken.slots,
            row_starts=taken.row_starts,
            page_table=state.pages,
            lanes=seats,
            seats=len(lanes),
            max_rows=held.capacity,
            max_context=context,
        )
        head.read(batch, taken.features)
        held.counts[seats.long()] = held.counts[seats.long()].clamp(max=1)

    def _head(self) -> CudaHead | CudaBlock:
        head = head_of(self._drafter)
        if not isinstance(head, CudaHead | CudaBlock):
            raise TypeError(f"rounds on a CUDA device run CudaHeads and CudaBlocks, not {type(head).__name__}")
        return head
