"""Counts and times of an answer, with llama.cpp's names."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.protocol.llama_cpp import Timings
from paceline.types import SequenceStats


def timings(all_stats: Sequence[SequenceStats], *, samples: int = 1) -> Timings:
    """Sum counts over all choices; choices run side by side, so the longest time counts. `samples`: of one prompt."""
    firsts = all_stats[::samples]
    cached = sum(stats.cached_tokens for stats in firsts)
    prompt = sum(stats.prompt_tokens for stats in firsts) - cached
    prompt_ms = 1000 * max(stats.time_to_first - stats.time_queued for stats in all_stats)
    output = sum(stats.output_tokens for stats in all_stats)
    output_ms = 1000 * max(stats.time_total - stats.time_to_first for stats in all_stats)
    return Timings(
        cache_n=cached,
        prompt_n=prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt),
        prompt_per_second=1000 * _ratio(prompt, prompt_ms),
        predicted_n=output,
        predicted_ms=output_ms,
        predicted_per_token_ms=_ratio(output_ms, output),
        predicted_per_second=1000 * _ratio(output, output_ms),
        draft_n=sum(stats.drafted for stats in all_stats),
        draft_n_accepted=sum(stats.accepted for stats in all_stats),
    )


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
