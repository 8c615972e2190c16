"""One canary: its options, the sums that were measured, and the verdict that follows from them."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from paceline.arms import ARMS
from paceline.server.canary.evidence import NEEDED, ratio, wealth
from paceline.server.canary.options import CanaryOptions

SHARES = 1 << 64  # values of a hash


class Phase(StrEnum):
    """Where a canary is."""

    SHADOW = "shadow"  # it drafts for finished texts while the engine is idle, and gets no traffic
    RUNNING = "running"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"


OPEN = (Phase.SHADOW, Phase.RUNNING)


@dataclass(slots=True)
class Trial:
    """A canary from its start on."""

    options: CanaryOptions
    drafter: str  # name under which it is loaded; none: plain decoding
    control: str  # name of the default drafter that it is compared with; none: plain decoding
    loaded: bool = False  # it was loaded for the canary, and is unloaded when the canary is rolled back
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    phase: Phase = Phase.RUNNING
    reason: str = ""  # why it ended
    started: float = field(default_factory=time.time)  # seconds since 1970
    totals: dict[str, float] = field(default_factory=dict)  # of all servers

    @classmethod
    def read(cls, given: dict[str, Any]) -> Self:
        """Read what the state file has."""
        return cls(**given | {"options": CanaryOptions(**given["options"]), "phase": Phase(given["phase"])})

    @property
    def open(self) -> bool:
        return self.phase in OPEN

    def takes(self, unit: str) -> bool:
        """Tell whether the canary drafts for this unit: the same answer for it on every server."""
        digest = hashlib.sha256(f"{self.id}:{unit}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.options.share * SHARES

    def verdict(self) -> tuple[Phase, str] | None:
        """Return how the canary ends by what was measured, and why; None: that is open."""
        pairs, found = self.totals.get("pairs", 0), ratio(self.totals)
        if found is None:
            return None
        speed = f"{found[0]:.2f} to {found[1]:.2f} times as fast as {self.control} over {pairs:.0f} pairs of requests"
        if wealth(self.totals, "slower") >= NEEDED:
            return Phase.ROLLED_BACK, f"{speed}: below rollback_at {self.options.rollback_at:g}"
        if pairs >= self.options.min_requests and wealth(self.totals, "faster") >= NEEDED:
            return Phase.PROMOTED, f"{speed}: above promote_at {self.options.promote_at:g}"
        return None

    def describe(self) -> dict[str, Any]:
        """Say for people and programs how the canary is."""
        totals, found = self.totals, ratio(self.totals)
        return {
            "drafter": self.drafter,
            "control": self.control,
            "phase": str(self.phase),
            "reason": self.reason or None,
            "share": self.options.share,
            "by": self.options.by,
            "promote_at": self.options.promote_at,
            "rollback_at": self.options.rollback_at,
            "min_requests": self.options.min_requests,
            "started": self.started,
            "pairs": int(totals.get("pairs", 0)),
            "ratio_low": None if found is None else found[0],
            "ratio_high": None if found is None else found[1],
            "evidence_faster": min(max(wealth(totals, "faster") / NEEDED, 0.0), 1.0),
            "evidence_slower": min(max(wealth(totals, "slower") / NEEDED, 0.0), 1.0),
            "arms": {arm: _arm(totals, arm) for arm in ARMS},
            "shadow": {name.partition(".")[2]: value for name, value in totals.items() if name.startswith("shadow.")},
        }


def _arm(totals: dict[str, float], arm: str) -> dict[str, Any]:
    """Sum up an arm: requests and tokens in all, tokens a second of decoding where that was measured."""
    seconds = totals.get(f"{arm}.seconds", 0.0)
    return {
        "requests": int(totals.get(f"{arm}.requests", 0)),
        "tokens": int(totals.get(f"{arm}.tokens", 0)),
        "drafted": int(totals.get(f"{arm}.drafted", 0)),
        "accepted": int(totals.get(f"{arm}.accepted", 0)),
        "tokens_per_second": totals.get(f"{arm}.timed", 0.0) / seconds if seconds else None,
    }
