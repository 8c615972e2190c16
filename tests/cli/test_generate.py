from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.style import GREEN_BOLD, RESET
from paceline.llm import LLM
from paceline.types import SamplingParams
from tests.cli.conftest import Cli

GREEDY = ("--format", "fp32", "--temperature", "0", "--max-tokens", "40", "--ignore-eos")
PROMPT = "abcabcabc"
SAMPLING = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def texts(tiny: str) -> dict[str, str]:
    """What the model says to some prompts, by the Python API."""
    llm = LLM(tiny, format="fp32")
    return {prompt: llm.generate(prompt, SAMPLING)[0].text for prompt in (PROMPT, "hello", "good day")}


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_one_prompt_is_streamed(cli: Cli, tiny: str, texts: dict[str, str]) -> None:
    status, out, err = cli("generate", tiny, PROMPT, *GREEDY)
    assert (status, out, err) == (0, texts[PROMPT] + "\n", "")


@pytest.mark.parametrize(
    "flags", [["--no-speculation"], ["--rule", "rejection"], ["--max-draft", "2"], ["--no-prefix-cache"]]
)
def test_speculation_does_not_change_the_text(cli: Cli, tiny: str, texts: dict[str, str], flags: list[str]) -> None:
    assert cli("generate", tiny, PROMPT, *GREEDY, *flags)[1] == texts[PROMPT] + "\n"


def test_a_predicted_text_is_drafted_from(cli: Cli, tiny: str, tmp_path: Path) -> None:
    letters = ("--allowed-tokens", ",".join(map(str, range(65, 91))), "--temperature", "1", "--seed", "3")
    flags = ("--format", "fp32", "--max-tokens", "40", *letters, "--drafter", "none", "--no-measure-cost")
    text = cli("generate", tiny, PROMPT, *flags)[1]
    file = tmp_path / "predicted.txt"
    file.write_text(text, encoding="utf-8")
    assert cli("generate", tiny, PROMPT, *flags, "--prediction", file)[1] == text
    [record] = records(cli("generate", tiny, PROMPT, *flags, "--prediction", file, "--json")[1])
    assert record["stats"]["prediction_accepted"] > 30
    status, _, err = cli("generate", tiny, PROMPT, "--prediction", tmp_path / "none")
    assert status == 2
    assert "cannot be read" in err


def test_accepted_tokens_are_coloured(
    cli: Cli, tiny: str, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = cli("generate", tiny, PROMPT, *GREEDY)
    assert GREEN_BOLD in out
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == texts[PROMPT] + "\n"
    green = re.findall(re.escape(GREEN_BOLD) + "(.*?)" + re.escape(RESET), out, flags=re.DOTALL)
    [record] = records(cli("generate", tiny, PROMPT, *GREEDY, "--json")[1])
    assert len("".join(green)) <= record["stats"]["accepted"]  # bytes that are no text share a character
    assert green


def test_plain_answers_have_no_colour(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert GREEN_BOLD not in cli("generate", tiny, PROMPT, *GREEDY, "--no-speculation")[1]


def test_json_says_everything(cli: Cli, tiny: str, texts: dict[str, str]) -> None:
    status, out, _ = cli("generate", tiny, PROMPT, *GREEDY, "--json", "--logprobs", "2", "--prompt-logprobs", "0")
    [record] = records(out)
    assert status == 0
    assert record["text"] == texts[PROMPT]
    assert record["finish"] == "length"
    assert len(record["tokens"]) == len(record["logprobs"]) == 40
    assert len(record["prompt_logprobs"]) == len(record["prompt_tokens"]) == len(PROMPT)
    assert record["prompt_logprobs"][0] is None
    assert record["stats"]["drafter"] == "suffix"
    assert record["stats"]["tokens_per_step"] == 40 / record["stats"]["steps"]
    assert record["stats"]["tokens_per_round"] == record["stats"]["tokens_per_step"], "the older name"
    assert record["stats"]["decode_tok_s"] > 0


def test_many_prompts_are_answered_in_order(cli: Cli, tiny: str, texts: dict[str, str]) -> None:
    found = records(cli("generate", tiny, *texts, *GREEDY, "--json")[1])
    assert {record["prompt"]: record["text"] for record in found} == texts
    assert [record["prompt"] for record in found] == list(texts)
    _, out, _ = cli("generate", tiny, *texts, *GREEDY)
    assert out == "".join(f"── prompt {i} ──\n{text}\n" for i, text in enumerate(texts.values(), start=1))


def test_prompts_from_a_file_and_from_standard_input(
    cli: Cli, tiny: str, texts: dict[str, str], prompts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\n".join(texts) + "\n"
    from_file = records(cli("generate", tiny, *GREEDY, "--json", "--file", prompts(lines))[1])
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    from_stdin = records(cli("generate", tiny, *GREEDY, "--json")[1])
    assert [record["text"] for record in from_file] == [record["text"] for record in from_stdin] == list(texts.values())


def test_several_answers_to_a_prompt(cli: Cli, tiny: str) -> None:
    flags = ("--format", "fp32", "--n", "2", "--seed", "1", "--max-tokens", "12", "--temperature", "1.5")
    [record] = records(cli("generate", tiny, PROMPT, *flags, "--json")[1])
    assert record["text"] == record["samples"][0]["text"] != record["samples"][1]["text"]
    _, out, _ = cli("generate", tiny, PROMPT, *flags)
    assert out.startswith("── prompt 1, answer 1 ──\n")
    assert "── prompt 1, answer 2 ──" in out


def test_the_models_own_sampling_is_the_default(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    generate = LLM.generate

    def spy(self: LLM, prompts: Any, sampling: SamplingParams, **options: Any) -> Any:
        seen.append(sampling)
        return generate(self, prompts, sampling, **options)

    monkeypatch.setattr(LLM, "generate", spy)
    cli("generate", tiny, PROMPT, "--json", "--format", "fp32", "--max-tokens", "2", "--seed", "3")
    assert seen == [SamplingParams(temperature=0.5, top_k=40, max_tokens=2, seed=3)]


def test_chat_applies_the_template(cli: Cli, tiny: str) -> None:
    [record] = records(cli("generate", tiny, "hi", *GREEDY, "--json", "--chat", "--system", "be brief")[1])
    llm = LLM(tiny, format="fp32")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert record["prompt_tokens"] == list(llm.encode_chat(messages))


def test_stop_strings_end_an_answer(cli: Cli, tiny: str, texts: dict[str, str]) -> None:
    stop = texts[PROMPT][5:7]
    before = texts[PROMPT][: texts[PROMPT].index(stop)]
    assert cli("generate", tiny, PROMPT, *GREEDY, "--stop", stop)[1] == before + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["p", "--file", "f"], "both as arguments and with --file"),
        (["p", "--system", "s"], "add --chat"),
        (["p", "--format", "int9"], "unknown weight format 'int9'; did you mean 'int8'?"),
        (["p", "--drafter", "ngramm"], "unknown drafter 'ngramm'; did you mean 'ngram'?"),
        (["p", "--drafter", "ngram:min=2"], "unknown option of the ngram drafter 'min'"),
        (["p", "--temperature", "nan"], "temperature must be a finite number"),
        (["p", "--n", "0"], "n must be between 1 and"),
        ([""], "the prompt is empty"),
        (["p" * 300], "the context holds 256"),
        (["p", "--kv-memory", "1k"], "raise kv_memory or lower max_context"),
        (["p", "--max-draft", "0"], "max_draft must be"),
    ],
)
def test_bad_requests(cli: Cli, tiny: str, argv: list[str], message: str) -> None:
    status, out, err = cli("generate", tiny, *argv)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "message"), [("", "holds no prompt"), ("a\n\nb\n", "line 2 is empty")])
def test_bad_files(cli: Cli, tiny: str, prompts: Callable[[str], Path], text: str, message: str) -> None:
    status, _, err = cli("generate", tiny, "--file", prompts(text))
    assert status == 2
    assert message in err


def test_a_file_that_is_not_there(cli: Cli, tiny: str, tmp_path: Path) -> None:
    status, _, err = cli("generate", tiny, "--file", tmp_path / "none")
    assert status == 2
    assert "cannot be read" in err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    assert "cannot be read" in cli("generate", tiny, "--file", tmp_path / "binary")[2]


def test_at_a_terminal_statistics_follow_the_answer(
    cli: Cli, tiny: str, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, out, err = cli("generate", tiny, PROMPT, *GREEDY)
    assert out == texts[PROMPT] + "\n"
    assert f"loading {Path(tiny).name}" in err
    assert "[40 tokens · " in err
    assert "drafted tokens accepted (" in err
    assert "cut: see --max-tokens" in err
    _, _, err = cli("generate", tiny, PROMPT, "hello", *GREEDY, "--no-speculation")
    assert err.count("plain: ") == 2


def test_a_prompt_must_come_from_somewhere(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    status, _, err = cli("generate", tiny)
    assert status == 2
    assert "no prompt; give one as an argument, with --file, or on standard input" in err


def test_prompts_may_stand_behind_options(cli: Cli, tiny: str) -> None:
    flags = ("--format", "fp32", "--max-tokens", "3", "--json")
    status, out, _ = cli("generate", tiny, *flags, "hello", "there")
    assert status == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["hello", "there"]
    assert "unknown option '--jsn'; did you mean '--json'?" in cli("generate", tiny, "--jsn", "hello")[2]
