"""The command before Ray is there: versions, ports, files, signals."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.cli import cluster as command
from paceline.cli.main import main
from paceline.cluster import up
from paceline.cluster.config import ClusterConfig
from paceline.cluster.up import check_ray, http_options, reason, set_proxies
from paceline.errors import ClusterError, InvalidRequest, MissingExtra
from paceline.server.settings import Settings
from tests.cluster import fake_ray


def absent(name: str) -> str:
    raise PackageNotFoundError(name)


def test_ray_is_needed_in_a_version_that_was_tried() -> None:
    with pytest.raises(MissingExtra, match=r"a cluster needs Ray Serve; .* `pip install '.\[ray\]'`"):
        check_ray(absent)
    with pytest.raises(ClusterError, match=r"Ray 2\.9\.3 is installed, 2\.60 or newer is needed"):
        check_ray(lambda name: "2.9.3")
    assert check_ray(lambda name: "3.0.0.dev0") == "3.0.0.dev0"


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_ray, "__defaults__", (absent,))
    assert main(["cluster", "up", "nowhere.yaml"]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("max_replicas: 2\n", "unknown option in"), ("cluster: {replicas: 2}\n", "min_replicas"), ("[", "is not YAML")],
)
def test_a_wrong_file_is_an_error_before_anything_starts(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_ray, "__defaults__", (lambda name: "2.60.0",))
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert main(["cluster", "up", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_ray, "__defaults__", (lambda name: "2.60.0",))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ClusterConfig.of({"port": taken.getsockname()[1]}, where="f")
        with pytest.raises(InvalidRequest, match=r"cannot listen on .*: Address already"), up.running(config):
            pass


@pytest.mark.parametrize(("there", "degree"), [(0, 1), (1, 2)])
def test_gpus_that_this_machine_has_not_are_an_error_before_anything_starts(
    there: int, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_ray, "__defaults__", (lambda name: "2.60.0",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    config = ClusterConfig.of({"tensor_parallel": degree, "cluster": {"gpus": degree}}, where="f")
    with (
        pytest.raises(InvalidRequest, match=f"gpus {degree} in the section cluster: torch finds {there} CUDA devices"),
        up.running(config),
    ):
        pass


@dataclass
class Elsewhere:
    """Ray on other machines: what it is, and what it is told."""

    nodes: list[dict[str, Any]]
    listens: tuple[str, int] | None = None  # where Serve listens already
    told: list[str] = field(default_factory=list)

    def start(self, *, http_options: dict[str, Any], **_: Any) -> None:
        self.told.append("listen")
        self.listens = self.listens or (http_options["host"], http_options["port"])


def elsewhere(monkeypatch: pytest.MonkeyPatch, *nodes: float, listens: tuple[str, int] | None = None) -> Elsewhere:
    """Put fakes where Ray's modules would be. `nodes`: CPUs of each."""
    fake_ray.install(monkeypatch)
    monkeypatch.setattr(check_ray, "__defaults__", (lambda name: "2.60.0",))
    found = Elsewhere([{"Alive": True, "Resources": {"CPU": cpus}} for cpus in nodes], listens)
    ray, serve, context = sys.modules["ray"], sys.modules["ray.serve"], ModuleType("ray.serve.context")
    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda name=name, **_: found.told.append(name), raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: found.nodes, raising=False)
    monkeypatch.setattr(ray, "exceptions", SimpleNamespace(RayError=ConnectionError), raising=False)
    monkeypatch.setattr(serve, "start", found.start, raising=False)
    monkeypatch.setattr(serve, "delete", lambda name: found.told.append("delete"), raising=False)
    monkeypatch.setattr(serve, "shutdown", lambda: found.told.append("serve's shutdown"), raising=False)
    context.__dict__["_get_global_client"] = lambda: SimpleNamespace(
        http_config=SimpleNamespace(host=(found.listens or ("", 0))[0], port=(found.listens or ("", 0))[1])
    )
    monkeypatch.setitem(sys.modules, "ray.serve.context", context)
    monkeypatch.setattr(up, "deploy", lambda config, *, longest: found.told.append("deploy"))
    return found


def test_ports_and_devices_of_this_machine_are_no_matter_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = elsewhere(monkeypatch, 2.0)
    ray.nodes[0]["Resources"]["GPU"] = 1.0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = {"port": port, "device": "cuda", "host": "127.0.0.1", "cluster": {"gpus": 1}}
        config = ClusterConfig.of(given, where="f")
        with up.running(config, address="ray://head:10001") as cluster:
            assert (cluster.settings.host, cluster.settings.port) == ("127.0.0.1", port)
    assert ray.told == ["init", "listen", "deploy", "delete", "shutdown"], "Serve there goes on"


def test_an_application_that_does_not_fit_is_neither_deployed_nor_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = elsewhere(monkeypatch, 1.0, 1.0)
    ray.nodes.append({"Alive": False, "Resources": {"CPU": 8.0}})
    config = ClusterConfig.of({"cluster": {"cpus": 2}}, where="f")
    with pytest.raises(InvalidRequest, match="nodes with 1 CPUs, 1 CPUs"), up.running(config, address="head:6379"):
        pass
    assert ray.told == ["init", "shutdown"]


def test_serve_that_listens_elsewhere_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = elsewhere(monkeypatch, 2.0, listens=("0.0.0.0", 8000))
    with (
        pytest.raises(
            InvalidRequest, match=r"listens on host 0\.0\.0\.0 and port 8000 there, not on 127\.0\.0\.1 and 9:"
        ),
        up.running(ClusterConfig.of({"port": 9}, where="f"), address="auto"),
    ):
        pass
    assert ray.told == ["init", "listen", "shutdown"]
    with up.running(ClusterConfig.of({"host": "0.0.0.0", "port": 8000}, where="f"), address="auto"):
        assert ray.told[-1] == "deploy"


def test_a_port_that_is_taken_on_a_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, 2.0)

    def refused(**_: Any) -> None:
        raise RuntimeError("Failed to bind to address '0.0.0.0:9'.")

    monkeypatch.setattr("ray.serve.start", refused)
    message = r"proxies cannot listen on port 9 of 127\.0\.0\.1 of every node: Failed to bind"
    with (
        pytest.raises(ClusterError, match=message),
        up.running(ClusterConfig.of({"port": 9}, where="f"), address="auto"),
    ):
        pass


def test_the_proxies_load_the_door_unless_they_are_told_otherwise() -> None:
    environ: dict[str, str] = {}
    set_proxies(environ)
    set_proxies(environ)
    assert environ == {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "paceline.cluster.door.middlewares",
        "RAY_SERVE_PROXY_USE_GRPC": "1",
    }
    set_proxies(environ := {"RAY_SERVE_PROXY_USE_GRPC": "0"})
    assert environ["RAY_SERVE_PROXY_USE_GRPC"] == "0", "a user's wish"
    with pytest.raises(ClusterError, match="is 'other': unset it"):
        set_proxies({"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "other"})


def test_proxies_listen_where_the_settings_say() -> None:
    assert http_options(Settings(host="::1", port=9)) == {"host": "::1", "port": 9}
    assert http_options(Settings(tls_cert="c", tls_key="k"))["ssl_keyfile"] == "k"


def test_replicas_that_never_fit_are_an_error() -> None:
    config = ClusterConfig.of({"cluster": {"min_replicas": 3, "max_replicas": 3, "cpus": 2}}, where="f")
    up._check_room(config, [{"CPU": 6.0}])
    up._check_room(config, [{"CPU": 5.0}, {}, {"CPU": 2.0}])
    with pytest.raises(
        InvalidRequest, match=r"2 CPUs of one node, and there is room for 2 \(nodes with 4 CPUs\); lower"
    ):
        up._check_room(config, [{"CPU": 4.0}])
    with pytest.raises(InvalidRequest, match=r"room for 2 \(nodes with 3 CPUs, 3 CPUs\); lower min_replicas, cpus"):
        up._check_room(config, [{"CPU": 3.0}, {"CPU": 3.0}])  # six together, but a replica is on one
    gpu = ClusterConfig.of({"cluster": {"gpus": 1, "cpus": 2}}, where="f")
    up._check_room(gpu, [{"CPU": 2.0, "GPU": 1.0}])
    with pytest.raises(InvalidRequest, match="2 CPUs and 1 GPUs of one node, and there is room for 0"):
        up._check_room(gpu, [{"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}])
    up._check_room(
        ClusterConfig.of({"cluster": {"cpus": 0.1, "min_replicas": 3, "max_replicas": 3}}, where="f"), [{"CPU": 0.3}]
    )
    up._check_room(ClusterConfig.of({"cluster": {"cpus": 0}}, where="f"), [])


def test_a_drain_that_takes_minutes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's call gives up after a minute, and a request may take ten."""
    fake_ray.install(monkeypatch)
    calls: list[str] = []

    def delete(name: str) -> None:
        calls.append(name)
        if len(calls) < ends:
            raise TimeoutError

    monkeypatch.setattr("ray.serve.delete", delete, raising=False)
    ends = 11
    up._drain("p", within=605.0)
    assert calls == ["p"] * 11
    ends = 100
    with pytest.raises(ClusterError, match="Ray has not ended the application p within 605 s"):
        up._drain("p", within=605.0)


def test_what_serve_refuses_is_an_error_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prefix that another application has, such as after a change of the file: the cluster must go on."""
    deploy = up.deploy
    elsewhere(monkeypatch, 2.0)
    refused = sys.modules["ray.serve.exceptions"].__dict__["RayServeException"]

    def run(*_: Any, **__: Any) -> None:
        raise refused('Prefix / is being used by application "other".')

    monkeypatch.setattr("ray.serve.run", run, raising=False)
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={}), raising=False)
    file, config = tmp_path / "c.yaml", ClusterConfig.of({"model": "m"}, where="f")
    file.write_text("model: m\n")
    with pytest.raises(ClusterError, match='do not start: Prefix / is being used by application "other"'):
        deploy(config)
    command._try(lambda: command.change(config, str(file), deploy))
    assert capsys.readouterr().out.startswith("nothing was changed: the replicas do not start: Prefix /")


@pytest.mark.parametrize(("changed", "within"), [(1200, 1205), (60, 605), (600, 605)])
def test_a_drain_waits_for_requests_of_every_file_that_was_read(
    changed: float, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command gives up no earlier than Ray may, whichever file is the newest."""
    elsewhere(monkeypatch, 2.0)

    def delete(name: str) -> None:
        raise TimeoutError

    monkeypatch.setattr("ray.serve.delete", delete)
    first, second = (ClusterConfig.of({"request_timeout": seconds}, where="f") for seconds in (600, changed))

    def live() -> None:
        with up.running(first, address="auto") as cluster:
            cluster.deploy(second)

    with pytest.raises(ClusterError, match=f"has not ended the application paceline within {within} s"):
        live()


@pytest.mark.parametrize(("drain", "ray_waits"), [({}, 605), ({"drain_timeout": 7}, 12)])
def test_a_shorter_request_timeout_cuts_no_request_that_has_begun(
    drain: dict[str, float], ray_waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests keep the time that they began with, also where a replica drains after the change."""
    deploy = up.deploy
    elsewhere(monkeypatch, 2.0)
    monkeypatch.setattr(up, "deploy", deploy)
    monkeypatch.setattr("ray.serve.exceptions", SimpleNamespace(RayServeException=ConnectionError), raising=False)
    waits: list[float] = []

    def run(application: Any, **_: Any) -> None:
        waits.append(application.options["graceful_shutdown_timeout_s"])

    monkeypatch.setattr("ray.serve.run", run, raising=False)
    with up.running(ClusterConfig.of({"request_timeout": 600}, where="f"), address="auto") as cluster:
        cluster.deploy(ClusterConfig.of({"request_timeout": 30} | drain, where="f"))
    assert waits == [605, ray_waits]


def test_the_reason_of_a_replica_is_found_in_what_ray_says() -> None:
    text = "Traceback:\n  File x\npaceline.errors.ModelNotFound: no model 'x': name one\n\nRuntimeError: gave up\n"
    assert reason(text) == "ModelNotFound: no model 'x': name one"
    assert reason("a\nValueError: bad\n") == "ValueError: bad"
    assert reason("only words") == "only words"
    assert reason("") == "no reason is known"


def test_the_file_is_read_on_a_signal_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    stop, calls = threading.Event(), []

    def change() -> None:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGHUP)
            raise InvalidRequest("max_waiting is no number")
        stop.set()

    threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)).start()
    before = signal.getsignal(signal.SIGHUP)
    command.follow(change, stop=stop)
    out = capsys.readouterr().out
    assert out == "nothing was changed: max_waiting is no number\nthe file was read anew\n"
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("port: 9", "port cannot change while the cluster runs: start it anew"),
        ("cluster: {name: x}", "name in the section cluster cannot change"),
        ("cluster: {routing: none}", "routing in the section cluster cannot change"),
        ("cluster: {max_imbalance: 3}", "max_imbalance in the section cluster cannot change"),
    ],
)
def test_what_ray_would_ignore_is_refused(line: str, message: str, tmp_path: Path) -> None:
    file, before = tmp_path / "c.yaml", ClusterConfig.of({"model": "m"}, where="f")
    file.write_text(f"model: m\n{line}\n")
    with pytest.raises(InvalidRequest, match=message):
        command.change(before, str(file), lambda config: pytest.fail("it was deployed"))


def test_a_change_of_the_file_is_deployed(tmp_path: Path) -> None:
    file, before = tmp_path / "c.yaml", ClusterConfig.of({"model": "m", "port": 9}, where="f")
    file.write_text("model: m\nport: '9'\nmax_waiting: 3\ncluster: {max_replicas: 2}\n")
    deployed: list[ClusterConfig] = []
    command.change(before, str(file), deployed.append)
    assert [config.live for config in deployed] == [{"max_waiting": 3}]


def test_a_signal_to_end_drains(capsys: pytest.CaptureFixture[str]) -> None:
    threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)).start()
    command.follow(lambda: None)
    assert capsys.readouterr().out == "draining: running requests end first\n"


def test_the_banner_says_what_runs() -> None:
    config = ClusterConfig.of({"cluster": {"max_replicas": 3, "route_prefix": "/small"}}, where="f")
    text = command._banner(config, "http://h:1")
    assert text.startswith("1 to 3 replicas, each with 1 CPUs and 0 GPUs, routing by session and prefix\n")
    assert "http://h:1/small/v1 " in text
