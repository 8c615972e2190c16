"""The driver against workers that only pretend to be systems: what is asked of whom, what is kept, and what dies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.prompts.files import Prompt
from peers import run as peers
from peers.backends import SystemAnswer
from peers.results import Measurement, read_results
from peers.sets import SETS, Plan, draw
from peers.systems import Mode, Unusable, Worker, all_modes
from peers.worker import digest, timed

PRETENDER = """#!{python}
import json, os, sys
if sys.argv[1] == "-c":  # is the system installed?
    sys.exit("vllm" in sys.argv[2])
kind, options = sys.argv[3], json.loads(sys.argv[4])
name = os.path.basename(options["model"]) + " " + options.get("drafter", "plain")
if "ngram_simple" in name:
    print("no such file", file=sys.stderr)
    sys.exit(3)
print(json.dumps({{"version": "9.9"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    with open({log!r}, "a") as log:
        print(name, [len(p) for p in request["prompts"]], request["tokens"], request["at_once"], file=log)
    if os.path.exists({log!r} + "." + kind):
        print(json.dumps({{"error": "out of memory"}}), flush=True)
        continue
    count = len(request["prompts"])
    digests = ["same"] * count if options.get("drafter") != "ngram_cache" else ["same"] * (count - 1) + ["other"]
    reply = {{"seconds": 2.0, "tokens": [10] * count, "digests": digests, "drafted": 0, "accepted": 0}}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def pretender(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(PRETENDER.format(python=sys.executable, log=str(tmp_path / "log")))
    script.chmod(0o755)
    return script


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "humaneval"
    folder.mkdir()
    import gzip

    with gzip.open(folder / "HumanEval.jsonl.gz", "wt") as file:
        for i in range(30):
            file.write(json.dumps({"task_id": f"t{i}", "prompt": "x" * (i + 1)}) + "\n")
    return tmp_path


def encode(prompt: Prompt) -> list[int]:
    return [7] * len(prompt.text)


def run(pretender: Path, data: Path, *words: str) -> None:
    peers.main(
        [
            "--set",
            "code",
            "--data",
            str(data),
            "--peers-python",
            str(pretender),
            "--rounds",
            "2",
            "--tokens",
            "51",
            *words,
        ],
        encode=encode,
    )


def test_modes_have_names_of_their_own_and_a_plain_one_to_repeat() -> None:
    names = [mode.name for mode in all_modes(models=Path("models"))]
    assert len(set(names)) == len(names)
    assert all(mode.plain in (None, *names) for mode in all_modes(models=Path("models")))
    assert {mode.system for mode in all_modes(models=Path("m"))} == {
        "Paceline", "llama.cpp", "OpenVINO", "transformers", "vLLM"
    }  # fmt: skip  # a field a line would hide what belongs together


def test_a_round_has_prompts_of_its_own_and_the_same_every_time(data: Path) -> None:
    plan = Plan(["code"], 2, 51, {1: 3, 8: 8}, {1: 1, 8: 8})
    work = draw(plan, data=data, encode=encode)
    ids = [task.id for cell in plan.cells() for task in work[cell]]
    assert len(ids) == len(set(ids)) == 2 * (3 + 8)
    assert work == draw(plan, data=data, encode=encode)
    with pytest.raises(SystemExit, match="code: 33 prompts are needed, humaneval has 30"):
        draw(Plan(["code"], 3, 51, {1: 3, 8: 8}, {1: 1, 8: 8}), data=data, encode=encode)


def test_a_prompt_that_is_too_long_is_not_drawn(data: Path) -> None:
    plan = Plan(["code"], 1, 51, {1: 20}, {1: 20})
    work = draw(plan, data=data, encode=lambda prompt: [7] * (800 + (len(prompt.text) > 20)))
    assert {len(task.tokens) for task in work["code", 1, 0]} == {800}


def test_modes_take_turns_on_the_same_prompts_and_slow_ones_get_the_first(
    pretender: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(pretender, data, "--only", "Q4_0 plain", "--only", "transformers", "--save", str(data / "out.jsonl"))
    asked = [line.rsplit(" ", 2) for line in (data / "log").read_text().splitlines()]
    measured = [(what, at_once) for what, tokens, at_once in asked if tokens == "51"]
    assert len(measured) == 2 * 2 * 2 + 2  # rounds × at once × two modes, and lookup one at a time
    llama, plain, lookup = "smollm2.Q4_0.gguf plain", "smollm2.hf-bf16 plain", "smollm2.hf-bf16 lookup"
    assert [what.rsplit(" [")[0] for what, _ in measured[:6]] == [llama, plain, lookup, plain, llama, lookup]
    warm = [what.rsplit(" [")[0] for what, tokens, _ in asked if tokens == "8"]
    assert sorted(warm) == sorted([llama, plain] * 2 + [lookup])  # each number at once that it will meet
    whole = json.loads(measured[0][0].partition("plain ")[2])
    assert json.loads(measured[1][0].partition("plain ")[2]) == whole[:1]  # transformers
    assert [at_once for what, at_once in measured if "lookup" in what] == ["1", "1"]

    results = read_results(data / "out.jsonl")
    assert {(r.mode, r.at_once, r.speed) for r in results.measurements if r.mode.startswith("llama")} == {
        ("llama.cpp, Q4_0 plain", 1, 10.0),
        ("llama.cpp, Q4_0 plain", 8, 40.0),
    }
    assert results.about["versions"] == {"llama.cpp": "9.9", "transformers": "9.9"}
    assert {"cpu", "cores", "commit"} <= set(results.about["machine"])
    assert str(data) not in json.dumps(results.about), "a path of this machine"
    assert "| llama.cpp, Q4_0 plain | 10.0 (10.0–10.0) |" in capsys.readouterr().out


def test_what_cannot_be_measured_is_named_and_the_rest_goes_on(
    pretender: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "log.openvino").touch()
    run(pretender, data, "--only", "llama", "--only", "vLLM, bf16 plain", "--only", "OpenVINO, int8 prompt")
    out = capsys.readouterr().out
    assert "! vLLM, bf16 plain could not be measured: not installed: no --peers-python has vllm" in out
    assert "! llama.cpp, Q4_0 ngram-simple could not be measured: died with status 3: no such file" in out
    assert "! OpenVINO, int8 prompt lookup could not be measured: out of memory" in out
    assert "| llama.cpp, Q4_0 plain | 40.0 (40.0–40.0) |  |" in out
    assert "| llama.cpp, Q4_0 ngram-cache | 40.0 (40.0–40.0) | 14/16 |" in out


def test_a_run_that_was_killed_goes_on_where_it_ended(pretender: Path, data: Path) -> None:
    out = data / "out.jsonl"
    words = ("--only", "Q4_0 plain", "--only", "Q4_0 ngram-cache")
    run(pretender, data, *words, "--save", str(out))
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:4]) + lines[4][:20])  # as if killed while it wrote the fourth measurement
    (data / "log").unlink()
    run(pretender, data, *words, "--resume", str(out))
    again = read_results(out).measurements
    before = [Measurement(**json.loads(line)["run"]) for line in lines[1:]]
    key = [(r.mode, r.cell, r.prompts) for r in again]
    assert sorted(key) == sorted((r.mode, r.cell, r.prompts) for r in before)
    measured = [line for line in (data / "log").read_text().splitlines() if line.split()[-2] == "51"]
    assert len(measured) == len(before) - 3

    with pytest.raises(SystemExit, match="has the plan"):
        run(pretender, data, *words, "--resume", str(out), "--count", "3")
    with pytest.raises(SystemExit, match="exists: go on with it by --resume"):
        run(pretender, data, *words, "--save", str(out))


def test_a_dying_worker_is_named_with_its_status(pretender: Path) -> None:
    worker = Worker(Mode("Sleepy", "llama.cpp", {"model": "m", "drafter": "ngram_simple"}), python=pretender, threads=1)
    with pytest.raises(Unusable, match="died with status 3: no such file"):
        worker.started()
    worker.close()


def test_an_unknown_mode_is_an_error_that_lists_them(pretender: Path, data: Path) -> None:
    with pytest.raises(SystemExit, match="known: Paceline, default; Paceline, plain"):
        run(pretender, data, "--only", "nothing")


def test_a_worker_answers_so_many_at_a_time() -> None:
    together = []

    def system(prompts: list[list[int]], tokens: int) -> list[SystemAnswer]:
        together.append(len(prompts))
        return [SystemAnswer(tokens, prompt, drafted=3, accepted=2) for prompt in prompts]

    reply = timed(system, prompts=[[1], [2], [3]], tokens=5, at_once=2)
    assert together == [2, 1]
    assert reply["tokens"] == [5, 5, 5]
    assert (reply["drafted"], reply["accepted"]) == (9, 6)
    assert reply["digests"] == [digest(SystemAnswer(0, [i])) for i in (1, 2, 3)]
    assert len(set(reply["digests"])) == 3
    assert reply["seconds"] > 0


def test_every_kind_of_work_is_a_set_that_can_be_read() -> None:
    from paceline.prompts.files import SETS as SOURCES

    assert list(SETS) == ["chat", "code", "summary", "JSON"]
    assert all(source in SOURCES for source, _ in SETS.values())
