"""What a cluster's configuration takes, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import NO_EFFECT, ClusterConfig
from paceline.errors import InvalidRequest, UnknownOption
from paceline.server.launch import load_model
from paceline.server.settings import HINTS, RELOADABLE


def config(**given: Any) -> ClusterConfig:
    return ClusterConfig.of(given, where="f.yaml")


def test_options_of_serve_and_of_the_cluster_stand_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nkv_memory: 2M\nmax_waiting: 7\ncluster:\n  max_replicas: 3\n  cpus: 2\n")
    found = ClusterConfig.read(str(file))
    assert (found.cluster.min_replicas, found.cluster.max_replicas, found.cluster.scales) == (1, 3, True)
    assert found.given == {"model": "m", "kv_memory": 2 << 20, "max_waiting": 7}
    assert found.live == {"max_waiting": 7}
    assert found.fixed == {"model": "m", "kv_memory": "2M"}
    assert found.options({})["cores"] == 2


def test_nothing_given_is_one_replica_of_the_usual_model() -> None:
    found = config()
    assert not found.cluster.scales
    assert found.options({})["model"] == "smollm2"
    assert (found.live, found.fixed) == ({}, {})


@pytest.mark.parametrize(("cpus", "cores"), [(8, 8), (2.5, 2), (3.9, 3), (0.25, 1), (0, 1)])
def test_a_replica_has_the_cores_that_ray_reserves(cpus: float, cores: int) -> None:
    """They are no wish for threads: what the same bits need is decided where the model is read."""
    found = config(cluster={"cpus": cpus}).options({})
    assert found["cores"] == cores
    assert "threads" not in found
    assert config(cluster={"cpus": cpus}, threads=3).options({})["threads"] == 3


def test_cores_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("paceline.llm.LLM", lambda model, **options: told.update(options))
    given = config(drafter=[], device="cpu", cluster={"cpus": 3}).options({})
    load_model(given, lambda done, total: None)
    assert (told["cores"], told["threads"]) == (3, None)


def test_a_replica_with_gpus_has_threads_as_a_server() -> None:
    assert not {"cores", "threads"} & config(cluster={"gpus": 1}).options({}).keys()


@pytest.mark.parametrize("degree", [1, 2, 8])
def test_each_rank_has_a_gpu(degree: int) -> None:
    """Cores are no limit there: a rank on a GPU needs one for moments."""
    found = config(tensor_parallel=degree, drafter_tensor_parallel=degree, cluster={"gpus": degree})
    assert found.reserved == {"cpus": 1.0, "gpus": degree}
    assert found.options({})["tensor_parallel"] == degree


def test_replicas_may_share_a_gpu_and_keep_the_same_bits() -> None:
    assert config(same_bits_across_degrees=True, cluster={"gpus": 0.5}).reserved["gpus"] == 0.5


@pytest.mark.parametrize("given", [{}, {"device": "auto"}])
def test_gpus_decide_on_the_device(given: dict[str, Any]) -> None:
    """Ray shows a replica without gpus those of its node, which others have reserved."""
    assert config(**given).options({})["device"] == "cpu"
    assert config(**given, cluster={"gpus": 1}).options({"PACELINE_DEVICE": "auto"})["device"] == "cuda"


def test_variables_of_a_node_that_do_not_fit_are_refused_there() -> None:
    with pytest.raises(InvalidRequest, match="device cuda without gpus"):
        config().options({"PACELINE_DEVICE": "cuda"})
    with pytest.raises(InvalidRequest, match="gpus 1 in the section cluster with tensor_parallel 2"):
        config(cluster={"gpus": 1}).options({"PACELINE_TENSOR_PARALLEL": "2"})
    with pytest.raises(InvalidRequest, match="tensor_parallel 4: each rank needs a core, and Ray reserves 2"):
        config(cluster={"cpus": 2}).options({"PACELINE_TENSOR_PARALLEL": "4"})


def test_the_environment_of_a_node_counts_before_the_file() -> None:
    found = config(max_waiting=7, api_keys=["a"]).options({"PACELINE_API_KEYS": "b,c", "PACELINE_MAX_WAITING": "9"})
    assert (found["api_keys"], found["max_waiting"]) == (("b", "c"), 9)


def test_a_section_may_be_json_as_serve_run_gives_it() -> None:
    assert config(cluster='{"max_replicas": 2}').cluster.max_replicas == 2
    with pytest.raises(InvalidRequest, match="no JSON object: 'x'"):
        config(cluster="x")


def test_options_of_proxies_reach_no_replica() -> None:
    found = config(host="::1", port=9, tls_cert="c", tls_key="k", served_name="n", log_json=True)
    assert found.fixed == {"served_name": "n", "log_json": True}
    assert set(found.live) | set(found.fixed) <= set(HINTS)
    assert set(found.live) <= RELOADABLE


BASE: dict[str, Any] = {
    "model": "m",
    "drafter": ["ngram"],
    "kv_memory": "2M",
    "cluster": {"cpus": 2, "max_replicas": 2},
}
ANOTHER: dict[str, Any] = {  # another value for some options
    "max_waiting": 9,
    "api_keys": ["k"],
    "request_timeout": 5,
    "allowed_rules": ["coupled"],
    "log_prompts": True,
}


@pytest.mark.parametrize("given", [{name: value} for name, value in ANOTHER.items()], ids=list(ANOTHER))
def test_live_settings_leave_the_version_as_it_is(given: dict[str, Any]) -> None:
    assert set(given) <= RELOADABLE
    assert config(**BASE, **given).version == config(**BASE).version


@pytest.mark.parametrize(
    "given",
    [
        {"port": 9},
        {"host": "::1"},
        {"cluster": {"cpus": 2, "min_replicas": 3, "max_replicas": 5, "target_waiting": 7, "health_period": 2}},
        {"kv_memory": 2 << 20},
        {"drafter": "ngram"},
        dict(reversed(BASE.items())),
    ],
    ids=str,
)
def test_replicas_that_would_be_started_alike_have_one_version(given: dict[str, Any]) -> None:
    assert config(**BASE | given).version == config(**BASE).version


@pytest.mark.parametrize(
    "given",
    [
        {"model": "other"},
        {"drafter": ["suffix"]},
        {"drafter": ["ngram", "suffix"]},
        {"kv_memory": "3M"},
        {"threads": 3},
        {"served_name": "n"},
        {"log_json": True},
        {"canary": "drafter=suffix share=0.1"},
        {"state_dir": "s"},
        {"cluster": {"cpus": 1, "max_replicas": 2}},
        {"cluster": {"cpus": 2, "gpus": 1, "max_replicas": 2}},
        {"cluster": {"cpus": 2, "min_replicas": 2, "max_replicas": 2}},  # no autoscaler
    ],
    ids=str,
)
def test_options_of_the_start_are_in_the_version(given: dict[str, Any]) -> None:
    assert config(**BASE | given).version != config(**BASE).version


def test_paceline_s_own_version_is_in_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config(**BASE).version
    monkeypatch.setattr("paceline.cluster.config.__version__", "9.9")
    assert config(**BASE).version != before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_wating": 3}, "unknown option in f.yaml 'max_wating'; did you mean 'max_waiting'"),
        ({"cluster": {"max_replica": 3}}, "section cluster of f.yaml 'max_replica'; did you mean 'max_replicas'"),
        ({"cluster": [1]}, "cluster in f.yaml holds lines such as"),
        ({"cluster": {"max_replicas": "x"}}, "max_replicas in the section cluster of f.yaml must be a whole number"),
        ({"cluster": {"min_replicas": 3}}, "max_replicas 1 is less than min_replicas 3: give both"),
        ({"cluster": {"min_replicas": 0}}, "min_replicas must be between 1 and"),
        ({"cluster": {"routing": "prefixes"}}, "unknown routing 'prefixes'; did you mean 'prefix'"),
        ({"cluster": {"route_prefix": "x"}}, "route_prefix is a path such as / or /small, not 'x'"),
        ({"cluster": {"route_prefix": "/x/"}}, "not '/x/'"),
        ({"cluster": {"name": ""}}, "not an empty text"),
        ({"cluster": {"target_kv_usage": 2}}, r"target_kv_usage must be in \(0, 1\]"),
        ({"cluster": {"stats_period": 0}}, r"stats_period must be in \(0"),
        ({"cluster": {"upscale_delay": -1}}, "upscale_delay must be in"),
        ({"tensor_parallel": 2}, "each rank needs a core, and Ray reserves 1 for a replica; raise cpus"),
        ({"tensor_parallel": 4, "cluster": {"cpus": 3}}, "Ray reserves 3 for a replica"),
        ({"tensor_parallel": 2}, "raise cpus in the section cluster, or give gpus"),
        ({"device": "cuda"}, "device cuda without gpus in the section cluster: .* give gpus 1"),
        ({"device": "cuda", "tensor_parallel": 2}, "give gpus 2"),
        ({"device": "cpu", "cluster": {"gpus": 1}}, "gpus 1 in the section cluster with device cpu: .* leave out one"),
        (
            {"cluster": {"gpus": 2}},
            "gpus 2 .* with tensor_parallel 1: .* one GPU for each rank; give gpus 1, or tensor_parallel 2$",
        ),
        ({"cluster": {"gpus": 1.5}}, r"gpus 1\.5 .* with tensor_parallel 1: .*; give gpus 1$"),
        (
            {"tensor_parallel": 2, "cluster": {"gpus": 1, "cpus": 4}},
            "gpus 1 .* with tensor_parallel 2: .*; give gpus 2$",
        ),
        (
            {"tensor_parallel": 2, "cluster": {"gpus": 0.5, "cpus": 4}},
            r"gpus 0\.5 .* with tensor_parallel 2: .* gpus 2$",
        ),
        ({"tensor_parallel": 2, "cluster": {"gpus": 4}}, "; give gpus 2, or tensor_parallel 4$"),
        ({"port": 70000}, "port must be between 0 and 65535"),
        ({"max_sequences": 0}, "max_sequences must be between 1"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ClusterConfig.of(given, where="f.yaml")


@pytest.mark.parametrize("name", NO_EFFECT)
def test_an_option_without_effect_is_refused(name: str) -> None:
    value = {"record": "f", "record_without_text": True, "record_share": 0.5}.get(name, 5)
    with pytest.raises(InvalidRequest, match=f"{name} has no effect in a cluster: .*; leave it out"):
        config(**{name: value})


def test_an_unknown_option_is_of_the_kind_that_says_so() -> None:
    with pytest.raises(UnknownOption):
        config(nonsense=1)
