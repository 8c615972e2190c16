"""Requests that a server keeps are those that an audit replays."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, StorageError
from paceline.prompts.files import read_prompts
from paceline.server import logs
from paceline.server.banner import _recording
from paceline.server.record import Recorder, page_names
from paceline.server.settings import Settings
from paceline.types import Finish, Grammar, Request, SamplingParams, TokenEvent
from tests.server.bridged import bridged, rig_of

SAMPLING = SamplingParams(
    temperature=0.5, seed=2**64 - 1, stop=("x", "y"), logit_bias={5: 1.5}, n=2, grammar=Grammar.regex("a+")
)


def a_request(name: str = "r", sampling: SamplingParams = SAMPLING) -> Request:
    return Request(id=name, prompt=(4, 5, 6), sampling=sampling, cache_salt="of one key")


def test_what_is_kept_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    Recorder(str(path), share=1.0).take(a_request())
    Recorder(str(path), share=1.0).take(a_request("plain", SamplingParams()))  # as after a restart
    first, second = read_prompts(str(path))
    assert (first.id, first.tokens, first.sampling) == ("r", (4, 5, 6), SAMPLING)
    assert second.sampling == SamplingParams()
    assert "one key" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_share_is_kept(tmp_path: Path) -> None:
    path, draws = tmp_path / "served.jsonl", iter([0.0, 0.49, 0.5, 0.99])
    recorder = Recorder(str(path), share=0.5, draw=lambda: next(draws))
    for i in range(4):
        recorder.take(a_request(str(i)))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["0", "1"]


def test_when_the_first_token_was_there_to_be_sent(tmp_path: Path) -> None:
    path, times = tmp_path / "served.jsonl", iter([1.25, 1.5])
    recorder = Recorder(str(path), share=1.0, timer=lambda: next(times))
    http = logs.current.set(logs.Record("id", "POST", "/v1/completions", began=1.0))
    recorder.take(a_request(sampling=SamplingParams(n=2)))
    logs.current.reset(http)
    recorder.take(a_request("in-process", SamplingParams()))
    for finish in (None, Finish.LENGTH):
        for sample in (0, 1):
            recorder.hear(TokenEvent("r", sample, (5,), finish=finish))
    recorder.hear(TokenEvent("in-process", 0, (5,), finish=Finish.LENGTH))
    ended = [line for line in map(json.loads, path.read_text().splitlines()) if "ended" in line]
    assert [line.get("time_first_sent") for line in ended] == [0.25, 0.5, None]


def test_a_full_disk_costs_the_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(str(tmp_path / "served.jsonl"), share=1.0)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        recorder.take(a_request())
    recorder.take(a_request())
    assert (tmp_path / "served.jsonl").read_text() == ""


HALF_FULL = """
import resource, sys
from paceline.server.record import Recorder, page_names
from paceline.types import Request
recorder = Recorder(sys.argv[1], share=1.0)
recorder.take(Request(id="whole", prompt=(4, 5, 6)))
room = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # the next line is written in part, as on a full disk
recorder.take(Request(id="torn", prompt=(7,) * 100))
recorder.take(Request(id="late", prompt=(4, 5, 6)))
"""


@pytest.mark.parametrize("room", [70, 150])
def test_a_line_is_whole_or_not_there(tmp_path: Path, room: int) -> None:
    path = tmp_path / "served.jsonl"
    done = subprocess.run([sys.executable, "-c", HALF_FULL, str(path), str(room)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [prompt.id for prompt in read_prompts(str(path))] == ["whole"]
    assert path.read_text().endswith("\n")


def test_a_torn_line_is_mended_at_the_start_and_left_out_of_a_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "served.jsonl"
    Recorder(str(path), share=1.0).take(a_request())
    whole = path.read_bytes()
    for cut in (1, 9, len(whole) // 2, len(whole) - 2):  # as a crash would leave it
        path.write_bytes(whole + whole[:cut])
        assert [prompt.id for prompt in read_prompts(str(path))] == ["r"]
        assert "served.jsonl:2: a recorded request without its end" in caplog.text
        caplog.clear()
        Recorder(str(path), share=1.0).take(a_request("next"))
        assert [prompt.id for prompt in read_prompts(str(path))] == ["r", "next"]
    assert not caplog.text


@pytest.mark.parametrize("last", [b'{"id": "a", "prompt_tokens": [1]}', b"notes of somebody else"])
def test_a_last_line_that_is_not_torn_is_kept(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "served.jsonl"
    path.write_bytes(last)
    Recorder(str(path), share=1.0)
    assert path.read_bytes() == last + b"\n"


def test_a_file_that_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="choose another file"):
        Recorder(str(tmp_path / "nowhere" / "served.jsonl"), share=1.0)
    with pytest.raises(InvalidRequest, match="record_share"):
        Settings(record_share=0.0)


def test_the_bridge_tells_of_every_request_it_takes() -> None:
    told: list[Request] = []

    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            bridge.watchers.append(told.append)
            async with bridge.submit(a_request("a", SamplingParams(temperature=0, max_tokens=3))) as stream:
                async for _ in stream:
                    pass
            with pytest.raises(InvalidRequest):
                bridge.submit(Request(id="b", prompt=(10**6,)))

    asyncio.run(asyncio.wait_for(scenario(), timeout=200))
    assert [request.id for request in told] == ["a"]


def served(path: Path, *requests: Request, **options: Any) -> list[dict[str, Any]]:
    """Serve requests one after the other with a recorder; return the lines."""
    recorder = Recorder(str(path), share=1.0, model="toy", clock=iter(range(1000, 2000)).__next__, **options)

    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            bridge.watchers.append(recorder.take)
            bridge.listeners.append(recorder.hear)
            for request in requests:
                async with bridge.submit(request) as stream:
                    async for _ in stream:
                        pass

    asyncio.run(asyncio.wait_for(scenario(), timeout=200))
    return [json.loads(line) for line in path.read_text().splitlines()]


LONG_PROMPT = tuple(range(5, 45))
SHORT = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def test_an_answer_has_a_line_when_it_ends(tmp_path: Path) -> None:
    request = Request(id="a", prompt=LONG_PROMPT, sampling=replace(SHORT, n=2))
    first, *ends = served(tmp_path / "r.jsonl", request)
    assert (first["id"], first["at"], first["model"], first["share"]) == ("a", 1000, "toy", 1.0)
    assert first["prompt_tokens"] == list(LONG_PROMPT)
    assert len(first["pages"]) == 2
    assert sorted(end["sample"] for end in ends) == [0, 1]
    for end in ends:
        assert (end["id"], end["ended"], end["output_tokens"], len(end["pages"])) == ("a", "length", 30, 2)
        assert end["drafter"] == "ngram"
        assert end["steps"] == end["rounds"] + 30 - end["rounds"] - end["accepted"]
        assert sum(end["accepted_by_position"]) == end["accepted"]
        assert 0 <= end["time_queued"] <= end["time_to_first"] <= end["time_total"]
    assert [prompt.id for prompt in read_prompts(str(tmp_path / "r.jsonl"))] == ["a"]


def test_names_of_pages_tell_equal_beginnings_and_nothing_else(tmp_path: Path) -> None:
    prompts = [LONG_PROMPT, (*LONG_PROMPT[:32], 90, 91), (4, *LONG_PROMPT[1:])]
    requests = [Request(id=str(i), prompt=prompt, sampling=SHORT) for i, prompt in enumerate(prompts)]
    salted = replace(requests[0], id="salted", cache_salt="of one key")
    lines = served(tmp_path / "r.jsonl", *requests, salted)
    one, same, other, foreign = (line["pages"] for line in lines if "ended" not in line)
    assert one == same
    assert not set(one) & {*other, *foreign}
    again = served(tmp_path / "again.jsonl", requests[0])
    assert not set(again[0]["pages"]) & set(one)  # another server has another key
    assert page_names(LONG_PROMPT)[:2] == page_names(prompts[1])
    assert len(page_names(range(48))) == 3


def test_a_record_may_have_no_text(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    sampling = replace(SHORT, stop=("secret",), logit_bias={7: 1.0}, top_k=5)
    first, end = served(path, Request(id="a", prompt=LONG_PROMPT, sampling=sampling), text=False)
    assert first["prompt_length"] == 40
    assert len(first["pages"]) == 2
    assert "prompt_tokens" not in first
    assert first["sampling"] == {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "top_k": 5}
    assert end["output_tokens"] == 30
    with pytest.raises(InvalidRequest, match="recorded without its text"):
        read_prompts(str(path))


def test_a_record_that_failed_hears_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(str(tmp_path / "r.jsonl"), share=1.0)
    recorder.take(a_request("whole"))
    whole = (tmp_path / "r.jsonl").read_text()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        recorder.take(a_request("lost"))
    for name in ("whole", "lost", "unknown"):
        recorder.hear(TokenEvent(name, 0, finish=Finish.STOP))
    assert (tmp_path / "r.jsonl").read_text() == whole


def test_the_server_says_that_prompts_are_kept() -> None:
    assert _recording(Settings()) == {}
    said = _recording(Settings(record="f.jsonl", record_share=0.05))["record"]
    assert "5% of the requests, PROMPTS INCLUDED, are kept in f.jsonl" in said
    said = _recording(Settings(record="f.jsonl", record_share=1.0, record_without_text=True))["record"]
    assert "100% of the requests, without their texts, are kept in f.jsonl" in said
