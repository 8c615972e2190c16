"""Prompts on a CUDA device: passes over chunks of committed tokens, launched one by one, outside of graphs.

A pass over a prompt takes longer than its launches, so a graph would gain nothing, and its shapes are too many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.edit import count, edit, raw_rows
from paceline.kernels.cuda.rounds import accept
from paceline.kernels.cuda.sample import draw
from paceline.kernels.edit_reference import RowMasks
from paceline.kernels.states_reference import HeldStates
from paceline.runner.forwards.cuda import CudaForward
from paceline.runner.forwards.device_batch import DeviceBatch, Ends, padded_rows
from paceline.runner.rounds.cuda_draft import on_cuda
from paceline.runner.rounds.cuda_states import PromptStates
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import NOTHING, Chunk, DeviceDrafter, Landed, read_all
from paceline.runner.rounds.scores import Report, Scorer, SeatScores, Verified
from paceline.runner.rounds.traits import taps_of
from paceline.runner.rounds.upload import Upload, download

SCORED_ROWS = 256  # rows of a prompt whose logits are in memory at once: 128 MiB for a vocabulary of 128,000


@dataclass(slots=True)
class ReadChunks:
    """Outcomes of chunks in the host's memory, valid once the step is done."""

    drawn: Tensor | None = None  # int32 [chunks that draw, 4]
    scores: SeatScores | None = None  # of drawn tokens
    prompts: dict[int, Report] = field(default_factory=dict)  # index of a chunk → scores of its tokens
    tokens: dict[int, Tensor] = field(default_factory=dict)  # index of a chunk → its scored tokens
    states: dict[int, Tensor] = field(default_factory=dict)  # index of a chunk → its hidden states after the last norm
    features: dict[int, Tensor] = field(default_factory=dict)  # index of a chunk → its hidden states at the taps

    def landed(self, chunks: Sequence[Chunk]) -> list[Landed | None]:
        """Return the outcome of each chunk; None: only keys and values were wanted."""
        drawn = [] if self.drawn is None else read_all(self.drawn.tolist())
        if self.scores is not None:
            self.scores.attach(drawn)
        left = iter(drawn)
        return [self._landed(i, chunk, left) for i, chunk in enumerate(chunks)]

    def _landed(self, index: int, chunk: Chunk, drawn: Iterator[Landed]) -> Landed | None:
        landed = next(drawn) if chunk.draws else None
        if not chunk.scored and not chunk.states and not chunk.tapped:
            return landed
        scores = self.prompts[index].read(0, self.tokens[index].tolist(), chunk.top) if chunk.scored else ()
        features = self.features[index].float() if chunk.tapped else None
        return (landed or NOTHING)._replace(prompt_scores=scores, states=self.states.get(index), features=features)


NOTHING_READ = ReadChunks()  # of a step without chunks


class ChunkReader:
    """Reads chunks of prompts with the target, and with a drafter that reads along."""

    def __init__(self, target: CudaForward, state: DeviceState, upload: Upload, scorer: Scorer) -> None:
        self._target = target
        self._state = state
        self._upload = upload
        self._scorer = scorer
        self._last = target.decoder.config.num_layers  # tap after the last layer

    def __call__(
        self,
        chunks: Sequence[Chunk],
        drafter: DeviceDrafter | None,
        held: HeldStates | None,
        context: int,
        *,
        edits: bool,
        masks: RowMasks | None = None,
    ) -> ReadChunks:
        """Run passes over prompt chunks, draw the first token after each prompt that ends here, and score prompts.

        `held`: hidden states of a drafter with taps. `edits`: a lane of the chunks edits logits.
        `masks`: of the rows that are drawn."""
        along = [chunk for chunk in chunks if chunk.drafts]
        reading = {i: chunk for i, chunk in enumerate(chunks) if chunk.target}
        read = ReadChunks()
        if along and drafter is not None and drafter.reader is not None:
            reader = on_cuda(drafter.reader)
            reader.decoder.fill(self._rows(along, context), reader.kv)
        states = None if drafter is None or held is None else PromptStates(drafter, held, self._state, self._upload)
        if states is not None:
            states.catch_up([chunk.lane for chunk in along if not chunk.target], context)
        if reading:
            rows = self._rows([*reading.values()], context)
            own = () if drafter is None or states is None else taps_of(drafter)
            taps = (*own, *(self._target.taps if any(chunk.tapped for chunk in reading.values()) else ()))
            kept = self._target.decoder.memory_for(taps, len(rows.tokens))
            late = max(taps, default=0) >= self._last  # then states of all rows are wanted
            wanted = {i: chunk.count if late else _wanted(chunk) for i, chunk in reading.items()}
            ends = self._ends([*reading.values()], [*wanted.values()])
            hidden = self._target.decoder.hidden(rows, self._target.kv, taps=taps, kept=kept, ends=ends)
            self._draw(reading, wanted, hidden, read, masks, edits=edits)
            self._keep(reading, wanted, hidden, kept, read)
            if states is not None:
                states.hold([*reading.values()], kept)
                states.show([*reading.values()], kept, partial(self._rows, context=context, ahead=1))
        return read

    def _draw(
        self,
        chunks: dict[int, Chunk],
        wanted: dict[int, int],
        hidden: Tensor,
        read: ReadChunks,
        masks: RowMasks | None,
        *,
        edits: bool,
    ) -> None:
        """Draw the next token of each chunk that ends its sequence. `hidden` has the last `wanted` rows of each."""
        ends = itertools.accumulate(wanted.values())
        outs = [end - 1 for chunk, end in zip(chunks.values(), ends, strict=True) if chunk.draws]
        if not outs:
            return
        drawing = [chunk.lane for chunk in chunks.values() if chunk.draws]
        lanes, roots = self._upload.ints(drawing), self._upload.ints(range(len(drawing)))
        targets, pdl, state = torch.empty_like(lanes), self._target.decoder.pdl, self._state
        logits = self._project(hidden[self._upload(np.array(outs))])
        raw = raw_rows(len(logits), logits.shape[1], state.device) if edits else None
        if edits:
            edit(logits, state, lanes=lanes, raw=raw, masks=masks, pdl=pdl)
        draw(logits, state, lanes=lanes, out=targets, pdl=pdl)
        out = torch.zeros((len(lanes), 4), dtype=torch.int32, device=lanes.device)
        accept(state, seats=lanes, targets=targets, out=out, roots=roots, pdl=pdl)
        if edits:
            count(state, seats=lanes, outcomes=out, pdl=pdl)
        read.scores = self._scorer.score_seats(drawing, Verified(logits, out, lanes, roots, lanes, raw))
        read.drawn = download(out)

    def _keep(
        self, chunks: dict[int, Chunk], wanted: dict[int, int], hidden: Tensor, kept: Tensor, read: ReadChunks
    ) -> None:
        """Score the prompts of chunks that ask for it, and copy hidden states to the host: of those that are pooled
        after the last norm, of tapped ones the last columns of `kept`. `hidden` has the last `wanted` rows of each."""
        begun, first, width = 0, 0, len(self._target.taps) * hidden.shape[1]
        for index, chunk in chunks.items():
            if chunk.scored:
                tokens = self._state.tokens[
                    chunk.lane, chunk.start + 1 : chunk.start + 1 + chunk.scored
                ].clone()  # aligned
                read.prompts[index] = Report(download(self._score(hidden[first:], tokens, chunk.top)))
                read.tokens[index] = download(tokens)
            if chunk.states:
                end = first + wanted[index]
                read.states[index] = download(hidden[end - chunk.states : end])
            if chunk.tapped:
                rows = kept[begun : begun + chunk.count]
                read.features[index] = download(rows[:, rows.shape[1] - width :].contiguous())
            begun, first = begun + chunk.count, first + wanted[index]

    def _score(self, hidden: Tensor, tokens: Tensor, top: int) -> Tensor:
        """Score tokens by the hidden states before them, some rows at a time."""
        parts = zip(torch.split(hidden[: len(tokens)], SCORED_ROWS), torch.split(tokens, SCORED_ROWS), strict=True)
        return torch.cat([self._scorer.score_rows(self._project(states), some, top) for states, some in parts])

    def _project(self, hidden: Tensor) -> Tensor:
        """Compute logits of rows, in a product of a known size."""
        count = len(hidden)
        return self._target.decoder.project(functional.pad(hidden, (0, 0, 0, padded_rows(count) - count)))[:count]

    def _ends(self, chunks: Sequence[Chunk], wanted: Sequence[int]) -> Ends | None:
        """Lay out the last `wanted` rows of each chunk; None: all rows are wanted."""
        past = [*itertools.accumulate(chunk.count for chunk in chunks)]
        if sum(wanted) == past[-1]:
            return None
        ending = [(chunk.lane, end, count) for chunk, end, count in zip(chunks, past, wanted, strict=True) if count]
        padding = np.zeros(padded_rows(sum(wanted)) - sum(wanted), dtype=np.int64)
        index, row_starts, lanes = self._upload.together(
            np.concatenate([*(np.arange(end - count, end) for _, end, count in ending), padding]),
            np.array([0, *itertools.accumulate(count for _, _, count in ending)], dtype=np.int32),
            np.array([lane for lane, _, _ in ending], dtype=np.int32),
        )
        return Ends(index, row_starts, lanes, seats=len(ending), max_rows=max(wanted))

    def _rows(self, chunks: Sequence[Chunk], context: int, *, ahead: int = 0) -> DeviceBatch:
        """Lay out the rows of chunks. `ahead`: each with the token that many positions later."""
        state, counts, seats = self._state, [chunk.count for chunk in chunks], [chunk.lane for chunk in chunks]
        padding = padded_rows(sum(counts)) - sum(counts)
        places = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        owners = np.repeat([*seats, state.dummy], [*counts, padding])
        place = np.concatenate([*places, np.zeros(padding, dtype=np.int64)])
        token, page, inside, positions, row_starts, lanes = self._upload.together(
            owners * state.tokens.shape[1] + place + ahead,
            owners * state.pages.shape[1] + place // PAGE_SIZE,
            (place % PAGE_SIZE).astype(np.int32),
            place.astype(np.int32),
            np.array([0, *itertools.accumulate(counts)], dtype=np.int32),
            np.array(seats, dtype=np.int32),
        )
        return DeviceBatch(
            tokens=state.tokens.view(-1)[token],
            positions=positions,
            slots=inside.add(state.pages.view(-1)[page], alpha=PAGE_SIZE),
            row_starts=row_starts,
            page_table=state.pages,
            lanes=lanes,
            seats=len(chunks),
            max_rows=max(counts),
            max_context=context,
        )


def _wanted(chunk: Chunk) -> int:
    """Count the last rows of a chunk whose states after the last layer anybody reads."""
    return chunk.count if chunk.scored else max(chunk.states, int(chunk.draws))
