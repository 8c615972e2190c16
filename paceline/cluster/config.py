"""A cluster's configuration: the options of `paceline serve`, and in the section `cluster` those of its replicas.

    model: smollm2
    max_waiting: 64
    cluster:
      min_replicas: 1
      max_replicas: 4

An unknown name is an error, and so is an option that would have no effect behind Ray's proxies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self, get_type_hints

from paceline import __version__
from paceline.checks import check_integer, check_number
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest, UnknownOption
from paceline.server.gather import from_environment, read_options, read_yaml
from paceline.server.launch import DEFAULTS, ENGINE, OPTIONS
from paceline.server.settings import HINTS, RELOADABLE, Settings

ROUTINGS = ("prefix", "session", "none")
MAX_SECONDS = 1e6
LAST_ANSWERS_SECONDS = 5.0  # for a replica to close after its last request
NO_EFFECT = {  # option → why a replica has no use for it
    "max_connections": "Ray's proxies hold the connections",
    "header_timeout": "Ray's proxies read the headers",
    "write_timeout": "Ray's proxies write to clients",
    "record": "several replicas would write one file; record on a server of its own",
    "record_share": "nothing is recorded in a cluster",
    "record_without_text": "nothing is recorded in a cluster",
}
KEPT = ("name", "routing", "max_imbalance")  # options of the application and of the routers that its proxies have made
PROXY = frozenset({"host", "port", "tls_cert", "tls_key"})  # options of Ray's proxies


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of the section `cluster`."""

    name: str = "paceline"  # of the Serve application
    route_prefix: str = "/"  # below which its paths are
    min_replicas: int = 1
    max_replicas: int = 1  # as many as min_replicas: no autoscaling
    cpus: float = 1.0  # cores that Ray reserves for a replica; its ranks share them, unless `threads` is given
    gpus: float = 0.0  # GPUs that Ray reserves for a replica, one for each rank; 0: it runs on the CPU
    target_waiting: float = 4.0  # mean of waiting sequences a replica, from which another is started
    target_kv_usage: float = 0.8  # share of KV pages, from which another is started
    upscale_delay: float = 10.0  # seconds for which the load must be too high
    downscale_delay: float = 120.0  # seconds for which it must be low
    routing: str = "prefix"  # prefix, session or none; a session's header counts with the first two
    max_imbalance: int = 8  # requests above the least busy one of a few drawn replicas, at which affinity yields
    stats_period: float = 1.0  # seconds between two statistics of a replica for the routers
    health_period: float = 5.0  # seconds between two health checks

    def __post_init__(self) -> None:
        check_integer("min_replicas", self.min_replicas, 1, 10_000)
        check_integer("max_replicas", self.max_replicas, 1, 10_000)
        if self.max_replicas < self.min_replicas:
            given = f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}"
            raise InvalidRequest(f"{given}: give both, the larger as max_replicas")
        check_number("cpus", self.cpus, 0, 4096)
        check_number("gpus", self.gpus, 0, 64)
        check_number("target_waiting", self.target_waiting, 0, 1e6, open_low=True)
        check_number("target_kv_usage", self.target_kv_usage, 0, 1, open_low=True)
        check_integer("max_imbalance", self.max_imbalance, 0, 1 << 20)
        for name in ("upscale_delay", "downscale_delay"):
            check_number(name, getattr(self, name), 0, MAX_SECONDS)
        for name in ("stats_period", "health_period"):
            check_number(name, getattr(self, name), 0, MAX_SECONDS, open_low=True)
        if self.routing not in ROUTINGS:
            raise UnknownOption("routing", self.routing, ROUTINGS)
        if not self.route_prefix.startswith("/") or (self.route_prefix != "/" and self.route_prefix.endswith("/")):
            raise InvalidRequest(f"route_prefix is a path such as / or /small, not {self.route_prefix!r}")
        if not self.name:
            raise InvalidRequest("name is the name of a Serve application, not an empty text")

    @property
    def scales(self) -> bool:
        return self.max_replicas > self.min_replicas


OWN: Mapping[str, Any] = get_type_hints(ClusterOptions)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The settings with which every replica is started, and the number of replicas."""

    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)  # options of `paceline serve` that were given
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the same as they were written, for replicas

    @classmethod
    def read(cls, path: str) -> Self:
        return cls.of(read_yaml(path), where=path)

    @classmethod
    def of(cls, given: Mapping[str, Any], *, where: str) -> Self:
        """Make a configuration of a mapping. `where` names its origin in errors."""
        section = given.get("cluster") or {}
        if isinstance(section, str):  # a word of `serve run`: cluster='{"max_replicas": 2}'
            section = _parsed(section, where)
        if not isinstance(section, Mapping):
            raise InvalidRequest(f"cluster in {where} holds lines such as `max_replicas: 2`, not {section!r}")
        own = read_options(OWN, section, where=f"the section cluster of {where}")
        raw = {name: value for name, value in given.items() if name != "cluster"}
        return cls(ClusterOptions(**own), read_options(OPTIONS, raw, where=where), raw).checked()

    def checked(self) -> Self:
        for name in self.given:
            if name in NO_EFFECT:
                raise InvalidRequest(f"{name} has no effect in a cluster: {NO_EFFECT[name]}; leave it out")
        self._check_devices(self.given)
        Settings.of(**{name: value for name, value in self.given.items() if name in HINTS})
        return self

    def _check_devices(self, given: Mapping[str, Any]) -> None:
        """Raise InvalidRequest if the engine's options are wrong, or a replica has not what its ranks need."""
        engine = EngineConfig.of(**{name: given[name] for name in ENGINE if name in given})
        check = self._check_gpus if self.cluster.gpus else self._check_cores
        check(engine.tensor_parallel, given.get("device", "auto"))

    def _check_gpus(self, degree: int, device: str) -> None:
        gpus = self.cluster.gpus
        if device == "cpu":
            raise InvalidRequest(
                f"gpus {gpus:g} in the section cluster with device cpu: Ray would reserve GPUs for nobody; leave out "
                "one of them"
            )
        if gpus == degree or (gpus < 1 and degree == 1):  # a part: replicas share a GPU
            return
        split = f", or tensor_parallel {gpus:g}" if gpus > 1 and gpus.is_integer() else ""
        raise InvalidRequest(
            f"gpus {gpus:g} in the section cluster with tensor_parallel {degree}: a replica uses one GPU for each "
            f"rank; give gpus {degree}{split}"
        )

    def _check_cores(self, degree: int, device: str) -> None:
        if device == "cuda":
            raise InvalidRequest(
                f"device cuda without gpus in the section cluster: no replica would have a GPU of its own; give gpus "
                f"{degree}"
            )
        if degree > max(1, self.cluster.cpus):
            raise InvalidRequest(
                f"tensor_parallel {degree}: each rank needs a core, and Ray reserves {self.cluster.cpus:g} for a "
                "replica; raise cpus in the section cluster, or give gpus"
            )

    def options(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Every option of a server on a machine with these variables: they override the file, as for `serve`.

        `gpus` decides on the device: to a replica that reserves no GPU, Ray shows all GPUs of its node. `cores`, which
        is no option of users: the cores that Ray reserves, for threads that nobody has set."""
        given = dict(self.given) | from_environment(OPTIONS, environ)
        self._check_devices(given)
        cores = {} if self.cluster.gpus else {"cores": max(1, int(self.cluster.cpus))}
        return DEFAULTS | cores | given | {"device": "cuda" if self.cluster.gpus else "cpu"}

    def request_seconds(self, environ: Mapping[str, str]) -> float:
        """Return the seconds that a request may take."""
        return float(self.options(environ).get("request_timeout", Settings().request_timeout))

    def drain_seconds(self, environ: Mapping[str, str], *, longest: float = 0.0) -> float:
        """Return the seconds that a replica which is to end has for its requests, and to close after them.

        Unless `drain_timeout` says otherwise no request is cut: it gets the time that any request may take. `longest`:
        seconds that requests which run already may take, by an earlier configuration."""
        seconds = max(longest, self.request_seconds(environ))
        return float(self.options(environ).get("drain_timeout", seconds)) + LAST_ANSWERS_SECONDS

    @property
    def live(self) -> dict[str, Any]:
        """Options that replicas take over while they run."""
        return {name: value for name, value in self.raw.items() if name in RELOADABLE}

    def check_change(self, other: Self) -> None:
        """Raise InvalidRequest if a running cluster cannot be changed to `other`: Ray would ignore it in part."""
        for name in sorted(PROXY):
            if self.given.get(name) != other.given.get(name):
                raise InvalidRequest(f"{name} cannot change while the cluster runs: start it anew")
        for name in KEPT:
            if getattr(self.cluster, name) != getattr(other.cluster, name):
                raise InvalidRequest(
                    f"{name} in the section cluster cannot change while the cluster runs: start it anew"
                )

    @property
    def fixed(self) -> dict[str, Any]:
        """Options that replicas are started with: another value starts new replicas."""
        return {name: value for name, value in self.raw.items() if name not in RELOADABLE and name not in PROXY}

    @property
    def reserved(self) -> dict[str, float]:
        """Options of the section `cluster` that replicas are started with."""
        return {"cpus": self.cluster.cpus, "gpus": self.cluster.gpus}

    @property
    def version(self) -> str:
        """Name what replicas are started with: replicas of one version differ in live settings alone.

        Values count as they are read, not as they are written: 2M is 2097152. Whether there is an autoscaler counts,
        since replicas that Ray starts without one never report their load."""
        fixed = {name: self.given[name] for name in self.fixed}
        parts = [__version__, self.cluster.scales, sorted(self.reserved.items()), sorted(fixed.items())]
        return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRequest(f"cluster in {where} is no JSON object: {text!r}") from None
