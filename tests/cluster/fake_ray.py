"""As much of Ray Serve as the modules that import it need, so that they run where Ray is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RequestRouter:
    """Ray's base of routers: keeps the replicas, and how many requests each has."""

    def __init__(self) -> None:
        self.replicas: list[Any] = []
        self.replica_queue_len_cache = SimpleNamespace(get=lambda replica_id: self.busy.get(replica_id.unique_id))
        self.busy: dict[str, int] = {}

    def update_replicas(self, replicas: list[Any]) -> None:
        self.replicas = replicas


@dataclass
class Bound:
    """What `bind` returns."""

    cls: type
    options: dict[str, Any]
    given: dict[str, Any]


class Deployment:
    """Stands for the class that `serve.deployment` returns."""

    def __init__(self, cls: type, **given: Any) -> None:
        self._cls, self._given = cls, given

    def options(self, *, version: str, _internal: bool) -> Deployment:
        assert _internal, "Ray takes a version from within alone"
        return Deployment(self._cls, **self._given, version=version)

    def bind(self, **given: Any) -> Bound:
        return Bound(self._cls, self._given, given)


class Config(SimpleNamespace):
    """A record of Ray's that keeps what it is given."""


def ingress() -> Callable[[type], type]:
    return lambda cls: cls


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fakes where Ray's modules would be, and forget the modules that would import them."""
    serve, config, router, exceptions, ray = (
        ModuleType(name)
        for name in ("ray.serve", "ray.serve.config", "ray.serve.request_router", "ray.serve.exceptions", "ray")
    )
    exceptions.__dict__["RayServeException"] = type("RayServeException", (Exception,), {})
    serve.__dict__.update(
        ingress=ingress,
        deployment=Deployment,
        get_replica_context=lambda: SimpleNamespace(
            replica_id=SimpleNamespace(unique_id="r7"), deployment="Paceline", app_name="paceline"
        ),
    )
    names = ("AutoscalingConfig", "AutoscalingPolicy", "BackpressureConfig", "RequestRouterConfig")
    config.__dict__.update({name: type(name, (Config,), {}) for name in names})
    router.__dict__.update(dict.fromkeys(("PendingRequest", "ReplicaID", "RunningReplica"), SimpleNamespace))
    router.__dict__["RequestRouter"] = RequestRouter
    ray.__dict__["serve"] = serve
    for module in (ray, serve, config, router, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("paceline.cluster.router", "paceline.cluster.deployment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
