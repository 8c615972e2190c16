"""Samplers, from logits to a token: the one place that knows what sampling parameters mean, for target and drafter.

The token at position i of a sequence is a pure function of the logits there, the parameters, and noise keyed by
(seed, i):

    argmax(shaped logits + gumbel(seed, i))          temperature 0: argmax(edited logits)

where *edited* logits have penalties, bias and masks applied, and *shaped* ones are also divided by the temperature
and filtered by min-p, top-k and top-p, in this order. Penalties, min_tokens and a grammar depend on earlier tokens: a
row of a draft gets them as if its ancestors in the draft had been committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.filters import filter_floor
from paceline.sampling.grammar_state import GrammarState, Outlook
from paceline.sampling.words import Branch, MaskSheet, pack
from paceline.types import Logprob, SamplingParams

Pick = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [n, vocab], inverse temperatures [n], keys [n, 2]) → tokens [n]: argmax of scaled logits plus noise."""


class Stream(IntEnum):
    """Independent noises of one (seed, position)."""

    TOKEN = 0  # for the target's tokens, and for a drafter under the coupled rule
    DRAFT = 1  # for a drafter under a rule that wants distributions
    ACCEPT = 2  # for the random decisions of a rule that wants distributions
    RESIDUAL = 3  # for the token that a rule that wants distributions draws itself


def mix(seed: int, positions: np.ndarray, stream: Stream) -> np.ndarray:
    """Hash (seed, position, stream) to 64 bits: two rounds of a multiply-xorshift finaliser over a counter."""
    counter = positions.astype(np.uint64) * np.uint64(len(Stream)) + np.uint64(stream)
    bits = np.uint64(seed) ^ _finalise(counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03))
    return _finalise(bits)


def noise_keys(seed: int, positions: np.ndarray, stream: Stream) -> np.ndarray:
    """Make the pairs of 32-bit keys [n, 2] (int64) that a noise kernel expands over the vocabulary."""
    bits = mix(seed, positions, stream)
    return np.stack((bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)), axis=1).astype(np.int64)


def uniforms(seed: int, positions: np.ndarray, stream: Stream) -> Tensor:
    """Uniform numbers in (0, 1), float64, one for each position."""
    bits = mix(seed, positions, stream) >> np.uint64(11)
    return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of one of a request's n samples; the first keeps the request's own."""
    return seed if sample == 0 else int(mix(seed, np.array([2**61 + sample]), Stream.TOKEN)[0])


def _finalise(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


class Sampler:
    """Sampling state of one sequence: its parameters, its seed, and counts of its tokens so far."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        vocab_size: int,
        eos_ids: Iterable[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """`grammar` is the state of the parameters' grammar at the beginning of the answer; None: they have none."""
        self.params = params
        self.grammar = grammar
        self.seed = seed
        self.greedy = params.greedy
        self.is_argmax = params.greedy and not params.edits_logits  # the token is the argmax of a forward pass
        # True: a forward pass can draw the token itself, with `inverse_temperature` and noise alone. Filters and a
        # grammar come after the pass: they keep a token that is drawn without them, or another one is drawn.
        self.is_simple = not params.shifts_logits
        self.filters = bool(params.filters and not params.greedy)
        self.output_tokens = 0
        self.inverse_temperature = 0.0 if params.greedy else 1.0 / params.temperature
        self._vocab_size = vocab_size
        self.stops = sorted({*eos_ids, *params.stop_ids})  # tokens forbidden before min_tokens
        self.additive = _additive(params, vocab_size)  # [vocab] or None
        self._counts: Tensor | None = None  # output tokens, for presence and frequency
        self._seen: Tensor | None = None  # prompt and output, for repetition
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size)
        if params.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)

    def bare(self) -> Sampler:
        """Return a copy without what the host alone needs: the state of the grammar, and counts of tokens."""
        other = copy(self)
        other.grammar = other._counts = other._seen = None
        return other

    def see_prompt(self, prompt: Sequence[int]) -> None:
        if self._seen is not None:
            self._seen[list(prompt)] = True

    def advance(self, tokens: Sequence[int]) -> None:
        """Count tokens that were committed."""
        self.output_tokens += len(tokens)
        if self.grammar is not None:
            self.grammar.advance(tokens)
        # By views: torch takes microseconds for each element.
        if self._counts is not None:
            counts = self._counts.numpy()
            for token in tokens:
                counts[token] += 1
        if self._seen is not None:
            seen = self._seen.numpy()
            for token in tokens:
                seen[token] = True

    def edit(self, logits: Tensor, ancestors: Sequence[Sequence[int]]) -> Tensor:
        """Apply penalties, bias and masks to logits [rows, vocab]; row r comes after `ancestors[r]` of the draft."""
        if not self.params.edits_logits:
            return logits
        logits = logits.clone()
        for row, before in zip(logits, ancestors, strict=True):
            self._penalise(row, list(before))
            self._forbid(row, before)
        return logits if self.additive is None else logits + self.additive

    def shape(self, logits: Tensor) -> Tensor:
        """Scale and filter edited logits; their softmax is the distribution drawn from (temperature > 0)."""
        return _filter(logits * self.inverse_temperature, self.params)

    def probs(self, logits: Tensor) -> Tensor:
        """Compute the distributions that tokens are drawn from, for edited logits [rows, vocab]."""
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float32)
        return torch.softmax(self.shape(logits), dim=-1)

    def draw(self, logits: Tensor, positions: np.ndarray, pick: Pick, *, stream: Stream = Stream.TOKEN) -> Tensor:
        """Draw tokens [rows] at `positions` from edited logits [rows, vocab]."""
        if self.greedy:
            return logits.argmax(-1)
        keys = torch.from_numpy(noise_keys(self.seed, positions, stream))
        scale = self.inverse_temperature
        if self.params.filters:
            logits, scale = self.shape(logits), 1.0
        return pick(logits, torch.full((len(logits),), scale), keys)

    def mask(self, path: Sequence[int] = ()) -> np.ndarray | None:
        """Tokens that min_tokens and the grammar leave after `path`: uint32 [words], for a sampler with a grammar.
        None: the grammar cannot be followed there."""
        assert self.grammar is not None, "a mask without a grammar"
        return self.narrow(self.grammar.mask(path), len(path))

    def narrow(self, mask: np.ndarray | None, ahead: int) -> np.ndarray | None:
        """Take the stop tokens that min_tokens forbids out of a grammar's mask, `ahead` tokens after the last one, as
        long as others remain."""
        if mask is None or self.output_tokens + ahead >= self.params.min_tokens:
            return mask
        rest: np.ndarray = mask & ~self._stop_bits
        return rest if rest.any() else mask

    def fill(self, branches: Sequence[Branch], sheet: MaskSheet) -> Outlook:
        """Write to a sheet, for the rows of a draft, the tokens that min_tokens and the grammar leave; see
        `GrammarState.fill`."""
        assert self.grammar is not None, "a mask without a grammar"
        outlook = self.grammar.fill(branches, sheet)
        if self.output_tokens < self.params.min_tokens and outlook is Outlook.TOKENS:
            for _, rows in branches:
                for ahead, mask in enumerate(sheet.masks_of(rows)):
                    if mask is not None:
                        mask[:] = self.narrow(mask, ahead)
        return outlook

    @cached_property
    def _stop_bits(self) -> np.ndarray:
        return pack(self.stops, self._vocab_size)

    def _forbid(self, row: Tensor, before: Sequence[int]) -> None:
        """Mask stop tokens before min_tokens, and tokens that the grammar forbids. Where the grammar leaves only stops,
        it wins over min_tokens. Rows behind a token that the grammar forbids are never used."""
        early = self.output_tokens + len(before) < self.params.min_tokens
        allowed = None if self.grammar is None else self.grammar.allowed(before)
        if early and (allowed is None or _any_beside(allowed, self.stops)):
            row[self.stops] = -torch.inf
        if allowed is not None:
            row.masked_fill_(~allowed, -torch.inf)

    def _penalise(self, row: Tensor, before: list[int]) -> None:
        """Apply repetition, presence and frequency penalties to one row [vocab], in place."""
        params = self.params
        if self._seen is not None:
            seen = self._seen.clone()
            seen[before] = True
            scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            torch.where(seen, scaled, row, out=row)
        if self._counts is not None:
            counts = self._counts.clone()
            for token in before:
                counts[token] += 1
            row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one sequence among the outputs of a pass."""

    sampler: Sampler
    rows: slice
    positions: np.ndarray  # positions of the tokens to draw, one for each row
    ancestors: Sequence[Sequence[int]]  # drafted tokens up to each row; empty for a sampler that edits no logits


def sample(logits: Tensor, argmax: Tensor, groups: Sequence[RowGroup], pick: Pick) -> Tensor:
    """Draw the target's tokens [outs] for the rows of all groups; rows of no group get their argmax."""
    groups = [group for group in groups if not group.sampler.is_argmax]
    if not groups:
        return argmax
    tokens = argmax.to(torch.int64)
    for group in groups:
        edited = group.sampler.edit(logits[group.rows], group.ancestors)
        tokens[group.rows] = group.sampler.draw(edited, group.positions, pick)
    return tokens


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Score `tokens`, one for each row of logits [rows, vocab], before any sampling parameter."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = torch.tensor(tokens, dtype=torch.int64)[:, None]
    best = best_tokens(logits, min(top, logits.shape[-1]))
    alternatives = zip(best.tolist(), values.gather(1, best).tolist(), strict=True)
    columns = zip(tokens, values.gather(1, chosen)[:, 0].tolist(), token_ranks(logits, chosen).tolist(), strict=True)
    return [
        Logprob(token=token, logprob=value, rank=rank, top=tuple(zip(*most, strict=True)))
        for (token, value, rank), most in zip(columns, alternatives, strict=True)
    ]


def token_ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """Count the logits of each row [rows, vocab] that are larger than that of its token `chosen` int64 [rows, 1]."""
    return (logits > logits.gather(1, chosen)).sum(-1)


def best_tokens(logits: Tensor, top: int) -> Tensor:
    """Find the `top` largest logits of each row [rows, vocab], largest first; of equal ones the lower token first."""
    if not top:
        return torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)
    floors = torch.topk(logits, top, dim=-1).values[:, -1:]
    best = []
    for row, floor in zip(logits, floors, strict=True):
        candidates = (row >= floor).nonzero()[:, 0]  # ascending, and nearly always as many as wanted
        order = torch.sort(row[candidates], descending=True, stable=True).indices
        best.append(candidates[order[:top]])
    return torch.stack(best) if best else floors.new_zeros((0, top), dtype=torch.int64)


def _any_beside(allowed: Tensor, tokens: Sequence[int]) -> bool:
    return int(allowed.sum()) > int(allowed[tokens].sum())


def _additive(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """Bias and allowed tokens as one vector [vocab] to add to logits; None: there are none."""
    if not params.logit_bias and params.allowed_tokens is None:
        return None
    vector = torch.zeros(vocab_size)
    if params.allowed_tokens is not None:
        vector.fill_(-torch.inf)
        vector[list(params.allowed_tokens)] = 0
    for token, bias in params.logit_bias.items():
        vector[token] += bias
    return vector


def _filter(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Apply min-p, top-k and top-p to scaled logits [rows, vocab]: filtered ones become -inf. Ties stay in."""
    if not params.filters:
        return scaled
    values = scaled.numpy()
    floor = filter_floor(scaled, min_p=params.min_p, top_k=params.top_k, top_p=params.top_p)
    return torch.from_numpy(np.where(values < floor, np.float32(-np.inf), values))
