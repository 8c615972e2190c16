"""What is in deploy/ for gateways, autoscalers and Ray fits what the server really exports and takes."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster.config import ClusterConfig
from paceline.cluster.door import IMPORT_PATH, VARIABLE
from paceline.cluster.up import BY_GRPC
from paceline.kernels.base import PAGE_SIZE
from paceline.server.metrics import Metrics
from paceline.server.settings import Settings
from tests.server.test_deploy import CONTAINER, DEPLOY, MANIFESTS, PORT, ROOT, bridge, metric_names

POD_LABELS = MANIFESTS["deployment"]["spec"]["template"]["metadata"]["labels"]
# Metrics that the endpoint picker of llm-d and of the inference extension reads of engine type vllm.
PICKED = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


def manifest(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


POOL, ROUTE = manifest("gateway/inferencepool.yaml"), manifest("gateway/httproute.yaml")
HPA, KEDA = manifest("autoscaling/hpa/hpa.yaml"), manifest("autoscaling/keda/keda.yaml")
RAY = manifest("kuberay/rayservice.yaml")
SERVE = yaml.safe_load(RAY["spec"]["serveConfigV2"])
[APPLICATION] = SERVE["applications"]


@pytest.mark.parametrize("path", [p for p in DEPLOY.rglob("*.yaml") if p.parent.name != "deploy"], ids=lambda p: p.name)
def test_every_manifest_is_named(path: Path) -> None:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["apiVersion"]
    assert found["kind"]
    assert found["kind"] == "Kustomization" or found["metadata"]["name"] == "paceline"


def test_a_picker_finds_its_metrics_by_vllms_names() -> None:
    assert POD_LABELS["llm-d.ai/engine-type"] == "vllm"
    assert set(PICKED) <= metric_names()
    assert "vllm:cache_config_info" in metric_names()


def test_the_size_of_the_cache_stands_in_labels() -> None:
    found = {family.name: family for family in Metrics(bridge()).collect()}["vllm:cache_config_info"]
    [sample] = found.samples
    assert sample.value == 1
    assert sample.labels == {"model_name": "tiny", "block_size": str(PAGE_SIZE), "num_gpu_blocks": "0"}


def test_the_pool_selects_the_pods() -> None:
    assert POOL["spec"]["selector"]["matchLabels"].items() <= POD_LABELS.items()
    assert POOL["spec"]["targetPorts"] == [{"number": PORT}]
    assert POD_LABELS["llm-d.ai/model"] == CONTAINER["args"][0]
    [backend] = ROUTE["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", POOL["metadata"]["name"])
    assert backend["group"] == POOL["apiVersion"].partition("/")[0]
    assert float(ROUTE["spec"]["rules"][0]["timeouts"]["request"].rstrip("s")) == Settings().request_timeout


def test_autoscalers_ask_for_metrics_that_exist() -> None:
    queries = [trigger["metadata"]["query"] for trigger in KEDA["spec"]["triggers"]]
    queries.append((DEPLOY / "autoscaling/hpa/hpa.yaml").read_text(encoding="utf-8"))
    for query in queries:
        named = set(re.findall(r"(?:vllm|paceline):\w+", query))
        assert named
        assert named <= metric_names()
    [metric] = HPA["spec"]["metrics"]
    assert f"name: {{as: {metric['pods']['metric']['name']}}}" in queries[-1]


def test_autoscalers_scale_the_deployment() -> None:
    target, fewest = MANIFESTS["deployment"], MANIFESTS["poddisruptionbudget"]["spec"]["minAvailable"]
    reference = HPA["spec"]["scaleTargetRef"]
    assert (reference["apiVersion"], reference["kind"]) == (target["apiVersion"], target["kind"])
    assert reference["name"] == KEDA["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert HPA["spec"]["minReplicas"] == KEDA["spec"]["minReplicaCount"] > fewest
    [slowly] = HPA["spec"]["behavior"]["scaleDown"]["policies"]
    grace = target["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert slowly["periodSeconds"] > grace


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_an_apply_leaves_the_number_of_pods_to_the_autoscaler(name: str) -> None:
    folder = DEPLOY / "autoscaling" / name
    kustomization, deployment = manifest(f"autoscaling/{name}/kustomization.yaml"), MANIFESTS["deployment"]
    [pods, own] = kustomization["resources"]
    assert (folder / pods).resolve() == DEPLOY / "k8s"
    assert (folder / own).exists()
    [patch] = kustomization["patches"]
    assert patch["target"] == {"kind": deployment["kind"], "name": deployment["metadata"]["name"]}
    [change] = yaml.safe_load(patch["patch"])
    assert change == {"op": "remove", "path": "/spec/replicas"}
    assert "replicas" in deployment["spec"], "a patch that removes what is not there is an error"


def test_an_apply_leaves_the_number_of_workers_to_rays_autoscaler() -> None:
    spec = RAY["spec"]["rayClusterConfig"]
    assert spec["enableInTreeAutoscaling"]
    assert all("replicas" not in group and group["minReplicas"] for group in spec["workerGroupSpecs"])


# Ray.


def test_the_file_for_a_first_try_is_a_configuration() -> None:
    config = ClusterConfig.read(str(DEPLOY / "cluster.yaml"))
    assert config.cluster.scales
    assert config.given["port"] == PORT


def test_rays_application_is_one_that_paceline_makes() -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))
    config = ClusterConfig.of(APPLICATION["args"], where="the manifest")
    assert (config.cluster.route_prefix, config.cluster.name) == (APPLICATION["route_prefix"], APPLICATION["name"])
    assert not {"api_keys", "admin_key"} & config.given.keys()  # they belong into a Secret
    assert SERVE["http_options"]["port"] == PORT


def test_every_node_of_ray_has_the_door_and_the_keys() -> None:
    spec = RAY["spec"]["rayClusterConfig"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    containers = [container for group in groups for container in group["template"]["spec"]["containers"]]
    assert len(containers) == 2
    for container in containers:
        assert {"name": VARIABLE, "value": IMPORT_PATH} in container["env"]
        assert {"name": BY_GRPC, "value": "1"} in container["env"]
        assert container["envFrom"] == CONTAINER["envFrom"]


def test_workers_have_room_for_replicas_and_time_to_drain() -> None:
    [workers] = RAY["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    config, pod = ClusterConfig.of(APPLICATION["args"], where="the manifest"), workers["template"]["spec"]
    [container] = pod["containers"]
    assert float(container["resources"]["limits"]["cpu"]) >= config.cluster.cpus
    assert workers["maxReplicas"] >= config.cluster.max_replicas
    assert config.drain_seconds({}) > config.given["request_timeout"]
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds({})
    assert RAY["spec"]["rayClusterDeletionDelaySeconds"] >= pod["terminationGracePeriodSeconds"], "60 by default"


def test_rays_version_is_one_that_the_extra_allows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    least = next(re.findall(r">=([\d.]+)", package)[0] for package in extras["ray"] if package.startswith("ray"))
    given = RAY["spec"]["rayClusterConfig"]["rayVersion"]
    assert tuple(map(int, given.split(".")))[:2] >= tuple(map(int, least.split(".")))
