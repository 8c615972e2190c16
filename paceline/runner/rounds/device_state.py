"""The tables of the running sequences on a device: one lane for each, with all that a round needs.

    tokens   [lanes + 1, width]   committed tokens, then the draft being verified
    lengths  [lanes + 1]          number of committed tokens
    pages    [lanes + 1, pages]   page table
    held     [drafters, 2, lanes + 1]   which hidden states are held, see kernels/states_reference.py
    parents  [lanes + 1, nodes]   the node that each node of a drafted tree follows, see Draft; rounds alone write it
    predicted [lanes + 1, width]  text that the request predicts, if a drafter reads it, with `predicted_lengths`
    drift    [lanes + 1]          expected place in the prediction - position: see kernels/lookup_reference.py

The host writes a lane when a sequence starts, or when the host itself has changed it; in between, rounds advance tokens
and lengths without the host. The last lane is a dummy of length 1 on the scratch page, for seats that only pad a batch.

Tables that the host writes are in one piece of memory, so that any set of changes is one list of (index, value).
`Changes` collects the host's changes until the next launch.

    marks    [lanes + 1, vocab]   tokens of the sequence, and its stop tokens: see kernels/edit_reference.py
    bias     [lanes + 1, vocab]   logit_bias and allowed_tokens

exist only once a sequence edits logits. The host writes them by whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.edit_reference import IN_PROMPT, IS_STOP, Edits
from paceline.runner.rounds.alignment import places
from paceline.runner.rounds.upload import MAX_PATCH, Patches, Upload
from paceline.sampling.sampler import Sampler


class DeviceState:
    """The tables. Implements TreeLanes of kernels/tree_reference.py."""

    def __init__(
        self,
        *,
        lanes: int,
        width: int,
        scratch_page: int,
        device: torch.device | str,
        max_draft: int = 0,
        holding: int = 0,
        predicts: bool = False,
    ) -> None:
        """`holding`: number of drafters for which hidden states are held. `predicts`: a drafter reads predictions."""
        self.dummy = lanes
        self.scratch_page = scratch_page
        self.device = torch.device(device)
        count, pages = lanes + 1, -(-width // PAGE_SIZE)
        predicted = count * width if predicts else 0
        sizes = [2 * count, *[count] * 13, count * pages, count * width, holding * 2 * count, predicted]
        where, total = places(sizes)
        self.memory = torch.zeros(total, dtype=torch.int32, device=device)
        tables = [self.memory[place] for place in where]
        # Sampling parameters, each [lanes + 1], as defined in sampling/sampler.py.
        self.seed = tables[0].view(torch.int64)  # bits of the unsigned seed
        self.inverse_temperature = tables[1].view(torch.float32)  # 0: greedy
        self.top_k = tables[2]  # 0: off
        self.top_p = tables[3].view(torch.float32)  # 1: off
        self.min_p = tables[4].view(torch.float32)  # 0: off
        self.edits = tables[5]  # flags of kernels/edit_reference.py; 0: the logits are not edited
        self.repetition = tables[6].view(torch.float32)
        self.presence = tables[7].view(torch.float32)
        self.frequency = tables[8].view(torch.float32)
        self.stops_from = tables[9]  # first position whose token may be a stop token
        self.scored = tables[10]  # 1: new tokens get log-probabilities
        self.lengths = tables[11]
        self.predicted_lengths = tables[12]
        self.drift = tables[13]
        self.pages = tables[14].view(count, pages)
        self.tokens = tables[15].view(count, width)
        self.held = tables[16].view(holding, 2, count)  # `ends` and `counts` of HeldStates
        self.predicted = tables[17].view(count, predicted // count)
        self.marks = torch.zeros((count, 0), dtype=torch.int32, device=device)
        self.bias = torch.zeros((count, 0), device=device)
        self.top_p.fill_(1.0)
        self.repetition.fill_(1.0)
        self.lengths.fill_(1)
        self.pages.fill_(scratch_page)
        self.parents = torch.arange(-1, max_draft - 1, dtype=torch.int32, device=device).repeat(count, 1)  # chains

    def make_tables(self, vocab_size: int) -> None:
        """Allocate the tables over the vocabulary, if they do not exist: from now on their addresses are fixed."""
        if not self.marks.shape[1]:
            count = len(self.lengths)
            self.marks = torch.zeros((count, vocab_size), dtype=torch.int32, device=self.device)
            self.bias = torch.zeros((count, vocab_size), device=self.device)


class Changes:
    """Values that the host writes to a DeviceState; later changes replace earlier ones.

    Most are values by index into the state's memory. Tables over the vocabulary get whole rows."""

    def __init__(self, state: DeviceState, *, vocab_size: int) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._pieces: list[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]] = []  # indices and values
        # First indices, because torch takes long to tell them; for pages also the width of a lane.
        self._pages_at = int(state.pages.storage_offset()), state.pages.shape[1]
        self._lengths_at = int(state.lengths.storage_offset())
        self._held_at = [[int(table.storage_offset()) for table in pair] for pair in state.held]
        self._rows: dict[str, dict[int, np.ndarray]] = {}  # table → lane → its new row
        self._patches = Patches(state.device)

    def __bool__(self) -> bool:
        return bool(self._pieces or self._rows)

    def apply(self, upload: Upload) -> None:
        """Write all changes to the state and forget them."""
        if self._pieces and self._are_few():
            self._patches.apply(self._state.memory, {index[0]: value[0] for index, value in self._pieces})
            self._pieces = []
        elif self._pieces:
            places, values = upload.together(*self.take())
            self._state.memory[places] = values
        for name, rows in self._rows.items():
            table: Tensor = getattr(self._state, name)
            table[upload(np.array([*rows]))] = upload(np.stack([*rows.values()]))
        self._rows = {}

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        """Start a sequence with these committed tokens in the lane; it has no pages yet."""
        state, params = self._state, sampler.params
        if state.predicted.shape[1]:
            self._add(state.predicted, lane, 0, prediction)
            self._add(state.predicted_lengths, lane, 0, [len(prediction)])
            self._add(state.drift, lane, 0, [sampler.output_tokens - len(tokens)])
        self._add(state.tokens, lane, 0, tokens)
        self._add(state.lengths, lane, 0, [len(tokens)])
        self._add(state.pages, lane, 0, np.full(state.pages.shape[1], state.scratch_page))
        self._add(state.scored, lane, 0, [params.logprobs is not None])
        self._add(state.top_k, lane, 0, [min(params.top_k, self._vocab_size)])
        inverse_temperature = 0.0 if sampler.greedy else 1.0 / params.temperature
        for tensor, value in (
            (state.inverse_temperature, inverse_temperature),
            (state.top_p, params.top_p),
            (state.min_p, params.min_p),
            (state.repetition, params.repetition_penalty),
            (state.presence, params.presence_penalty),
            (state.frequency, params.frequency_penalty),
        ):
            self._add(tensor, lane, 0, np.array([value], dtype=np.float32).view(np.int32))
        seed = np.array([sampler.seed], dtype=np.uint64).view(np.int32)
        first = 2 * (int(state.seed.storage_offset()) + lane)  # in int32: a seed takes two
        self._pieces.append((first + np.arange(2), seed))
        self._write_edits(lane, tokens, sampler)

    def _write_edits(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        state, edits, prompt = self._state, edits_of(sampler), len(tokens) - sampler.output_tokens
        self._add(state.edits, lane, 0, [edits])
        if edits & Edits.WAITS:
            self._add(state.stops_from, lane, 0, [min(prompt + sampler.params.min_tokens, 2**31 - 1)])
        if edits:
            state.make_tables(self._vocab_size)
        if edits & (Edits.PENALISES | Edits.WAITS):
            self._write_marks(lane, tokens, sampler)
        if sampler.additive is not None:
            self._set_row("bias", lane, sampler.additive.numpy())

    def cut(self, lane: int, tokens: np.ndarray, sampler: Sampler, unread: Sequence[int]) -> None:
        """Cut a lane to these tokens, which it has: only what rounds have advanced is written. `unread`: for each
        drafter with held states, how many before the last token are to be read; 0: they are useless."""
        self._pieces.append(((self._lengths_at + lane,), (len(tokens),)))
        for (ends, counts), count in zip(self._held_at, unread, strict=True):
            self._pieces.append(((ends + lane,), (len(tokens) - 1 if count else 0,)))
            self._pieces.append(((counts + lane,), (count,)))
        if edits_of(sampler) & Edits.PENALISES:
            self._write_marks(lane, tokens, sampler)

    def _write_marks(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        prompt = len(tokens) - sampler.output_tokens
        marks = np.bincount(tokens[prompt:], minlength=self._vocab_size).astype(np.int32)
        marks[tokens[:prompt]] |= IN_PROMPT
        marks[sampler.stops] |= IS_STOP
        self._set_row("marks", lane, marks)

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        """Write pages to a lane's table, from entry `first` on."""
        start, width = self._pages_at
        assert first + len(pages) <= width, f"{len(pages)} values from {first} on in a lane of {width}"
        start += lane * width + first
        self._pieces.append((range(start, start + len(pages)), pages))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Return and forget all changes: indices int64 [n], each once, and values int32 [n]."""
        pieces, self._pieces = self._pieces, []
        indices = np.concatenate([index for index, _ in pieces])
        values = np.concatenate([value for _, value in pieces]).astype(np.int32)
        unique, last = np.unique(indices[::-1], return_index=True)
        return unique, values[::-1][last]

    def _are_few(self) -> bool:
        """Return True in the usual case: one more page for some sequences."""
        return len(self._pieces) <= MAX_PATCH and all(len(index) == 1 for index, _ in self._pieces)

    def _set_row(self, table: str, lane: int, row: np.ndarray) -> None:
        self._rows.setdefault(table, {})[lane] = row

    def _add(self, tensor: Tensor, lane: int, first: int, values: Sequence[int] | np.ndarray) -> None:
        width = tensor.shape[1] if tensor.dim() == 2 else 1
        assert first + len(values) <= width, f"{len(values)} values from {first} on in a lane of {width}"
        start = int(tensor.storage_offset()) + lane * width + first
        self._pieces.append((start + np.arange(len(values)), np.asarray(values, dtype=np.int32)))


def edits_of(sampler: Sampler) -> Edits:
    """Return which edits a sequence's logits get."""
    params, edits = sampler.params, Edits(0)
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        edits |= Edits.PENALISES
    if params.min_tokens:
        edits |= Edits.WAITS
    if sampler.additive is not None:
        edits |= Edits.BIASES
    if params.grammar is not None:
        edits |= Edits.MASKS
    return edits
