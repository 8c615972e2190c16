"""The test behind a canary: who is paired with whom, how often it errs, and options and state on their own."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
from pathlib import Path

import pytest

from paceline.arms import CANARY, CONTROL, ArmSpeed
from paceline.errors import InvalidRequest, StorageError
from paceline.server.canary.evidence import BOUND, MAX_PENDING, Evidence, plus, ratio, wealth
from paceline.server.canary.options import CanaryOptions
from paceline.server.canary.store import FILE, MAX_PAST, State, Store, state_folder
from paceline.server.canary.trial import Phase, Trial
from peers.canary_trials import simulate


def a_speed(speed: float, *, batch: int = 0, tokens: int = 100) -> ArmSpeed:
    return ArmSpeed(batch, tokens, tokens / speed, tokens / speed)


def evidence(promote_at: float = 1.0, rollback_at: float = 1.0) -> Evidence:
    return Evidence(promote_at=promote_at, rollback_at=rollback_at)


def test_pairs_are_of_one_batch_size_and_kind_and_no_request_is_in_two() -> None:
    found = evidence()
    found.add(CANARY, "code", a_speed(2.0))
    found.add(CONTROL, "json", a_speed(1.0))
    found.add(CONTROL, "code", a_speed(1.0, batch=1))
    assert "pairs" not in found.totals
    found.add(CONTROL, "code", a_speed(2.0))
    assert found.totals["pairs"] == 1
    assert found.totals["low"] == pytest.approx(0)
    found.add(CONTROL, "code", a_speed(1.0))
    assert found.totals["pairs"] == 1


def test_a_pair_has_all_that_ended_since_the_pair_before() -> None:
    found = evidence()
    for speed in (1.0, 1.1, 1.21):
        found.add(CONTROL, "code", a_speed(speed))
    found.add(CANARY, "code", a_speed(1.21))
    assert found.totals["low"] == pytest.approx(math.log(1.1))
    for _ in range(3 * MAX_PENDING):
        found.add(CANARY, "code", a_speed(1.0))
    found.add(CONTROL, "code", a_speed(1.0))
    assert found.totals["pairs"] == 2
    assert found.totals["low"] == pytest.approx(math.log(1.1))


def test_bounds_are_taken_against_the_canary_to_promote_and_for_it_to_roll_back() -> None:
    found = evidence()
    found.add(CONTROL, "", ArmSpeed(3, 100, 90.0, 110.0))
    found.add(CANARY, "", ArmSpeed(3, 100, 80.0, 120.0))
    assert found.totals["low"] == pytest.approx(math.log(90 / 120))
    assert found.totals["high"] == pytest.approx(math.log(110 / 80))


def test_short_requests_say_nothing_and_outliers_little() -> None:
    found = evidence()
    found.add(CANARY, "", a_speed(1.0, tokens=3))
    found.add(CANARY, "", None)
    found.add(CONTROL, "", a_speed(1.0))
    assert "pairs" not in found.totals
    found.add(CANARY, "", a_speed(1000.0))
    assert found.totals["high"] == BOUND


def test_sums_of_servers_add_up() -> None:
    servers = [evidence() for _ in range(3)]
    for server in servers:
        for _ in range(5):
            server.add(CONTROL, "", a_speed(1.0))
            server.add(CANARY, "", a_speed(1.3))
    alone = evidence()
    for _ in range(15):
        alone.add(CONTROL, "", a_speed(1.0))
        alone.add(CANARY, "", a_speed(1.3))
    together: dict[str, float] = {}
    for server in servers:
        together = plus(together, server.take())
        assert not server.totals
    assert wealth(together, "faster") == pytest.approx(wealth(alone.totals, "faster"))
    assert ratio(together) == pytest.approx((1.3, 1.3))
    assert ratio({}) is None


def test_it_errs_no_more_often_than_it_says_and_finds_what_is_there() -> None:
    generator = random.Random(1)

    def ends(speed: float, requests: int, trials: int = 20) -> list[tuple[str, int]]:
        return [simulate(speed, requests=requests, share=0.5, generator=generator) for _ in range(trials)]

    assert {end for end, _ in ends(1.0, 1500)} == {"open"}
    slower, better = ends(0.8, 1000), ends(1.3, 1500)
    assert {end for end, _ in slower} == {"rolled back"}
    assert sorted(number for _, number in slower)[10] < 200
    assert {end for end, _ in better} == {"promoted"}


def test_the_share_is_kept_and_every_server_takes_the_same() -> None:
    one = Trial(CanaryOptions("x", share=0.2), "x", "y")
    other = Trial.read(json.loads(json.dumps({**vars_of(one)})))
    taken = [one.takes(str(unit)) for unit in range(4000)]
    assert taken == [other.takes(str(unit)) for unit in range(4000)]
    assert sum(taken) / 4000 == pytest.approx(0.2, abs=0.03)
    assert taken != [Trial(CanaryOptions("x", share=0.2), "x", "y").takes(str(unit)) for unit in range(4000)]


def vars_of(trial: Trial) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(trial)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("eagle", "canary options are such as share=0.1"),
        ("drafter=x share=much", "canary share must be a number, not 'much'"),
        ("drafter=x min_requests=1.5", "canary min_requests must be a whole number"),
        ("drafter=x sahre=0.1", "did you mean 'share'?"),
        ("share=0.1", "a canary needs a drafter"),
    ],
)
def test_options_as_a_text(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        CanaryOptions.read(text)
    assert problem in str(error.value)
    assert CanaryOptions.read("drafter='a b' by=header:X-Id") == CanaryOptions("a b", by="header:X-Id")
    with pytest.raises(InvalidRequest, match="a canary has options such as"):
        CanaryOptions.read(3)


def _add(folder: str, times: int) -> None:
    store = Store(Path(folder))

    def edit(state: State) -> None:
        assert state.canary is not None
        state.canary.totals = plus(state.canary.totals, {"pairs": 1.0})

    for _ in range(times):
        store.change(edit)


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "state")
    store.change(lambda state: setattr(state, "canary", Trial(CanaryOptions("x"), "x", "y")))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(str(store.folder), 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    canary = store.read().canary
    assert canary is not None
    assert canary.totals["pairs"] == 60
    assert sorted(path.name for path in store.folder.iterdir()) == ["drafters.json", "drafters.lock"]


def test_an_edit_that_raises_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.change(lambda state: state.drafters.update(a="ngram"))
    before = (tmp_path / FILE).read_bytes()

    def edit(state: State) -> None:
        state.drafters.clear()
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        store.change(edit)
    assert (tmp_path / FILE).read_bytes() == before


def test_the_past_is_bounded_and_a_file_of_bytes_is_damaged(tmp_path: Path) -> None:
    state = State()
    for number in range(MAX_PAST + 5):
        state.canary = Trial(CanaryOptions("x"), "x", "y", started=float(number), phase=Phase.PROMOTED)
        state.end_canary()
    assert [trial.started for trial in state.past] == [float(number) for number in range(5, MAX_PAST + 5)]
    state.end_canary()
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(StorageError, match="cannot be read"):
        Store(tmp_path).read()


def test_the_folder_belongs_to_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder(None, "org/name:Q4") == tmp_path / "paceline" / "org-name-Q4"
    assert state_folder(None, "../..") == tmp_path / "paceline" / "model"
    assert state_folder("/srv/state", "m") == Path("/srv/state")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder(None, "m") == Path.home() / ".local" / "state" / "paceline" / "m"


def test_a_canary_is_promoted_after_enough_pairs_and_rolled_back_before() -> None:
    found = evidence(promote_at=1.02, rollback_at=0.98)
    for speed in (1.5, 0.6):
        found.take()
        for _ in range(40):
            found.add(CONTROL, "", a_speed(1.0))
            found.add(CANARY, "", a_speed(speed))
        few, many = (Trial(CanaryOptions("x", min_requests=n), "x", "y", totals=found.totals) for n in (40, 41))
        verdicts = [None if (said := trial.verdict()) is None else said[0] for trial in (few, many)]
        assert verdicts == ([Phase.PROMOTED, None] if speed > 1 else [Phase.ROLLED_BACK] * 2)
    assert Trial(CanaryOptions("x"), "x", "y").verdict() is None
