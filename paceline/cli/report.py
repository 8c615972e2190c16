"""Statistics of answers: a line for people, a dictionary for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.types import SequenceStats


def decode_speed(stats: SequenceStats) -> float:
    """Tokens per second after the first token, the part that speculation can change."""
    seconds = stats.time_total - stats.time_to_first
    return (stats.output_tokens - 1) / seconds if seconds > 0 and stats.output_tokens > 1 else 0.0


def stats_record(stats: SequenceStats) -> dict[str, Any]:
    return asdict(stats) | {
        "tokens_per_step": stats.tokens_per_step,
        "tokens_per_round": stats.tokens_per_step,  # the older name
        "acceptance": stats.acceptance,
        "decode_tok_s": decode_speed(stats),
        "speedup": None if stats.speedup is None else stats.speedup._asdict(),
    }


def stats_line(stats: SequenceStats) -> str:
    parts = [f"{stats.output_tokens} tokens", f"{decode_speed(stats):.0f} tokens/s"]
    if stats.rounds:
        parts.append(f"{stats.tokens_per_step:.2f} tokens/step")
        parts.append(
            f"{stats.accepted} of {stats.drafted} drafted tokens accepted ({stats.acceptance:.0%}, {stats.drafter})"
        )
    if stats.speedup is not None:
        parts.append(f"{stats.speedup} as fast as plain, measured")
    if stats.off_reason is not None:
        parts.append(f"plain: {stats.off_reason}" if not stats.rounds else f"not drafting: {stats.off_reason}")
    return " · ".join(parts)


@dataclass(slots=True)
class Totals:
    """Sums over several answers. The first token of each belongs to its prompt and is not counted."""

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, stats: SequenceStats) -> None:
        if stats.output_tokens > 1:
            self.answers += 1
            self.tokens += stats.output_tokens - 1
            self.steps += stats.steps - 1
            self.drafted += stats.drafted
            self.accepted += stats.accepted
            self.seconds += stats.time_total - stats.time_to_first

    @property
    def line(self) -> str:
        if not self.answers or not self.seconds:
            return "no answers yet"
        answers = "1 answer" if self.answers == 1 else f"{self.answers} answers"
        parts = [answers, f"{self.tokens} tokens", f"{self.tokens / self.seconds:.0f} tokens/s"]
        if self.drafted:
            parts.append(f"{self.tokens / self.steps:.2f} tokens/step")
            parts.append(
                f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.accepted / self.drafted:.0%})"
            )
        return " · ".join(parts)
