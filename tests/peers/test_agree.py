"""Two tools on one server: each is asked for the same load, in the order that a round wants; a failure is said."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from peers import agree
from peers.agree_report import METRICS, OURS, THEIRS
from tests.bench.fake_server import FakeServer, good, serving

TOOL = """#!{python}
import json, sys
words = sys.argv[1:]
with open({log!r}, "w") as log:
    json.dump(words, log)
if "bad" in words[words.index("--dataset-path") + 1]:
    sys.exit("no such dataset")
place = words[words.index("--result-dir") + 1] + "/" + words[words.index("--result-filename") + 1]
with open(place, "w") as file:
    json.dump(dict.fromkeys({keys!r}, 5.0), file)
"""


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    keys = [*METRICS, "completed", "total_output_tokens", "duration"]
    tool = tmp_path / "vllm"
    tool.write_text(TOOL.format(python=sys.executable, log=str(tmp_path / "log"), keys=keys))
    tool.chmod(0o755)
    (tmp_path / "some.txt").write_text("one\ntwo\nthree\n")
    return Namespace(
        vllm_python=tmp_path / "python", tokenizer=tmp_path, prompts=str(tmp_path / "some.txt"), data=None, count=3,
        tokens=8, concurrency=2,
    )  # fmt: skip  # a field a line would hide what belongs together


def test_both_tools_send_the_same_load(args: Namespace, tmp_path: Path) -> None:
    prompts = agree.write_prompts(tmp_path, args)
    with serving(FakeServer(good())) as server:
        found = agree.both(args, server.url, prompts, fields={"cache_prompt": False}, ours_first=False)
    assert list(found) == [THEIRS, OURS]
    assert found[OURS]["completed"] == 3
    assert found[OURS]["total_output_tokens"] == 3 * 8
    assert found[THEIRS]["mean_tpot_ms"] == 5.0

    counted = server.asked[-3:]  # after one to warm up
    assert {body["messages"][0]["content"] for body in counted} == {"one", "two", "three"}
    assert all(body["cache_prompt"] is False and body["ignore_eos"] and "cache_salt" not in body for body in counted)
    asked = dict(zip(words := json.loads((tmp_path / "log").read_text()), words[1:], strict=False))
    assert asked["--num-prompts"] == "3"
    assert asked["--max-concurrency"] == "2"
    assert asked["--custom-output-len"] == "8" == str(counted[0]["max_tokens"])
    assert asked["--model"] == "m"
    assert json.loads(asked["--extra-body"]) == {"cache_prompt": False}
    assert "--ignore-eos" in asked


def test_a_tool_that_fails_is_named_with_its_last_words(args: Namespace, tmp_path: Path) -> None:
    with serving(FakeServer(good())) as server, pytest.raises(SystemExit, match=r"(?s)vllm bench serve ended.*no such"):
        agree.both(args, server.url, tmp_path / "bad.jsonl", fields={}, ours_first=False)


def test_nobody_answers() -> None:
    class Ended:
        def poll(self) -> int:
            return 1

    with pytest.raises(SystemExit, match="nobody answers at http"):
        agree.wait_for("http://127.0.0.1:1/ready", Ended())  # type: ignore[arg-type]  # all of a process that counts here
