from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.types import TokenEvent
from tests.cli.conftest import Cli
from tests.cli.tiny_model import write_model

FLAGS = ("--format", "fp32", "--temperature", "0", "--max-tokens", "30", "--ignore-eos")


@pytest.fixture
def talk(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Types lines into a chat; gives what was shown."""

    def type_lines(*lines: str, flags: tuple[str, ...] = FLAGS) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status, out, err = cli("chat", tiny, *flags)
        assert (status, err) == (0, "")
        return out

    return type_lines


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of every question that is asked."""
    asked: list[list[dict[str, str]]] = []
    encode = LLM.encode_chat

    def spy(self: LLM, messages: Any) -> tuple[int, ...]:
        asked.append([dict(message) for message in messages])
        return encode(self, messages)

    monkeypatch.setattr(LLM, "encode_chat", spy)
    return asked


def test_a_conversation_is_kept(talk: Any, conversations: list[list[dict[str, str]]]) -> None:
    out = talk("hello", "", "and you?", flags=(*FLAGS, "--system", "be kind"))
    first, second = conversations
    assert first == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert second[:2] == first
    assert second[2]["role"] == "assistant"
    assert out.startswith(second[2]["content"] + "\n")
    assert second[3] == {"role": "user", "content": "and you?"}


def test_reset_and_forget(talk: Any, conversations: list[list[dict[str, str]]]) -> None:
    out = talk("one", "/clear", "two", "three", "/forget", "four")
    contents = [[m["content"] for m in asked if m["role"] == "user"] for asked in conversations]
    assert contents == [["one"], ["two"], ["two", "three"], ["three", "four"]]
    assert "a new conversation" in out
    assert "1 exchanges are left" in out


def test_speculation_can_be_switched(talk: Any) -> None:
    out = talk("abcabcabc", "/plain", "/clear", "abcabcabc", "/spec", "/stats", "/exit", "never asked")
    answer = out.splitlines()[0]
    assert out.count(answer) == 2, "plain and speculative answers differ"
    assert "speculation off: plain decoding" in out
    assert "speculation on" in out
    assert "last answer   30 tokens" in out
    assert "plain: off by request" in out
    assert "speculative   1 answer · 29 tokens" in out
    assert "plain         1 answer · 29 tokens" in out
    assert "drafted tokens accepted" in out
    assert "cut at --max-tokens 30" in out


def test_stats_before_the_first_answer_and_help(talk: Any) -> None:
    out = talk("/stats", "/help", "/stat")
    assert "no answers yet" in out
    assert "/forget        drop the oldest exchange" in out
    assert "unknown command '/stat'; did you mean '/stats'?" in out


def test_a_conversation_that_does_not_fit(talk: Any, conversations: list[list[dict[str, str]]]) -> None:
    out = talk("x" * 180, "y" * 90, "/clear", "fits")
    assert "not asked: the prompt has " in out
    assert "/forget drops the oldest exchange, /clear all of them" in out
    assert [m["content"] for m in conversations[2]] == ["fits"], "the chat goes on"


def test_an_answer_that_fills_the_context(talk: Any) -> None:
    flags = ("--format", "fp32", "--temperature", "0", "--ignore-eos")  # 1024 tokens are allowed, 256 fit
    assert "cut: the context is full. /forget" in talk("x" * 200, flags=flags)


def test_ctrl_c_stops_the_answer_and_keeps_it(
    talk: Any, conversations: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, before = LLM.stream, signal.getsignal(signal.SIGINT)

    def interrupted(self: LLM, *args: Any, **options: Any) -> Iterator[TokenEvent]:
        for i, event in enumerate(stream(self, *args, **options)):
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield event

    monkeypatch.setattr(LLM, "stream", interrupted)
    out = talk("hello", "go on", flags=(*FLAGS, "--no-speculation"))
    assert out.count("stopped") == 2
    assert conversations[1][1]["role"] == "assistant"
    assert signal.getsignal(signal.SIGINT) is before


def test_bad_requests(cli: Cli, tiny: str, tmp_path: Path) -> None:
    bare = write_model(tmp_path, template=None)
    assert "has no chat template: it continues text; use `paceline generate`" in cli("chat", bare)[2]
    assert "leave --n at 1" in cli("chat", tiny, "--n", "2")[2]


def test_a_template_that_refuses_does_not_end_the_chat(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('one question only') }}{% endif %}{{ messages[0].content }}"
    )
    model = write_model(tmp_path, template=template)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/clear\nthree\n"))
    status, out, err = cli("chat", model, *FLAGS)
    assert (status, err) == (0, "")
    assert out.count("not asked: ") == 1
    assert "one question only" in out


class Typed(io.StringIO):
    """Input that is typed at a terminal."""

    def isatty(self) -> bool:
        return True


def test_somebody_who_types_is_greeted(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Typed("/exit\n"))
    _, out, _ = cli("chat", tiny, *FLAGS)
    first, second, _ = out.split("\n", 2)
    assert first == f"{Path(tiny).name} · drafts with suffix: accepted guesses are in colour"
    assert second.startswith("/help lists commands")
    monkeypatch.setattr("sys.stdin", Typed("/exit\n"))
    assert " · no drafter\n" in cli("chat", tiny, *FLAGS, "--no-speculation")[1]


def test_the_system_message_can_be_changed(talk: Any, conversations: list[list[dict[str, str]]]) -> None:
    out = talk("/system be brief", "one", "/system", "two", flags=(*FLAGS, "--system", "be kind"))
    assert conversations[0][0] == {"role": "system", "content": "be brief"}
    assert [message["role"] for message in conversations[1]] == ["user", "assistant", "user"]
    assert "system message: be brief" in out
    assert "no system message" in out


def test_a_message_of_several_lines(talk: Any, conversations: list[list[dict[str, str]]]) -> None:
    talk('"""first', "  second", 'third"""', '"""one"""', '"""never closed', "to the end")
    asked = [messages[-1]["content"] for messages in conversations]
    assert asked == ["first\n  second\nthird", "one", "never closed\nto the end"]


def test_a_conversation_is_saved_once(talk: Any, tmp_path: Path) -> None:
    place = tmp_path / "said.json"
    out = talk("hello", f"/save {place}", f"/save {place}", "/save", flags=(*FLAGS, "--system", "be kind"))
    messages = json.loads(place.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert out.startswith(messages[2]["content"] + "\n")
    assert f"3 messages are in {place}" in out
    assert "not saved: File exists; type /save FILE" in out
    assert out.endswith("type /save FILE\n")
