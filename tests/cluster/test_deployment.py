"""What Ray is told, and how its requests are read, with as much of Ray as `fake_ray` has."""

from __future__ import annotations

import asyncio
import pickle
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import __version__
from paceline.cluster import app
from paceline.cluster.affinity import Affinity, Beginnings
from paceline.cluster.config import LAST_ANSWERS_SECONDS, ClusterConfig
from paceline.cluster.replica import Replica
from paceline.config import EngineConfig
from paceline.errors import UnknownOption
from paceline.server.settings import Settings
from tests.cluster import fake_ray


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray.install(monkeypatch)


def replica(name: str, **stats: Any) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def pending(*, http: bool = True, session: str = "", **headers: str) -> Any:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return SimpleNamespace(
        args=[pickle.dumps(SimpleNamespace(asgi_scope={"headers": sent}))],
        metadata=SimpleNamespace(is_http_request=http, session_id=session),
        routing_context=SimpleNamespace(should_backoff=False),
    )


# The application.


def test_replicas_get_the_options_that_are_theirs() -> None:
    bound = app(
        {"model": "m", "max_waiting": 5, "port": 9, "cluster": {"cpus": 2, "min_replicas": 2, "max_replicas": 2}}
    )
    assert bound.given == {"version": __version__, "cluster": {"cpus": 2.0, "gpus": 0.0}, "fixed": {"model": "m"}}
    assert bound.options["user_config"] == {"max_waiting": 5}
    assert bound.options["num_replicas"] == 2
    assert "autoscaling_config" not in bound.options
    assert bound.options["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 0.0}
    assert issubclass(bound.cls, Replica)


def test_a_full_queue_is_the_servers_own_to_refuse() -> None:
    """Ray must hand a replica more requests than it takes."""
    bound = app({"max_waiting": 100})
    assert bound.options["max_ongoing_requests"] > EngineConfig().max_sequences + 100


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, Settings().request_timeout),
        ({"request_timeout": 900}, 900),
        ({"request_timeout": 900, "drain_timeout": 77}, 77),
        ({"drain_timeout": 1200}, 1200),
    ],
)
def test_ray_waits_longer_than_a_request_may_take(given: dict[str, float], seconds: float) -> None:
    assert app(given).options["graceful_shutdown_timeout_s"] == seconds + LAST_ANSWERS_SECONDS


def test_variables_of_this_machine_count_for_the_limits_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_REQUEST_TIMEOUT", "1000")
    monkeypatch.setenv("PACELINE_MAX_WAITING", "5000")
    options = app({"max_waiting": 5}).options
    assert options["graceful_shutdown_timeout_s"] > 1000
    assert options["max_ongoing_requests"] > options["max_queued_requests"] > 5000


def test_numbers_of_replicas_and_live_settings_change_without_new_ones() -> None:
    """Ray starts new replicas for another version alone, with other arguments."""
    one, other = (
        app({"cluster": {"max_replicas": 3}, "max_waiting": 9}),
        app({"cluster": {"max_replicas": 4, "target_waiting": 9}, "max_waiting": 3}),
    )
    assert one.given == other.given
    assert one.options["version"] == other.options["version"] != app({"model": "other"}).options["version"]
    assert (one.options["user_config"], other.options["user_config"]) == ({"max_waiting": 9}, {"max_waiting": 3})


def test_autoscaling_follows_the_policy() -> None:
    options = {"max_replicas": 3, "target_waiting": 2, "target_kv_usage": 0.5, "upscale_delay": 7, "downscale_delay": 9}
    scaling = app({"cluster": options}).options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (7, 9)
    module, _, name = scaling.policy.policy_function.partition(":")
    getattr(import_module(module), name)(**scaling.policy.policy_kwargs)


@pytest.mark.parametrize(("routing", "prefixes"), [("prefix", True), ("session", False)])
def test_the_router_is_the_one_that_is_asked_for(routing: str, prefixes: bool) -> None:
    found = app({"cluster": {"routing": routing, "max_imbalance": 3}}).options["request_router_config"]
    module, _, name = found.request_router_class.rpartition(".")
    router = getattr(import_module(module), name)()
    router.initialize_state(**found.request_router_kwargs)
    assert (router._affinity.prefixes, router._affinity.max_imbalance) == (prefixes, 3)


def test_ray_routes_alone_if_asked_to() -> None:
    assert vars(app({"cluster": {"routing": "none"}}).options["request_router_config"]) == {}


def test_a_misspelt_argument_is_an_error() -> None:
    with pytest.raises(UnknownOption, match="arguments of the application 'modle'; did you mean 'model'"):
        app({"modle": "m"})


def test_an_actor_is_a_replica_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    async def start(self: Replica, **given: Any) -> None:
        told.update(given)

    async def close(self: Replica) -> None:
        told["closed"] = True

    monkeypatch.setattr(Replica, "start", start)
    monkeypatch.setattr(Replica, "close", close)
    monkeypatch.setattr(Replica, "front", lambda self: "front")
    cls: Any = app({}).cls

    async def life() -> None:
        actor = cls.__new__(cls)
        await actor.__init__(fixed={})
        assert actor.__serve_build_asgi_app__() == "front"
        await actor.__del__()

    monkeypatch.setattr("sys.unraisablehook", lambda error: None)  # Python calls an async destructor, too
    with pytest.warns(RuntimeWarning, match="never awaited"):
        asyncio.run(life())
    assert told == {"name": "r7", "fixed": {}, "closed": True}


def asked(monkeypatch: pytest.MonkeyPatch, answers: list[Any] | Exception) -> list[Any]:
    """Ask all replicas from one, and return what it gets if Ray brings these answers."""

    async def results_async(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        assert 0 < timeout_s < 10, "less than Prometheus waits for a scrape"
        if isinstance(answers, Exception):
            raise answers
        return answers

    told: list[str] = []
    response = SimpleNamespace(results_async=results_async)
    handle = SimpleNamespace(broadcast=lambda method: told.append(method) or response)
    monkeypatch.setattr(
        "ray.serve.get_deployment_handle",
        lambda *names: told.extend(names) or handle,
        raising=False,
    )
    cls: Any = app({}).cls
    found: list[Any] = asyncio.run(cls.ask_all(SimpleNamespace(), "collected"))
    assert told == ["Paceline", "paceline", "collected"]
    return found


def test_a_replica_asks_all_and_leaves_out_those_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, [("r1", []), RuntimeError("died"), ("r2", [])]) == [("r1", []), ("r2", [])]


def test_replicas_that_are_late_hold_up_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert asked(monkeypatch, TimeoutError("late")) == []
    assert "replicas do not answer" in caplog.text


# The router.


def router(*names: str, **options: Any) -> Any:
    made = import_module("paceline.cluster.router").AffinityRouter()
    made.initialize_state(**options)
    made.update_replicas([replica(name) for name in names])
    return made


def chosen(router: Any, request: Any) -> list[list[str]]:
    ranks = asyncio.run(router.choose_replicas(router.replicas, request))
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


def test_a_named_replica_is_asked_alone() -> None:
    request = pending(x_paceline_replica="b", x_paceline_prefix="h1")
    assert chosen(router("a", "b", "c"), request) == [["b"]]
    assert request.routing_context.should_backoff


def test_a_prompt_goes_where_it_was() -> None:
    made, request = router("a", "b", "c"), pending(x_paceline_prefix="h1,h2")
    made.on_request_routed(request, SimpleNamespace(unique_id="c"), None)
    assert chosen(made, request)[0] == ["c"]
    assert chosen(made, pending(x_paceline_prefix="h1,h9"))[0] == ["c"]


def test_a_busy_replica_gives_up_its_prompts() -> None:
    made, request = router("a", "b", max_imbalance=2), pending(x_paceline_prefix="h1")
    made.on_request_routed(request, SimpleNamespace(unique_id="b"), None)
    made.busy = {"b": 3}
    assert len(chosen(made, request)) == 1


def test_reports_of_replicas_are_learnt() -> None:
    made = router("a", "b")
    made.update_replicas([replica("a", beginnings=["h1"], uses=1), replica("b", beginnings=[], uses=0)])
    assert chosen(made, pending(x_paceline_prefix="h1"))[0] == ["a"]
    made.update_replicas([replica("b")])
    assert set(made._uses) == {"b"}
    assert chosen(made, pending(x_paceline_prefix="h1")) == [["b"], ["b"]], "what is gone is offered no more"


def test_of_a_report_only_what_is_new_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica reports what it has read for minutes; thousands of replicas report every second."""
    made, known = router("a"), Beginnings()
    learnt: list[list[str]] = []

    def learn(self: Affinity, replica: str, beginnings: list[str]) -> None:
        learnt.append(beginnings)

    monkeypatch.setattr(Affinity, "learn", learn)
    for read in (["h1", "h2"], [], ["h1", "h3"], ["h3"]):
        known.add(read)
        made.update_replicas([replica("a", beginnings=known.latest(9), uses=known.uses)])
    assert learnt == [["h1", "h2"], ["h1", "h3"], ["h3"]]


def test_a_request_is_read_once_and_replicas_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made, request = router("a", "b"), pending(x_paceline_prefix="h1")
    read: list[bytes] = []

    def loads(data: bytes) -> Any:
        read.append(data)
        return pickle.loads(data)

    monkeypatch.setattr("paceline.cluster.router.pickle", SimpleNamespace(loads=loads))
    chosen(made, request)
    before = made._by_name
    chosen(made, request)
    made.on_request_routed(request, SimpleNamespace(unique_id="b"), None)
    assert (len(read), made._by_name is before) == (1, True)
    made.update_replicas([replica("a"), replica("c")])
    chosen(made, request)
    assert (len(read), set(made._by_name)) == (1, {"a", "c"})


def test_a_session_counts_before_a_prompt() -> None:
    made, request = router("a", "b", "c"), pending(session="s", x_paceline_prefix="h1")
    first = chosen(made, request)[0]
    for name in "abc":
        made.on_request_routed(pending(x_paceline_prefix="h1"), SimpleNamespace(unique_id=name), None)
    assert chosen(made, request)[0] == first


def test_what_is_no_http_request_goes_anywhere() -> None:
    assert sorted(chosen(router("a", "b"), pending(http=False, x_paceline_replica="a"))[0]) == ["a", "b"]
    assert sorted(chosen(router("a", "b"), None)[0]) == ["a", "b"]
    assert chosen(router(), pending()) == []


def test_a_configuration_is_what_the_application_is_made_of() -> None:
    given = {"model": "m", "cluster": {"max_replicas": 2}}
    config = ClusterConfig.of(given, where="here")
    made = import_module("paceline.cluster.deployment").application(config)
    assert made.given == app(given).given
