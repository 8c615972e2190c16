"""`layers:auto`: how many of the target's layers draft best on this machine, by a measurement of a second or two.

The target continues some prompts of this package greedily, in KV memory of their own. The first layers then read the
same text. A draft is right as long as their best token is the target's, so one pass tells how many tokens of every
draft would be accepted. With the times of passes this gives the speed-up of each choice. The answer is kept by machine
and model. No text depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.runner.batch import Share, build_batch
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.measuring import RunPass, Times, answers_to, measure
from paceline.runner.lanes import Lanes

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)  # parts of the layers that are tried
DRAFTS = (1, 2, 4)  # tokens of a draft that are tried
NEW_TOKENS = 32  # tokens of each text that the target continues
WORTH = 1.05  # speed-up below which nothing is drafted: less is within the noise of the measurement


class Choice(NamedTuple):
    """A number of layers and of tokens in a draft, and the speed-up over plain decoding that was measured."""

    layers: int
    draft: int
    speedup: float

    @property
    def pays(self) -> bool:
        return self.speedup >= WORTH


def choose(target: CompiledForward, prompts: Sequence[Tensor], *, question: object) -> Choice | None:
    """Return the best choice for a target; None: the machine is too busy to measure. The repr of `question` tells
    targets apart."""
    counts = candidates(target.config.num_layers)
    names = [*_time_names(counts), *(_accepted(n, k) for n in counts for k in DRAFTS)]
    found = answers_to(("layers", question), names, lambda: _measured(target, prompts, counts))
    return None if found is None else best(found, counts)


def candidates(layers: int) -> list[int]:
    """Return the numbers of layers that are tried; []: a target of one layer has no part."""
    return sorted({max(1, round(share * layers)) for share in SHARES} & set(range(1, layers)))


def best(found: Mapping[str, float], counts: Sequence[int]) -> Choice:
    """Return the choice with the highest speed-up, by seconds of passes and accepted tokens of drafts."""
    choices = [Choice(n, k, _speedup(found, n, k)) for n in counts for k in DRAFTS]
    return max(choices, key=lambda choice: choice.speedup, default=Choice(1, 1, 0.0))


def _speedup(found: Mapping[str, float], layers: int, draft: int) -> float:
    seconds = draft * found[_passes(layers)] + found[_rows(draft + 1)]
    return (1 + found[_accepted(layers, draft)]) * found[_rows(1)] / seconds


def _measured(target: CompiledForward, prompts: Sequence[Tensor], counts: Sequence[int]) -> Times | None:
    texts = Texts(target, prompts)
    parts = {n: texts.forward.leading(n) for n in counts}
    runs: dict[str, RunPass] = {_rows(rows): partial(texts.pass_over, texts.forward, rows) for rows in _row_counts()}
    runs |= {_passes(n): partial(texts.pass_over, part, 1) for n, part in parts.items()}
    times = measure(runs)
    if times is None:
        return None
    accepted = {_accepted(n, k): texts.accepted(part, k) for n, part in parts.items() for k in DRAFTS}
    return {name: times[name] for name in _time_names(counts)} | accepted


class Texts:
    """Prompts, each with the target's own continuation, and their keys and values."""

    def __init__(self, target: CompiledForward, prompts: Sequence[Tensor], *, new: int = NEW_TOKENS) -> None:
        self.new = new
        length = max(map(len, prompts)) + new
        pages = -(-(length + max(DRAFTS) + 1) // PAGE_SIZE)
        self.lanes = Lanes(count=len(prompts), max_context=pages * PAGE_SIZE - 1, max_draft=0)
        self.lanes.pages_np[:] = np.arange(len(prompts) * pages).reshape(len(prompts), pages)
        self.forward = CompiledForward(
            target.config, target.pack, num_pages=len(prompts) * pages, threads=target.threads
        )
        self.starts = [len(prompt) for prompt in prompts]
        for lane, prompt in enumerate(prompts):
            self.lanes.tokens_np[lane, : len(prompt)] = prompt.numpy()
        self._continue()

    def _continue(self) -> None:
        """Let the target continue every prompt."""
        for step in range(self.new + 1):
            ends = [start + step for start in self.starts]
            shares = [Share(lane, end - 1 if step else 0, 1 if step else end) for lane, end in enumerate(ends)]
            for lane, token in enumerate(self.forward(build_batch(self.lanes, shares)).argmax.tolist()):
                self.lanes.tokens_np[lane, ends[lane]] = token

    def accepted(self, part: CompiledForward, draft: int) -> float:
        """Return the mean number of accepted tokens in drafts of `draft` tokens, over all places of the texts."""
        shares = [Share(lane, start, self.new, outs=self.new) for lane, start in enumerate(self.starts)]
        drafted = part(build_batch(self.lanes, shares)).argmax.numpy().reshape(len(shares), self.new)
        said = [self.lanes.tokens_np[lane, start + 1 : start + 1 + self.new] for lane, start in enumerate(self.starts)]
        right = drafted == np.stack(said)  # [texts, new]
        windows = np.lib.stride_tricks.sliding_window_view(right, draft, axis=1)
        return float(np.cumprod(windows, axis=2).sum(axis=2).mean())

    def pass_over(self, forward: CompiledForward, rows: int) -> None:
        """Run a pass over the last `rows` tokens of the first text, as a draft or its verification does."""
        forward(build_batch(self.lanes, [Share(0, self.starts[0] + self.new - rows, rows, outs=rows)]))


def _row_counts() -> list[int]:
    return [1, *(draft + 1 for draft in DRAFTS)]


def _time_names(counts: Sequence[int]) -> list[str]:
    return [*map(_rows, _row_counts()), *map(_passes, counts)]


def _rows(rows: int) -> str:
    return f"{rows} rows"


def _passes(layers: int) -> str:
    return f"{layers} layers"


def _accepted(layers: int, draft: int) -> str:
    return f"accepted of {draft} by {layers} layers"
