"""Cluster: several servers as one, on Ray Serve.

paceline cluster up cluster.yaml
paceline cluster up cluster.yaml --address auto

The file has the options of `paceline serve`, and a section `cluster` with those of its replicas (docs/cluster.md).
SIGHUP reads it anew: limits and keys change in place; for other options new replicas start, and the old ones drain.
Ctrl-C or SIGTERM drains and ends it.
"""

from __future__ import annotations

import signal
import threading
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.cli.interrupts import stopped_by_signals
from paceline.cli.serve import check_extra
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cluster.config import ClusterConfig

UP = """Start a cluster and stay until Ctrl-C.

paceline cluster up cluster.yaml
paceline cluster up cluster.yaml --address ray://head:10001

Without --address Ray is started on this machine, and ends with the command.
"""
LOOK_SECONDS = 0.5  # time until a signal is heard


def add_arguments(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="cluster", metavar="COMMAND", required=True, parser_class=type(parser))
    up = kinds.add_parser(
        "up",
        help="start a cluster and stay until Ctrl-C",
        description=UP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    up.set_defaults(parser=up)
    up.add_argument("--verbose", action="store_true", default=SUPPRESS, help="show the log, with tracebacks")
    up.add_argument("config", metavar="FILE", help="YAML with options of `serve`, and a section `cluster`")
    up.add_argument("--address", metavar="ADDRESS", help="of a Ray that runs, or auto (default: one of its own)")


def run(args: Namespace) -> int:
    check_extra()
    from paceline.cluster.config import ClusterConfig
    from paceline.cluster.up import check_ray, running

    check_ray()
    config = ClusterConfig.read(args.config)
    with running(config, address=args.address) as cluster:
        print(_banner(config, cluster.settings.url, args.address), flush=True)
        follow(partial(change, config, args.config, cluster.deploy))
    return 0


def change(before: ClusterConfig, path: str, deploy: Callable[[ClusterConfig], None]) -> None:
    """Read the file again, and change the cluster. `before`: what its proxies were started with."""
    wanted = type(before).read(path)
    before.check_change(wanted)
    deploy(wanted)


def follow(change: Callable[[], None], *, stop: threading.Event | None = None) -> None:
    """Wait for Ctrl-C or SIGTERM, and call `change` on SIGHUP. A change that fails is said, and changes nothing."""
    asked, ended = threading.Event(), stop or threading.Event()
    before = signal.signal(signal.SIGHUP, lambda number, frame: asked.set())
    try:
        with stopped_by_signals():  # again: Ray has handlers of its own
            while not ended.wait(LOOK_SECONDS):
                if asked.is_set():
                    asked.clear()
                    _try(change)
    except KeyboardInterrupt:
        print("draining: running requests end first", flush=True)
    finally:
        signal.signal(signal.SIGHUP, before)


def _try(change: Callable[[], Any]) -> None:
    try:
        change()
        print("the file was read anew", flush=True)
    except PacelineError as error:
        print(f"nothing was changed: {error}", flush=True)


def _banner(config: ClusterConfig, url: str, address: str | None = None) -> str:
    cluster = config.cluster
    replicas = f"{cluster.min_replicas} to {cluster.max_replicas}" if cluster.scales else str(cluster.min_replicas)
    routing = {"prefix": "session and prefix", "session": "session", "none": "load alone"}[cluster.routing]
    base = f"{url}{cluster.route_prefix.rstrip('/')}/v1"
    where = f"  on each node with a replica, in the Ray at {address}; 127.0.0.1 is the node itself\n" if address else ""
    return (
        f"{replicas} replicas, each with {cluster.cpus:g} CPUs and {cluster.gpus:g} GPUs, routing by {routing}\n"
        f"  {base}   for OpenAI's clients, as base_url\n{where}"
        "Ctrl-C to drain and stop; SIGHUP to read the file anew"
    )
