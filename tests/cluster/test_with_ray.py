"""A cluster on Ray: two replicas of a tiny model. Slow, and skipped where Ray is not installed.

clients/cluster.py shows more of it, with a real model: kills, scaling, 200 requests.
"""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import ClusterConfig
from paceline.cluster.up import deploy, running
from paceline.errors import ClusterError
from tests.cli.tiny_model import write_model

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


class Running:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given

    def config(self, **given: Any) -> ClusterConfig:
        return ClusterConfig.of(self.given | given, where="a test")

    def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> tuple[str, dict[str, Any]]:
        """The replica that answered, and the answer."""
        body = json.dumps({"prompt": "abc" * 30, "max_tokens": 12, "temperature": 1.0, "seed": 3} | fields).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        url = f"http://127.0.0.1:{self.given['port']}/v1/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, sent), timeout=120) as answer:
                return answer.headers["x-paceline-replica"], json.load(answer)
        except urllib.error.HTTPError as error:
            return error.headers["x-paceline-replica"], json.load(error)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("ray")
    given = {"model": str(write_model(folder)), "drafter": ["ngram"], "format": "fp32", "port": port}
    given |= {"state_dir": str(folder / "state")}
    found = Running(given | {"cluster": {"min_replicas": 2, "max_replicas": 2, "cpus": 0.5}})
    with running(found.config()):
        yield found


def replicas(cluster: Running) -> list[str]:
    return sorted({cluster.ask({"x-session-id": str(i)})[0] for i in range(16)})


def test_a_seeded_request_gives_the_same_text_from_both(cluster: Running) -> None:
    names = replicas(cluster)
    assert len(names) == 2
    for seed in range(5):
        answers = [cluster.ask({"x-paceline-replica": name}, seed=seed) for name in names]
        assert [name for name, _ in answers] == names
        assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


def test_a_prompt_and_a_session_stay(cluster: Running) -> None:
    assert len({cluster.ask(prompt="new " * 30, seed=i)[0] for i in range(8)}) == 1
    assert len({cluster.ask({"x-session-id": "s"}, prompt=str(i))[0] for i in range(8)}) == 1


def test_one_scrape_shows_all_replicas(cluster: Running) -> None:
    names = replicas(cluster)
    for _ in range(4):  # whichever replica gets it
        with urllib.request.urlopen(f"http://127.0.0.1:{cluster.given['port']}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert sorted(set(re.findall(r'vllm:num_requests_waiting{.*replica="([^"]+)"', text))) == names


def test_live_settings_change_in_place(cluster: Running) -> None:
    before = replicas(cluster)
    deploy(cluster.config(allowed_rules=["coupled"], max_waiting=3, request_timeout=50))
    try:
        found = [cluster.ask({"x-paceline-replica": name}, speculation={"rule": "block"}) for name in before]
        assert [name for name, _ in found] == before, "the same replicas"
        assert all(answer["error"]["code"] != "wrong_replica" for _, answer in found)
    finally:
        deploy(cluster.config())
    assert "error" not in cluster.ask(speculation={"rule": "block"})[1]
    assert replicas(cluster) == before


def test_other_options_start_new_replicas(cluster: Running) -> None:
    before = replicas(cluster)
    cluster.given["max_sequences"] = 4
    deploy(cluster.config())
    assert not set(replicas(cluster)) & set(before)


def test_a_replica_that_is_gone_is_no_other(cluster: Running) -> None:
    assert cluster.ask({"x-paceline-replica": "gone"})[1]["error"]["code"] == "wrong_replica"


def test_a_model_that_is_not_there_is_said(cluster: Running, tmp_path: Path) -> None:
    other = {"cluster": {"name": "other", "route_prefix": "/other", "cpus": 0.1}}
    with pytest.raises(ClusterError, match=r"the replicas do not start: .*nowhere"):
        deploy(cluster.config(model=str(tmp_path / "nowhere"), **other))
