"""Counts per tenant: open sequences, and answers and tokens since the start. They live on the event loop.

A tenant is the digest of an API key (`guards.keys`), so there are no more of them than keys that the settings had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.engine.stats import TenantLoad
from paceline.types import Request, TokenEvent

NOBODY = "default"  # how the tenant without a name is shown


@dataclass(slots=True)
class Served:
    """Counts of one tenant since the start."""

    open: int = 0  # sequences that have not ended
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, those that the prefix cache had
    output_tokens: int = 0


class Tenants:
    def __init__(self) -> None:
        self._served: dict[str, Served] = {}

    def take(self, request: Request) -> None:
        """Count a request that was taken."""
        self._served.setdefault(request.tenant, Served()).open += request.sampling.n

    def end(self, request: Request, last: TokenEvent) -> None:
        """Count the last event of a sequence."""
        served = self._served[request.tenant]
        served.open -= 1
        served.answers += 1
        if last.stats is not None:
            served.output_tokens += last.stats.output_tokens
            if last.sample == 0:  # the n answers to a request share their prompt
                served.prompt_tokens += last.stats.prompt_tokens
                served.cached_tokens += last.stats.cached_tokens

    def refuse(self, request: Request, sequences: int) -> None:
        """Count sequences of a request that the engine did not take."""
        self._served[request.tenant].open -= sequences

    def keeps_to_share(self, requests: Sequence[Request], *, places: int) -> bool:
        """Return whether requests of one tenant keep to its equal share of the places that wait, so that a tenant that
        fills them all shuts no other out. As in `Bridge`, the last one needs room for one sequence alone."""
        asking = requests[0].tenant
        others = sum(served.open > 0 for name, served in self._served.items() if name != asking)
        mine = self._served[asking].open if asking in self._served else 0
        return mine + sum(request.sampling.n for request in requests[:-1]) < places // (others + 1)

    def described(self, loads: Mapping[str, TenantLoad]) -> dict[str, Any]:
        """Describe each tenant, with its load in the engine."""
        nothing = TenantLoad(waiting=0, running=0, counter=0)
        return {
            name or NOBODY: asdict(loads.get(name, nothing)) | asdict(served)
            for name, served in sorted(self._served.items())
        }
