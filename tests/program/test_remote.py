"""Programs on a server: the same texts as on an LLM, and errors that name what another server cannot do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ProgramError
from paceline.llm import LLM
from paceline.program import Remote, State, assistant, gen, program, select, system, user
from paceline.program.bodies import gen_body
from paceline.program.expressions import Gen
from paceline.program.prompt import Prompt
from paceline.server.background import serving
from paceline.server.settings import Settings
from paceline.types import Grammar, Speculation
from tests.bench import fake_server as fake
from tests.server.api import tiny_llm


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A server of the same weights as the fixture `llm`."""
    llm = tiny_llm(tmp_path_factory.mktemp("remote"))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(llm, Settings(port=0), listener=listener, name="tiny"),
    ):
        yield Remote(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    assert llm.engine._cache.pool.held == 0
    assert not llm.engine.has_work


@program
def everything(s: State) -> None:
    s += system("Be kind.") + user("<|im_end|> hello")
    forks = s.fork(3)
    for fork in forks:
        fork += assistant(gen("a", max_tokens=6, temperature=1.2, top_p=0.9, repetition_penalty=1.1))
    s.join(forks)
    s += assistant("Well (")
    s += select("s", ["yes", "no.", "who knows?"])
    s += gen("c", choices=["a|b", "(c) "])
    s += user("Go on.") + assistant(gen("j", schema={"type": "object", "properties": {}}, max_tokens=20))


@program
def plain(s: State) -> None:
    s += "abcabc"
    s += gen("a", max_tokens=9, min_tokens=3, stop=["zz"], logit_bias={70: 3.0}, top_k=30, speculation=OFF)
    s += select("mean", ["one", "three"], by="mean")
    s += gen("p", max_tokens=5, prediction="abc", stop_ids=[5], allowed_tokens=[70, 71, 72, 73])
    s += gen("r", regex="[ab]{5}")


OFF = Speculation(enabled=False)


@pytest.mark.parametrize("which", [everything, plain], ids=lambda which: which.name)
def test_same_texts_as_on_an_llm(llm: LLM, served: Remote, which: Any) -> None:
    here, there = which.run(on=llm, seed=5), which.run(on=served, seed=5)
    assert there.variables == here.variables
    assert there.text == here.text
    for mine, theirs in zip(here.run.calls, there.run.calls, strict=True):
        assert theirs.scores == pytest.approx(mine.scores, abs=1e-4)
        if isinstance(mine.ask, Gen):
            assert theirs.usage.output_tokens == mine.usage.output_tokens
            assert theirs.usage.prompt_tokens == mine.usage.prompt_tokens
            assert mine.sample is not None
            assert theirs.sample is not None
            assert theirs.sample.finish == mine.sample.finish


def test_a_batch_and_streams(served: Remote) -> None:
    states = plain.run_batch([()] * 5, on=served, seed=3)
    assert all(state.error is None for state in states)
    with plain.start(on=served, seed=states[0].seed) as state:
        assert "".join(state.stream("a")) == states[0]["a"]


def test_errors_of_the_server(served: Remote) -> None:
    @program
    def wrong(s: State) -> None:
        s += "abc" * 200
        s += gen("a", max_tokens=3)

    with pytest.raises(ProgramError, match=r"line \d+ of test_remote.py: http\S+ answered 400: .*context"):
        wrong.run(on=served)


def test_a_stopped_run_leaves_nothing_on_the_server(served: Remote) -> None:
    """The fixture checks at its end that the server's engine is idle."""

    @program
    def endless(s: State) -> None:
        while True:
            forks = s.fork(4)
            for fork in forks:
                fork += "abc" + gen("a", max_tokens=200)
            forks[0]["a"]

    with pytest.raises(ProgramError, match="timeout"):
        endless.run(on=served, timeout=0.2)


def test_a_key_and_a_model_are_sent() -> None:
    with fake.serving(fake.FakeServer(fake.good())) as server:

        @program
        def asks(s: State) -> None:
            s += user("Hello") + assistant(gen("a", max_tokens=4, temperature=0))

        state = asks.run(on=Remote(server.url, model="other"), seed=1)
        assert state["a"] == "w0 w1 w2 w3 "
        [body] = server.asked
        assert body["model"] == "other"
        assert body["messages"] == [{"role": "user", "content": "Hello"}]
        assert state.run.calls[0].usage.output_tokens == 8


FOREIGN = {
    "top_k": (lambda s: s.__iadd__("a" + gen("x", top_k=3)), "top_k: http"),
    "regex": (lambda s: s.__iadd__("a" + gen("x", regex="a+")), "a regex or choices: http"),
    "choices": (lambda s: s.__iadd__("a" + gen("x", choices=["b"])), "a regex or choices: http"),
    "speculation": (lambda s: s.__iadd__("a" + gen("x", speculation=OFF)), "speculation: http"),
    "continued": (lambda s: s.__iadd__(user("a") + assistant("b" + gen("x"))), "continue_final_message: http"),
    "select": (lambda s: s.__iadd__("a" + select("x", ["b", "c"])), "select needs prompt_logprobs, and http"),
    "logprobs": (lambda s: s.__iadd__("a" + gen("x", logprobs=1)), "logprobs of a gen are not read from a Remote"),
    "nothing": (lambda s: s.__iadd__(select("x", ["b", "c"])), "select needs text before it"),
}


def whole(body: Any, number: int) -> Iterator[bytes]:
    yield fake.plain(200, json.dumps({"choices": [{"text": "x"}]}))


@pytest.mark.parametrize("what", FOREIGN)
def test_what_another_server_may_not_know(what: str) -> None:
    body, message = FOREIGN[what]

    @program
    def needs(s: State) -> None:
        body(s)

    with fake.serving(fake.FakeServer(whole)) as server, pytest.raises(ProgramError) as caught:
        needs.run(on=Remote(server.url))
    assert message in str(caught.value)


def broken(*pieces: bytes | None) -> Any:
    def answer(body: Any, number: int) -> Iterator[bytes | None]:
        yield fake.STREAM
        yield from pieces

    return answer


BROKEN: dict[str, tuple[Any, str]] = {
    "no end": (broken(fake.delta("a"), fake.event(b"[DONE]") + fake.END), "broke off after 1 characters"),
    "hangs up": (broken(fake.delta("a"), None), "did not answer"),
    "no JSON": (broken(fake.event(b"{"), fake.END), "which is no chunk of OpenAI's"),
    "gives up": (broken(fake.event({"error": {"message": "tired"}}), fake.END), "gave up: tired"),
    "refuses": (lambda body, number: iter([fake.plain(503, "busy")]), "answered 503: busy"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_server_that_breaks(what: str) -> None:
    answer, message = BROKEN[what]

    @program
    def asks(s: State) -> None:
        s += "abc" + gen("a", max_tokens=4)

    with fake.serving(fake.FakeServer(answer)) as server, pytest.raises(ProgramError) as caught:
        asks.run(on=Remote(server.url))
    assert message in str(caught.value)


def test_no_server_and_no_model() -> None:
    @program
    def asks(s: State) -> None:
        s += "abc" + gen("a", max_tokens=4)

    with pytest.raises(ProgramError, match="did not answer"):
        asks.run(on=Remote("http://127.0.0.1:9"))
    with (
        fake.serving(fake.FakeServer(fake.good(), models='{"data": []}')) as server,
        pytest.raises(ProgramError, match="names no model"),
    ):
        asks.run(on=Remote(server.url))


def test_bodies() -> None:
    ask = Gen("a", {"max_tokens": 3, "grammar": Grammar.json_object()}, Speculation(rule="rejection", max_draft=3))
    path, body = gen_body(ask, Prompt("abc"), seed=1)
    assert path == "/v1/completions"
    assert body["response_format"] == {"type": "json_object"}
    assert body["speculation"] == {"rule": "rejection", "max_draft": 3}
    _, body = gen_body(Gen("a", {}, Speculation(target_tpot=0.04)), Prompt("abc"), seed=1)
    assert body["speculation"] == {"target_tpot_ms": 40.0}
    calls = Grammar.calls(Grammar.regex("a"), marks=None)
    with pytest.raises(InvalidRequest, match="a grammar of kind calls cannot be asked of a Remote"):
        gen_body(Gen("a", {"grammar": calls}, Speculation()), Prompt("abc"), seed=1)


def test_without_httpx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(ImportError, match="a program on a Remote needs httpx"):
        Remote("http://127.0.0.1:9")
