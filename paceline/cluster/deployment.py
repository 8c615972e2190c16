"""The Serve application of a configuration: replicas, their router and their autoscaling. Imports Ray.

One actor is one replica with one engine. It starts the other ranks of a split target itself, as processes on its node:
they have the cores and see the GPUs that Ray reserves for the actor.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from paceline import __version__
from paceline.cluster.config import ClusterConfig, ClusterOptions
from paceline.cluster.front import Front
from paceline.cluster.replica import Replica
from paceline.config import EngineConfig
from paceline.server import logs
from paceline.server.settings import Settings

OTHER_REQUESTS = 64  # requests of a replica beside those that its engine has: probes, metrics, the playground
DRAIN_LOOP = 0.5  # seconds between two looks at the requests of a replica that is to end
ANSWER_SECONDS = 5.0  # for other replicas to answer a replica; Prometheus waits 10
TRIES = 3  # starts of a replica before the deployment has failed
METRICS_PERIOD = 1.0  # seconds between two reports of a load


@serve.ingress()
class ServedReplica(Replica):
    """A replica as Serve's actor."""

    async def __init__(self, **given: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        await self.start(name=serve.get_replica_context().replica_id.unique_id, **given)

    def __serve_build_asgi_app__(self) -> Front:
        return self.front()

    async def ask_all(self, method: str) -> list[Any]:
        """Call a method of every replica of this deployment. Those that fail or are late are left out."""
        here = serve.get_replica_context()
        try:
            asked = serve.get_deployment_handle(here.deployment, here.app_name).broadcast(method)
            found = await asked.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except (RayServeException, TimeoutError) as error:
            logs.say("replicas do not answer", level=logging.WARNING, method=method, reason=str(error))
            return []
        return [each for each in found if not isinstance(each, BaseException)]

    async def __del__(self) -> None:
        await self.close()


def application(config: ClusterConfig, *, longest: float = 0.0) -> Any:
    """Make the application that `serve.run` takes. `longest`: seconds that requests of replicas which run already may
    take."""
    given, cluster = config.options(os.environ), config.cluster
    waiting = given.get("max_waiting", Settings().max_waiting)
    deployment = serve.deployment(
        ServedReplica,
        name="Paceline",
        user_config=config.live,
        max_ongoing_requests=given.get("max_sequences", EngineConfig().max_sequences) + waiting + OTHER_REQUESTS,
        max_queued_requests=waiting + OTHER_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        graceful_shutdown_timeout_s=config.drain_seconds(os.environ, longest=longest),
        graceful_shutdown_wait_loop_s=DRAIN_LOOP,
        max_constructor_retry_count=TRIES,
        health_check_period_s=cluster.health_period,
        request_router_config=routing(cluster),
        logging_config={"enable_access_log": False},  # the server has a line for each request
        **scaling(cluster),
        **resources(cluster),
    )
    versioned = deployment.options(version=config.version, _internal=True)  # else Ray takes each run for new code
    return versioned.bind(version=__version__, cluster=config.reserved, fixed=config.fixed)


def resources(cluster: ClusterOptions) -> dict[str, Any]:
    """Return the resources that Ray reserves for all ranks of a replica: one bundle, and so of one node."""
    return {"ray_actor_options": {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus}}


def routing(cluster: ClusterOptions) -> RequestRouterConfig:
    if cluster.routing == "none":
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="paceline.cluster.router.AffinityRouter",
        request_router_kwargs={"max_imbalance": cluster.max_imbalance, "prefixes": cluster.routing == "prefix"},
        request_routing_stats_period_s=cluster.stats_period,
    )


def scaling(cluster: ClusterOptions) -> dict[str, Any]:
    if not cluster.scales:
        return {"num_replicas": cluster.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="paceline.cluster.scaling:Policy",
        policy_kwargs={"target_waiting": cluster.target_waiting, "target_kv_usage": cluster.target_kv_usage},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.min_replicas,
            max_replicas=cluster.max_replicas,
            upscale_delay_s=cluster.upscale_delay,
            downscale_delay_s=cluster.downscale_delay,
            metrics_interval_s=METRICS_PERIOD,
            look_back_period_s=max(2 * METRICS_PERIOD, cluster.upscale_delay),
            policy=policy,
        )
    }
