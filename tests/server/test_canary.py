"""A canary over HTTP, with a real tiny target: arms, verdicts, state, and what is refused."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.arms import CANARY, CONTROL, ArmSpeed
from paceline.draft import Draft
from paceline.drafters import registry
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.recipe import DrafterKind, Recipe
from paceline.errors import NotReady, StorageError
from paceline.llm import LLM
from paceline.server.canary.conductor import Canary
from paceline.server.canary.options import CanaryOptions
from paceline.server.canary.store import FILE, LOCK, Store
from paceline.server.canary.trial import Phase
from paceline.server.served_drafters import ServedDrafters
from tests.server.api import Api, serving

KEY = "sk-admin"
ADMIN = {"authorization": f"Bearer {KEY}"}


class Odd(Drafter):
    """A drafter of a test: drafts nothing, raises, or grows."""

    name = "odd"

    def __init__(self, how: str) -> None:
        self.how = how
        self.kept: list[bytes] = []

    def propose(self, asks: Any) -> list[Draft]:
        if self.how == "raises":
            raise RuntimeError("no idea")
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        return Draft(tokens=(5,) if self.how == "wrong" else ())


@pytest.fixture(autouse=True)
def _odd(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(options: str, target: Any, progress: Any) -> Recipe:
        if options == "broken":
            raise ValueError("not a head")
        return Recipe(name="odd", build=lambda context: Odd(options))

    monkeypatch.setitem(registry.REGISTRY, "odd", DrafterKind(make))


@pytest.fixture
def served(llm: LLM, tmp_path: Path) -> Iterator[Admin]:
    with admin(llm, tmp_path) as found:
        yield found


class Admin:
    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.canary: Canary = api.app.state.canary

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self.api.run(self.api.http.request(method, f"/admin/drafters{path}", json=body, headers=ADMIN))

    def good(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        response = self.call(method, path, body)
        assert response.status_code == 200, response.text
        told: dict[str, Any] = response.json()
        return told

    def refused(self, method: str, path: str, body: Any = None, *, status: int = 400) -> str:
        response = self.call(method, path, body)
        assert response.status_code == status, response.text
        return str(response.json()["error"]["message"])

    def begin(self, **options: Any) -> dict[str, Any]:
        """Start a canary that gets traffic at once."""
        told = self.good("POST", "/canary", {"drafter": "odd:silent", "share": 0.5} | options)
        if self.canary.trial is not None:
            self.canary.trial.started -= 1000  # the shadow has waited long enough
            self.sync()
        return told

    def sync(self) -> None:
        self.api.run(self.canary.sync())

    def settle(self) -> None:
        """Wait for what the canary does beside requests."""

        async def wait() -> None:
            if self.canary._task is not None:
                await self.canary._task

        self.api.run(wait())

    def arms(self, count: int, **fields: Any) -> list[str | None]:
        return [self.api.complete(**fields)["speculation"]["arm"] for _ in range(count)]


@contextmanager
def admin(llm: LLM, folder: Path, **settings: Any) -> Iterator[Admin]:
    default = llm.engine.default_drafter
    with serving(llm, admin_key=KEY, state_dir=str(folder / "state"), **settings) as api:
        found = Admin(api, folder / "state")
        try:
            yield found
        finally:
            llm.engine.default_drafter = default
            for name in [*found.api.app.state.drafters.words]:
                api.run(found.api.app.state.drafters.unload(name))


def test_a_drafter_is_loaded_used_and_unloaded(served: Admin) -> None:
    told = served.good("POST", "", {"drafter": "ngram:max_ngram=2", "name": "short"})
    assert [each["name"] for each in told["drafters"] if each["hot"]] == ["short"]
    answer = served.api.complete(speculation={"drafter": "short"})
    assert answer["speculation"]["drafter"] == "short"
    assert served.good("POST", "/default", {"drafter": "short"})["default"] == "short"
    assert served.api.complete()["speculation"]["drafter"] == "short"
    assert "is the default" in served.refused("DELETE", "/short")
    assert served.good("POST", "/default", {"drafter": "none"})["default"] == "none"
    assert served.api.complete()["speculation"]["off_reason"] == "no drafter"
    served.good("POST", "/default", {"drafter": "ngram"})
    told = served.good("DELETE", "/short")
    assert "short" not in [each["name"] for each in told["drafters"]]
    assert (
        "unknown drafter"
        in served.api.refused("/v1/completions", {"prompt": "a", "speculation": {"drafter": "short"}})["message"]
    )


def test_texts_are_the_same_in_every_arm_and_arms_stick(served: Admin) -> None:
    plain = served.api.complete(speculation={"enabled": False})["choices"][0]["text"]
    served.begin(drafter="odd:wrong")
    seen = [served.api.complete() for _ in range(24)]
    assert {answer["choices"][0]["text"] for answer in seen} == {plain}
    assert {answer["speculation"]["arm"] for answer in seen} == {CANARY, CONTROL}
    assert {a["speculation"]["drafter"] for a in seen if a["speculation"]["arm"] == CANARY} == {"odd"}
    assert {a["speculation"]["drafter"] for a in seen if a["speculation"]["arm"] == CONTROL} == {"ngram"}
    id = {"x-request-id": "always-the-same"}

    async def again() -> str:
        body = {"prompt": "abc", "max_tokens": 4}
        answer = await served.api.http.post("/v1/completions", json=body, headers=id)
        return str(answer.json()["speculation"]["arm"])

    assert len({served.api.run(again()) for _ in range(6)}) == 1


def test_requests_that_choose_themselves_are_never_assigned(served: Admin) -> None:
    served.begin(share=0.9)
    for fields in (
        {"speculation": {"drafter": "ngram"}},
        {"speculation": {"enabled": False}},
        {"speculation": {"rule": "threshold"}},
        {"speculation": {"rule": "rejection"}, "temperature": 1},
        {"prediction": {"type": "content", "content": "abc"}},
    ):
        assert served.arms(3, **fields) == [None] * 3
    assert None not in served.arms(2, speculation={"rule": "rejection"}, temperature=0)


def test_a_canary_by_header_and_by_key(served: Admin) -> None:
    served.begin(by="header:X-User")
    assert served.arms(3) == [None] * 3

    async def of(user: str) -> str:
        body = {"prompt": "abc", "max_tokens": 4}
        answer = await served.api.http.post("/v1/completions", json=body, headers={"x-user": user})
        return str(answer.json()["speculation"]["arm"])

    by_user = {user: {served.api.run(of(user)) for _ in range(2)} for user in map(str, range(24))}
    assert all(len(arms) == 1 for arms in by_user.values())
    assert len(set.union(*by_user.values())) == 2
    served.good("POST", "/canary/rollback")
    served.begin(by="key")
    assert len(set(served.arms(6))) == 1


def test_a_drafter_that_raises_is_out_at_once_and_no_request_is_lost(served: Admin, log: io.StringIO) -> None:
    plain = served.api.complete(speculation={"enabled": False})["choices"][0]["text"]
    served.begin(drafter="odd:raises")
    texts = []
    while served.canary.trial is not None and len(texts) < 10:
        texts.append(served.api.complete()["choices"][0]["text"])
        served.settle()
    assert set(texts) == {plain}
    [ended] = served.canary.past
    assert ended.phase is Phase.ROLLED_BACK
    assert "raised RuntimeError: no idea" in ended.reason
    assert ended.totals[f"{CANARY}.requests"] == 1
    assert "odd" not in served.api.bridge.stats().drafters  # its memory is back
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["reason"] for line in lines if line["event"] == "canary rolled back"] == [ended.reason]


def test_a_drafter_that_leaks_is_out(served: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(0, 1 << 60, 200 << 20))
    monkeypatch.setattr("paceline.server.canary.conductor.resident_bytes", lambda: next(sizes))
    served.begin(share=0.99)
    served.arms(3)
    served.sync()
    assert "its drafter leaks: its calls took" in served.canary.past[-1].reason


@pytest.mark.parametrize(("speed", "phase"), [(1.5, Phase.PROMOTED), (0.7, Phase.ROLLED_BACK)])
def test_the_verdict_follows_the_measured_speeds(served: Admin, speed: float, phase: Phase) -> None:
    served.begin(min_requests=20)
    trial = served.canary.trial
    assert trial is not None
    for number in range(400):
        arm = (CANARY, CONTROL)[number % 2]
        seconds = 1.0 / (speed if arm == CANARY else 1.0)
        served.canary._evidence.add(arm, "code", ArmSpeed(0, 20, seconds, seconds))
    served.sync()
    assert served.canary.trial is None
    [ended] = served.canary.past
    assert ended.phase is phase
    default = served.good("GET", "")["default"]
    assert default == ("odd" if phase is Phase.PROMOTED else "ngram")
    assert ("odd" in served.api.bridge.stats().drafters) == (phase is Phase.PROMOTED)


def test_speculation_itself_may_be_the_canary(served: Admin) -> None:
    served.good("POST", "/default", {"drafter": "none"})
    served.begin(drafter="ngram")
    seen = [served.api.complete()["speculation"] for _ in range(16)]
    assert {told["drafter"] for told in seen if told["arm"] == CANARY} == {"ngram"}
    assert {told["drafter"] for told in seen if told["arm"] == CONTROL} == {None}
    served.good("POST", "/canary/promote")
    assert served.good("GET", "")["default"] == "ngram"
    served.begin(drafter="none", share=0.9)
    off = [told for told in (served.api.complete()["speculation"] for _ in range(12)) if told["arm"] == CANARY]
    assert {told["off_reason"] for told in off} == {"off: the request is in the arm canary, which does not speculate"}


def test_everything_outlives_a_restart(llm: LLM, tmp_path: Path) -> None:
    with admin(llm, tmp_path) as first:
        first.good("POST", "", {"drafter": "ngram:max_ngram=2", "name": "short"})
        first.begin()
        first.arms(6)
        first.sync()
        before = first.canary.described()
        assert before is not None
        mode = [stat.S_IMODE(os.stat(first.folder / name).st_mode) for name in (".", FILE, LOCK)]
        assert mode == [0o700, 0o600, 0o600]
    with admin(llm, tmp_path) as second:
        assert second.canary.trial is None
        second.api.run(second.canary.restore(None))
        assert second.canary.described() == before
        assert {"short", "odd"} <= second.api.bridge.stats().drafters.keys()
        second.good("POST", "/canary/promote")
    with admin(llm, tmp_path) as third:
        third.api.run(third.canary.restore(None))
        assert third.good("GET", "")["default"] == "odd"


def test_servers_that_share_a_folder_share_one_canary(llm: LLM, tmp_path: Path) -> None:
    with admin(llm, tmp_path) as here:
        here.begin()
        with serving_beside(here, tmp_path) as there:
            asyncio.run(there.restore(None))
            assert there.trial is not None
            assert here.canary.trial is not None
            assert there.trial.id == here.canary.trial.id
            for canary in (here.canary, there):
                canary._evidence.count({"pairs": 3.0, "low": 0.3, "high": 0.3})
            asyncio.run(there.sync())
            here.sync()
            assert here.canary.trial.totals["pairs"] == 6.0
            here.good("POST", "/canary/rollback")
            asyncio.run(there.sync())
            assert there.trial is None
            assert there.past[-1].phase is Phase.ROLLED_BACK


@contextmanager
def serving_beside(here: Admin, folder: Path) -> Iterator[Canary]:
    """Another server's view of the same folder; the engine and its drafters are shared."""

    class Following(ServedDrafters):
        async def follow(self, state: Any) -> None:
            return

    yield Canary(here.api.bridge, Following(here.api.bridge, Store(here.folder)))
    here.api.bridge.listeners.pop()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "a canary needs a drafter"),
        ({"drafter": "odd", "shares": 1}, "unknown canary option 'shares'; did you mean 'share'?"),
        ({"drafter": "odd", "share": 0}, "canary share must be in (0, 1]"),
        ({"drafter": "odd", "share": 1}, "canary share must be below 1"),
        ({"drafter": "odd", "share": "much"}, "canary share must be a finite number"),
        ({"drafter": "odd", "by": "user"}, "canary by is request, key, or header"),
        ({"drafter": "odd", "promote_at": 0.9}, "promote_at 0.9 is below rollback_at 0.98"),
        ({"drafter": "odd", "min_requests": 0}, "canary min_requests must be between"),
        ({"drafter": 3}, "canary drafter must be a name or words"),
        ({"drafter": "odd:broken"}, "drafter 'odd' cannot be built: ValueError: not a head"),
        ({"drafter": "nobody-knows"}, "unknown drafter 'nobody-knows'"),
        ({"drafter": "ngram"}, "is the default already"),
        ({"drafter": "prediction"}, "cannot be a canary"),
    ],
)
def test_a_wrong_canary_is_refused_and_changes_nothing(served: Admin, body: dict[str, Any], problem: str) -> None:
    before = served.good("GET", "")
    assert problem in served.refused("POST", "/canary", body)
    assert served.good("GET", "") == before
    assert not served.folder.exists()


def test_what_does_not_fit_a_canary_that_runs_is_refused(served: Admin) -> None:
    served.begin()
    assert "runs already: promote it or roll it back first" in served.refused("POST", "/canary", {"drafter": "none"})
    assert "is in the canary that runs" in served.refused("DELETE", "/odd")
    assert "is in the canary that runs" in served.refused("POST", "/default", {"drafter": "none"})
    served.good("POST", "/canary/rollback")
    for path in ("/canary/promote", "/canary/rollback"):
        assert "no canary runs" in served.refused("POST", path)
    assert "unknown field 'words'" in served.refused("POST", "", {"words": "ngram"})
    assert "drafter is missing" in served.refused("POST", "", {"name": "n"})
    assert "drafter must be a text" in served.refused("POST", "", {"drafter": 1})
    assert "unknown drafter 'ngarm'" in served.refused("POST", "/default", {"drafter": "ngarm"})
    assert "is no default" in served.refused("POST", "/default", {"drafter": "prediction"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is damaged"),
        ('{"version": 1}', "is damaged"),
        ('{"version": 99}', "has version 99, and this Paceline reads 1"),
    ],
)
def test_a_state_file_that_cannot_be_used_is_left_as_it_is(
    served: Admin, log: io.StringIO, text: str, problem: str
) -> None:
    served.folder.mkdir()
    (served.folder / FILE).write_text(text)
    served.api.run(served.canary.restore(None))
    assert problem in log.getvalue()
    assert problem in served.refused("POST", "/canary", {"drafter": "odd:silent"}, status=507)
    assert problem in served.refused("POST", "", {"drafter": "odd:silent"}, status=507)
    assert problem in served.refused("POST", "/default", {"drafter": "none"}, status=507)
    assert (served.folder / FILE).read_text() == text
    assert served.good("GET", "")["default"] == "ngram"
    assert "odd" not in served.api.bridge.stats().drafters
    served.api.complete()


def test_a_folder_that_cannot_be_written_is_named(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in its place")
    with admin(llm, tmp_path) as served:
        assert "choose another one with state_dir" in served.refused(
            "POST", "/canary", {"drafter": "odd:x"}, status=507
        )
        assert "odd" not in served.api.bridge.stats().drafters


def test_the_canary_of_the_settings_starts_once(llm: LLM, tmp_path: Path, log: io.StringIO) -> None:
    asked = CanaryOptions("odd:silent", share=0.3)
    for outcome in ("started", "decided before"):
        with admin(llm, tmp_path) as served:
            served.api.run(served.canary.restore(asked))
            assert outcome in log.getvalue()
            if outcome == "started":
                served.api.run(served.canary.restore(asked))  # it runs: nothing happens
                served.good("POST", "/canary/rollback")
            assert served.canary.trial is None
    with admin(llm, tmp_path / "other") as served:
        served.api.run(served.canary.restore(CanaryOptions("odd:broken")))
        assert "canary of the settings not started" in log.getvalue()


def test_the_shadow_scores_before_there_is_traffic(served: Admin) -> None:
    for number in range(10):
        served.api.complete(prompt=f"abcabc{number}", max_tokens=24)
    served.good("POST", "/canary", {"drafter": "odd:wrong"})
    assert served.canary.trial is not None
    assert served.canary.trial.phase is Phase.SHADOW
    assert served.arms(1) == [None]
    engine = served.api.bridge.llm.engine

    def idle(engine: Any) -> None:
        for _ in range(2000):
            if not engine.improve():
                return

    served.api.run(served.api.bridge.on_engine(idle))
    assert engine.shadow.scores["odd"].texts == engine.shadow.scores["ngram"].texts == 8
    served.sync()
    told = served.canary.described()
    if told is None:  # none of its tokens was right
        assert "tokens that it drafted in the shadow was right" in served.canary.past[-1].reason
    else:
        assert told["shadow"]["canary.texts"] == 8.0


def test_a_canary_stands_in_metrics_and_state(served: Admin) -> None:
    assert served.api.get("/v1/speculation").json()["canary"] is None
    served.begin()
    served.arms(6)
    told = served.api.get("/v1/speculation").json()["canary"]
    assert told["phase"] == "running"
    assert sum(arm["requests"] for arm in told["arms"].values()) == 6
    metrics = served.api.get("/metrics").text
    assert 'paceline:canary_requests_total{arm="canary",model_name="tiny"}' in metrics
    assert 'paceline:canary_phase{model_name="tiny",phase="running"} 1.0' in metrics


def test_drafters_come_and_go_while_requests_run(served: Admin) -> None:
    plain = served.api.complete(max_tokens=60, speculation={"enabled": False})["choices"][0]["text"]

    async def traffic() -> list[str]:
        texts = []
        for number in range(6):
            name = ("ngram", "short", None)[number % 3]
            body = {
                "prompt": "abcabcabc",
                "max_tokens": 60,
                "seed": 1,
                "speculation": {"drafter": name} if name else {},
            }
            answer = await served.api.http.post("/v1/completions", json=body)
            texts.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else str(answer.status_code))
        return texts

    async def changes() -> None:
        for _ in range(5):
            for method, path, body in (("POST", "", {"drafter": "ngram", "name": "short"}), ("DELETE", "/short", None)):
                url = f"/admin/drafters{path}"
                answer = await served.api.http.request(method, url, json=body, headers=ADMIN)
                assert answer.status_code == 200, answer.text

    async def both() -> list[list[str]]:
        *texts, _ = await asyncio.gather(traffic(), traffic(), traffic(), changes())
        return texts

    seen = {text for texts in served.api.run(both()) for text in texts}
    assert seen <= {plain, "400"}  # 400: it named a drafter that was not there when it came
    assert plain in seen


def test_an_order_to_an_engine_that_is_gone_says_so(llm: LLM, tmp_path: Path) -> None:
    with admin(llm, tmp_path) as served:
        bridge = served.api.bridge
        assert served.api.run(bridge.on_engine(lambda engine: engine.max_draft)) == llm.engine.max_draft
        with pytest.raises(ZeroDivisionError):
            served.api.run(bridge.on_engine(lambda engine: 1 / 0))
        assert bridge.state == "ready"
    with pytest.raises(NotReady, match="the server is draining"):
        asyncio.run(bridge.on_engine(lambda engine: None))


def test_a_canary_goes_on_where_its_state_cannot_be_written(served: Admin, log: io.StringIO) -> None:
    served.begin()
    served.arms(4)
    path = served.folder / FILE
    text = path.read_text()
    path.write_text("{")
    with pytest.raises(StorageError):
        served.sync()
    counted = served.canary.described()
    assert counted is not None
    assert sum(arm["requests"] for arm in counted["arms"].values()) == 4  # type: ignore[attr-defined]
    path.write_text(text)
    served.sync()
    assert served.canary.trial is not None
    assert sum(served.canary.trial.totals.get(f"{arm}.requests", 0) for arm in (CANARY, CONTROL)) == 4


def test_a_server_that_cannot_load_what_another_has_loaded_goes_on_without(served: Admin, log: io.StringIO) -> None:
    store = served.api.app.state.drafters.store
    store.change(lambda state: state.drafters.update(mine="odd:broken", short="ngram"))
    for _ in range(2):
        served.sync()
        store.change(lambda state: None)
    assert log.getvalue().count("state not followed") == 1
    assert "short" in served.api.bridge.stats().drafters
    store.change(lambda state: state.drafters.clear())
    served.sync()
    assert "short" not in served.api.bridge.stats().drafters
