"""The router of Ray's proxies: reads what a request says, and lets `Affinity` choose. Imports Ray, and no torch."""

from __future__ import annotations

import pickle
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.cluster.affinity import Affinity, Wish
from paceline.cluster.headers import PREFIX, REPLICA, value_of


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray brings no types
    """Routes by the header of a replica, by a session, and by prefixes."""

    def initialize_state(self, **options: Any) -> None:
        self._affinity = Affinity(**options)
        self._reported: dict[str, list[str]] = {}  # latest report of each replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        said = {each.replica_id.unique_id: (each.routing_stats or {}).get("beginnings", []) for each in replicas}
        self._affinity.keep(said)
        for name, report in said.items():
            if report is not self._reported.get(name):
                self._affinity.learn(name, report)
        self._reported = said

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_name:
            return []
        busy = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        if pending_request is None:
            return [list(by_name.values())]
        pending_request.routing_context.should_backoff = True
        ranks = self._affinity.ranks(wish_of(pending_request), busy)
        return [[by_name[name] for name in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._affinity.routed(wish_of(pending_request), replica_id.unique_id)


def wish_of(pending: PendingRequest) -> Wish:
    """Read a request's headers. One that is no HTTP request has no wish."""
    if not pending.metadata.is_http_request:
        return Wish()
    headers = pickle.loads(pending.args[0]).asgi_scope["headers"]  # as Ray's proxy wrote it
    said = value_of(headers, PREFIX) or ""
    return Wish(
        replica=value_of(headers, REPLICA),
        session=pending.metadata.session_id or None,
        beginnings=tuple(said.split(",")) if said else (),
    )
