"""A server's counters of speculation, read from its `/metrics`: vLLM's names, which Paceline has too.

Counters are totals since the server started. The difference of two readings belongs to a run only if the server
answered no other requests meanwhile. A server without them is no error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "vllm:spec_decode_num_"
LINE = re.compile(rf"^{PREFIX}(\w+?)(?:_total)?(?:\{{(.*)\}})?\s+(\S+)", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class SpecCounters:
    drafts: float = 0
    drafted: float = 0
    accepted: float = 0
    by_position: Mapping[int, float] = field(default_factory=dict)

    def __sub__(self, before: SpecCounters) -> SpecCounters:
        places = {i: n - before.by_position.get(i, 0) for i, n in self.by_position.items()}
        return SpecCounters(
            self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted, places
        )

    def __add__(self, other: SpecCounters) -> SpecCounters:
        places = {
            i: self.by_position.get(i, 0) + other.by_position.get(i, 0)
            for i in sorted({*self.by_position, *other.by_position})
        }
        return SpecCounters(
            self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted, places
        )

    def record(self) -> dict[str, Any]:
        """The counters by the keys of `vllm bench serve`; empty if nothing was drafted."""
        if self.drafts <= 0 or self.drafted <= 0:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted / self.drafted,
            "spec_decode_acceptance_length": 1 + self.accepted / self.drafts,
            "spec_decode_num_drafts": int(self.drafts),
            "spec_decode_draft_tokens": int(self.drafted),
            "spec_decode_accepted_tokens": int(self.accepted),
            "spec_decode_per_position_acceptance_rates": [
                self.by_position[i] / self.drafts for i in sorted(self.by_position)
            ],
        }


def read_counters(text: str) -> SpecCounters | None:
    """Read the counters of a page, summed over engines; None if it has none."""
    found = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    places: dict[int, float] = {}
    seen = False
    for name, labels, number in LINE.findall(text):
        value = _number(number)
        if value is None:
            continue
        position = POSITION.search(labels)
        if name == "accepted_tokens_per_pos" and position:
            places[int(position[1])] = places.get(int(position[1]), 0) + value
        elif name in found:
            found[name], seen = found[name] + value, True
    return SpecCounters(found["drafts"], found["draft_tokens"], found["accepted_tokens"], places) if seen else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
