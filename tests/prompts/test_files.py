from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.prompts.files import CALL_REQUEST, SETS, Prompt, read_file, read_prompts, spread
from paceline.types import Grammar, SamplingParams


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


CALL = {"id": "simple_0", "question": [[{"role": "user", "content": "Call f."}]], "function": [{"name": "f"}]}
SCHEMA = {"name": "s", "split": "Github", "schema": {"type": "object"}, "tests": []}


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("spec_bench", {"question_id": 81, "category": "qa", "turns": ["one", "two"]}, ("81", "qa", "one")),
        ("mt_bench", {"question_id": 7, "category": "math", "turns": ["one"]}, ("7", "math", "one")),
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f"}, ("HumanEval/0", "humaneval", "def f")),
        ("gsm8k", {"question": "2 + 2?", "answer": "4"}, ("gsm8k/1", "gsm8k", "2 + 2?")),
        ("code_edit", {"id": "a", "edit": "log", "prompt": "change é"}, ("a", "log", "change é")),
        ("bfcl", CALL, ("simple_0", "bfcl", f'Call f.\n\n{CALL_REQUEST}\n\n[{{"name": "f"}}]')),
        (
            "jsonschemabench",
            SCHEMA,
            ("s", "Github", 'Write JSON that follows this schema:\n\n{\n "type": "object"\n}'),
        ),
        ("train_prompts", {"id": 0, "source": "x", "category": "qa", "prompt": "Why?"}, ("0", "qa", "Why?")),
    ],
)
def test_every_named_set_is_read(tmp_path: Path, name: str, record: Any, expected: tuple[str, str, str]) -> None:
    write(tmp_path / SETS[name], record)
    id, category, text = expected
    [found] = read_prompts(name, data=tmp_path)
    assert (found.id, found.category, found.messages) == (id, category, user(text))


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("\ufefffirst\n\n  second \n", encoding="utf-8")
    found = read_prompts(str(path))
    assert [(prompt.id, prompt.text) for prompt in found] == [("mine/1", "first"), ("mine/3", "  second ")]


def test_conversations_end_with_the_first_user(tmp_path: Path) -> None:
    said = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    share_gpt = tmp_path / "sharegpt.json"
    share_gpt.write_text(json.dumps([{"id": "1", "conversations": said}, {"messages": messages}]), encoding="utf-8")
    first, second = read_prompts(str(share_gpt))
    assert first.messages == ({"role": "system", "content": "Be brief."}, *user("Hi"))
    assert second.messages == tuple(messages)
    assert (first.text, second.id) == ("Hi", "sharegpt/2")


@pytest.mark.parametrize(
    ("record", "later"),
    [
        ({"turns": ["one", "two", 3, "four"]}, ("two", "four")),
        ({"messages": [*user("one"), {"role": "assistant", "content": "so"}, *user("two")]}, ("two",)),
        ({"question": [[*user("one")], [*user("two")]]}, ("two",)),
        ({"prompt": "one"}, ()),
    ],
)
def test_what_a_user_says_later_is_kept_but_not_asked(tmp_path: Path, record: Any, later: tuple[str, ...]) -> None:
    [found] = read_file(write(tmp_path / "p.jsonl", record))
    assert (found.text, found.later) == ("one", later)


def test_where_a_prompt_is_from(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "source": "s", "license": "MIT"}, {"prompt": "b"})
    first, second = read_file(path)
    assert first == Prompt("p/1", "p", user("a"), source="s", license="MIT")
    assert second == Prompt("p/2", "p", user("b"), source="p.jsonl")
    assert (first.where, second.where) == (f"{path}:1", f"{path}:2")


def test_recorded_requests_keep_their_parameters(tmp_path: Path) -> None:
    sampling = {
        "temperature": 0.5,
        "seed": 7,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
        "grammar": {"kind": "json_object"},
    }
    path = write(tmp_path / "served.jsonl", {"id": "req", "prompt_tokens": [1, 2, 3], "sampling": sampling})
    [found] = read_prompts(str(path))
    assert found.tokens == (1, 2, 3)
    assert found.sampling == SamplingParams(
        temperature=0.5, seed=7, stop=("x",), logit_bias={5: 1.0}, grammar=Grammar.json_object()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        ("[1]", "holds list where a JSON object"),
        ('{"txt": "x"}', "found txt"),
        ('{"turns": []}', "found turns"),
        ('{"turns": [7]}', "found turns"),
        ('{"prompt": ""}', "no text"),
        ('{"prompt": null}', "no text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no text"),
        ('{"messages": ["x"]}', "no text"),
        ('{"prompt_tokens": []}', "list of token ids"),
        ('{"prompt_tokens": [1.5]}', "list of token ids"),
        ('{"prompt_tokens": [1], "sampling": {"temprature": 1}}', "did you mean"),
        ('{"prompt_tokens": [1], "sampling": {"grammar": {"kin": 1}}}', "no request has"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(InvalidRequest, match=message) as error:
        read_prompts(str(path))
    assert f"{path}:2" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n", "holds no prompts"),
        ("broken.txt", b"fine\n\xff\xfe", "UTF-8"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n' * 99, mtime=0)[:-20], "cannot be read"),
        ("not.jsonl.gz", b"hello", "cannot be read"),
    ],
    ids=["empty", "not UTF-8", "cut", "not gzip"],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(str(tmp_path / name))


def test_what_is_missing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="PACELINE_DATA"):
        read_prompts("jsonschemabench")
    with pytest.raises(InvalidRequest, match="must hold jsonschemabench/schemas_dev"):
        read_prompts("jsonschemabench", data=tmp_path)
    with pytest.raises(InvalidRequest, match="one of the sets spec_bench"):
        read_prompts("gsm9k", data=tmp_path)


def test_a_count_is_spread_over_the_whole_set(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *({"id": str(i), "prompt": "x"} for i in range(10)))
    assert [prompt.id for prompt in read_prompts(str(path), count=3)] == ["0", "3", "6"]
    assert len(read_prompts(str(path), count=50)) == 10
    assert spread([1, 2], count=1) == [1]
