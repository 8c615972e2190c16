"""Several servers as one: replicas on Ray Serve, each of them the server's own app.

    from paceline.cluster import app       # for `serve run paceline.cluster:app model=smollm2`, or a Serve config file

docs/cluster.md has the options. Everything but `deployment`, `router` and `up` works without Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(given: Mapping[str, Any]) -> Any:
    """Make the Serve application of a configuration: options of `paceline serve`, with a section `cluster`.

    Serve calls it with the `args` of an application, or with the `name=value` words of `serve run`."""
    from paceline.cluster.config import ClusterConfig
    from paceline.cluster.deployment import application

    return application(ClusterConfig.of(given, where="the arguments of the application"))
