"""A replica: the server's own app and engine, with the methods that Serve calls. Knows nothing of Ray itself.

Serve makes it on an event loop, calls all its methods there, and ends it once its requests have ended. A replica whose
engine is dead fails its health check, and Serve starts another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client.metrics_core import Metric

from paceline import __version__
from paceline.cluster.affinity import Beginnings
from paceline.cluster.config import ClusterConfig
from paceline.cluster.front import Front
from paceline.errors import EngineDead, InvalidRequest
from paceline.llm import LLM
from paceline.models.resolve import served_name
from paceline.server import logs
from paceline.server.bridge import Bridge
from paceline.server.launch import load_model, settings_of
from paceline.server.service import Service
from paceline.server.settings import Settings

MAX_REPORTED = 2048  # beginnings in a replica's statistics, the latest
Loader = Callable[[Mapping[str, Any], Callable[[int, int], None]], LLM]


class Replica:
    async def start(
        self, *, name: str, version: str, cluster: dict[str, Any], fixed: dict[str, Any], load: Loader = load_model
    ) -> None:
        """Load the model and start the engine. `version`: of Paceline, where the application was made."""
        if version != __version__:
            raise InvalidRequest(
                f"the application was made by Paceline {version}, and this node has {__version__}: install one version "
                "on all nodes"
            )
        self.name, self._fixed, self._cluster = name, fixed, cluster
        settings, given = self._read({})
        logs.start_log(as_json=settings.log_json)
        bridge = Bridge(
            model=settings.served_name or served_name(given["model"]),
            max_waiting=settings.max_waiting,
            stream_interval=settings.stream_interval,
        )
        self.bridge, self._beginnings = bridge, Beginnings()
        self.service = Service(bridge, settings, load=partial(load, given))
        self.service.app.state.metrics.replicas = self.everywhere
        await self.service.start()
        logs.say("replica", replica=name, model=bridge.model, cores=given.get("cores"), threads=given.get("threads"))

    def _read(self, live: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
        """Put the options together: those of the start, those that may change, and this node's variables."""
        said = {**self._fixed, **live, "cluster": self._cluster}
        given = ClusterConfig.of(said, where="the cluster's configuration").options(os.environ)
        given.setdefault("allowed_hosts", ("*",))  # proxies listen, and this server cannot know under which names
        return settings_of(given), given

    def front(self) -> Front:
        """The app that answers the requests of this replica."""
        return Front(self.service.app, name=self.name, note=self._beginnings.add)

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take over other settings while requests run."""
        live = dict(user_config or {})
        self.service.live.source = lambda: self._read(live)[0]
        self.service.live.reload()

    async def collected(self) -> tuple[str, list[Metric]]:
        """Return the name of this replica, and its metrics."""
        return self.name, list(self.service.app.state.metrics.collect())

    async def everywhere(self) -> Mapping[str, list[Metric]]:
        """Return the metrics of each replica that answers in time, by its name."""
        return dict([await self.collected(), *await self.ask_all("collected")])

    async def ask_all(self, method: str) -> list[Any]:
        """Call a method of every replica, as far as they are known here."""
        return []

    async def check_health(self) -> None:
        if self.bridge.state == "dead":
            raise EngineDead(f"the engine of replica {self.name} stopped: {self.bridge.dead}")

    def record_routing_stats(self) -> dict[str, Any]:
        """Report to the routers what this replica's prefix cache has probably seen."""
        return {"beginnings": self._beginnings.latest(MAX_REPORTED), "uses": self._beginnings.uses}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the load to `scaling.Policy`."""
        now = self.bridge.stats()
        return {
            "running": float(now.running),
            "waiting": float(now.waiting),
            "kv_usage": now.pages_held / now.pages_total if now.pages_total else 0.0,
            "places": float(self.bridge.llm.engine.max_sequences),
        }

    async def close(self) -> None:
        """End the engine; Serve has waited for the requests."""
        await self.service.close()
