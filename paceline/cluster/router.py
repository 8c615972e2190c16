"""The router of Ray's proxies: reads what a request says, and lets `Affinity` choose. Imports Ray, and no torch.

Ray has a new list of replicas whenever they change, and gives the same one until then. So nothing is done for all
replicas when a request comes.
"""

from __future__ import annotations

import pickle
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.cluster.affinity import NO_WISH, Affinity, Wish
from paceline.cluster.headers import PREFIX, REPLICA, value_of


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray brings no types
    """Routes by the header of a replica, by a session, and by prefixes."""

    def initialize_state(self, **options: Any) -> None:
        self._affinity = Affinity(**options)
        self._uses: dict[str, int] = {}  # beginnings that each replica had read at its latest report
        self._candidates: list[RunningReplica] = []
        self._by_name: dict[str, RunningReplica] = {}  # the candidates

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        said = {each.replica_id.unique_id: each.routing_stats or {} for each in replicas}
        uses = {name: report.get("uses", 0) for name, report in said.items()}
        for name, report in said.items():
            new = uses[name] - self._uses.get(name, 0)
            if new > 0:  # the latest are the last
                self._affinity.learn(name, report["beginnings"][-new:])
        self._uses = uses

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if candidate_replicas is not self._candidates:
            self._candidates = candidate_replicas
            self._by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            self._affinity.keep(self._by_name)
        if not self._by_name:
            return []
        wish = NO_WISH
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            wish = _wish_of(pending_request)
        return [[self._by_name[name] for name in rank] for rank in self._affinity.ranks(wish, self._busy)]

    def _busy(self, name: str) -> int:
        return self.replica_queue_len_cache.get(self._by_name[name].replica_id) or 0

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._affinity.routed(_wish_of(pending_request), replica_id.unique_id)


def _wish_of(pending: PendingRequest) -> Wish:
    """Read a request's headers, once: it is offered to replicas until one takes it. One that is no HTTP request has no
    wish."""
    context = pending.routing_context
    if not hasattr(context, "wish"):
        context.wish = _read(pending) if pending.metadata.is_http_request else NO_WISH
    wish: Wish = context.wish
    return wish


def _read(pending: PendingRequest) -> Wish:
    headers = pickle.loads(pending.args[0]).asgi_scope["headers"]  # as Ray's proxy wrote it
    said = value_of(headers, PREFIX) or ""
    return Wish(
        replica=value_of(headers, REPLICA),
        session=pending.metadata.session_id or None,
        beginnings=tuple(said.split(",")) if said else (),
    )
