"""A cluster's life from one command: check, start Ray or join it, deploy, follow changes of the file, drain, end.

Everything that can be wrong is said before Ray is started, as far as this machine knows it. Imports Ray where it is
needed, after `check_ray`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.cluster.config import ClusterConfig
from paceline.cluster.door import IMPORT_PATH, VARIABLE
from paceline.errors import ClusterError, InvalidRequest, MissingExtra
from paceline.server.launch import settings_of
from paceline.server.process import bind
from paceline.server.settings import HINTS, Settings

OLDEST_RAY = (2, 60)  # the first that was tried: a late-bound app of an ingress, policies as classes
DELETE_SECONDS = 60.0  # after which `serve.delete` gives up waiting for an application that drains
ROUNDING = 1e-6  # Ray counts resources in parts of 10,000
BY_GRPC = "RAY_SERVE_PROXY_USE_GRPC"  # 1: answers reach Ray's proxies as messages of gRPC, not as objects of Ray
STORE_BYTES = 256 << 20  # Ray's object store: requests and answers do not go through it


def check_ray(installed: Callable[[str], str] = version) -> str:
    """Return Ray's version. Raises MissingExtra or ClusterError where it cannot be used."""
    try:
        found = installed("ray")
    except PackageNotFoundError:
        raise MissingExtra("a cluster needs Ray Serve", extra="ray") from None
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise ClusterError(f"Ray {found} is installed, {oldest} or newer is needed: pip install 'ray[serve]>={oldest}'")
    return found


@dataclass(slots=True)
class Cluster:
    """A cluster that runs."""

    settings: Settings  # of its proxies
    request_seconds: float = 0.0  # the longest that a request may take which a replica has begun
    drain_seconds: float = 0.0  # the longest that a replica which was asked for may take to end its requests

    def deploy(self, config: ClusterConfig) -> None:
        """Start the application, or change it. Requests that have begun keep the time that they were given."""
        self.request_seconds = max(self.request_seconds, config.request_seconds(os.environ))
        self.drain_seconds = max(self.drain_seconds, config.drain_seconds(os.environ, longest=self.request_seconds))
        deploy(config, longest=self.request_seconds)


@contextmanager
def running(config: ClusterConfig, *, address: str | None = None) -> Iterator[Cluster]:
    """Run a cluster: of its own on this machine, or in the Ray at `address`. Leaving it drains the replicas."""
    check_ray()
    given = config.options(os.environ)
    if address is None:
        _check_gpus(config.cluster.gpus)
        settings = settings_of(given)
        bind(settings).close()  # an address in use is an error before anything starts
        set_proxies(os.environ)
    else:  # devices and ports are those of other machines
        settings = Settings.of(**{name: value for name, value in given.items() if name in HINTS})
    import ray
    from ray import serve

    _join(address)
    try:
        _check_room(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        _listen(settings)
        cluster = Cluster(settings)
        try:
            cluster.deploy(config)
            yield cluster
        finally:  # also of an application that did not start
            _drain(config.cluster.name, within=cluster.drain_seconds)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _check_gpus(gpus: float) -> None:
    """Raise InvalidRequest if this machine has not the GPUs of one replica."""
    import torch

    there = torch.cuda.device_count()
    if there < gpus:
        raise InvalidRequest(
            f"gpus {gpus:g} in the section cluster: torch finds {there} CUDA devices here; lower gpus or leave them "
            "out, or name a Ray that has more by --address"
        )


def _listen(settings: Settings) -> None:
    """Start Ray's proxies. Raises where they listen already, but elsewhere: Ray would ignore these settings."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    try:
        serve.start(proxy_location="EveryNode", http_options=http_options(settings))
    except (TimeoutError, RuntimeError, ray.exceptions.RayError) as error:
        where = f"port {settings.port} of {settings.host}"
        raise ClusterError(f"Ray's proxies cannot listen on {where} of every node: {reason(str(error))}") from None
    there = _get_global_client().http_config
    if (there.host, there.port) != (settings.host, settings.port):
        raise InvalidRequest(
            f"Ray Serve listens on host {there.host} and port {there.port} there, not on {settings.host} and "
            f"{settings.port}: give its host and port, or `serve shutdown` it first"
        )


def deploy(config: ClusterConfig, *, longest: float = 0.0) -> None:
    """Start the application, or change the one that runs.

    Replicas take over live settings while they run. Where other options differ, new ones start, and the old ones drain.
    `longest`: seconds that requests of running replicas may take."""
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from paceline.cluster.deployment import application

    try:
        made = application(config, longest=longest)
        serve.run(made, name=config.cluster.name, route_prefix=config.cluster.route_prefix)
    except (RuntimeError, TimeoutError, RayServeException, ray.exceptions.RayError) as error:
        said = "\n".join(_messages(config.cluster.name)) or str(error)
        raise ClusterError(f"the replicas do not start: {reason(said)}") from None


def _drain(name: str, *, within: float) -> None:
    """End an application once its requests have ended. `within`: seconds after which Ray kills its replicas."""
    from ray import serve

    for _ in range(2 + int(within // DELETE_SECONDS)):
        with suppress(TimeoutError):
            serve.delete(name)
            return
    raise ClusterError(f"Ray has not ended the application {name} within {within:g} s: see `ray status` and its log")


def _messages(name: str) -> list[str]:
    """Return Serve's words about an application's deployments: the error of `serve.run` does not name their reason."""
    from ray import serve

    found = serve.status().applications.get(name)
    return [] if found is None else [deployment.message for deployment in found.deployments.values()]


def reason(text: str) -> str:
    """Find the error of a replica in what Ray says of it: the last line of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(paceline\.errors\.)?[A-Za-z_.]+: ", line)]
    own = [line for line in named if line.startswith("paceline.errors.")]
    return (own or named or lines or ["no reason is known"])[-1].removeprefix("paceline.errors.")


def set_proxies(environ: Any) -> None:
    """Have Ray's proxies load the door, and get answers by gRPC unless a user wants it otherwise: a chunk of a stream
    then takes them and a replica about half of the time. Raises ClusterError where they are told to load another door.
    """
    environ.setdefault(BY_GRPC, "1")
    if environ.setdefault(VARIABLE, IMPORT_PATH) != IMPORT_PATH:
        raise ClusterError(f"{VARIABLE} is {environ[VARIABLE]!r}: unset it, so that the proxies load {IMPORT_PATH}")


def http_options(settings: Settings) -> dict[str, Any]:
    """Options of Ray's proxies."""
    tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key} if settings.tls_cert else {}
    return {"host": settings.host, "port": settings.port, **tls}


def _join(address: str | None) -> None:
    """Start Ray on this machine, or join the one at `address`."""
    import ray

    try:
        if address is None:
            ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES)
        else:
            ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"cannot use Ray: {' '.join(str(error).split())}") from None


def _check_room(config: ClusterConfig, nodes: Iterable[Mapping[str, float]]) -> None:
    """Raise where the fewest replicas do not fit: Ray would wait for nodes without a word.

    `nodes`: resources of each. A replica is on one node, so that the rest of two nodes is room for none."""
    cluster = config.cluster
    each = {name: value for name, value in (("CPU", cluster.cpus), ("GPU", cluster.gpus)) if value}
    if not each:
        return
    there = [{name: node.get(name, 0.0) for name in each} for node in nodes]
    room = sum(min(int(node[name] / value + ROUNDING) for name, value in each.items()) for node in there)
    if room < cluster.min_replicas:
        needed = " and ".join(f"{value:g} {name}s" for name, value in each.items())
        found = ", ".join(" and ".join(f"{value:g} {name}s" for name, value in node.items()) for node in there)
        raise InvalidRequest(
            f"min_replicas {cluster.min_replicas}: a replica needs {needed} of one node, and there is room for {room} "
            f"(nodes with {found or 'nothing'}); lower min_replicas, {' or '.join(f'{name.lower()}s' for name in each)}"
        )
