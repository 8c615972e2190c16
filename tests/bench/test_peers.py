"""The driver against workers that only pretend to be systems: what is asked of whom, in which order, and what dies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import peers
from bench.systems import SUITE_PROMPTS, System, Worker, suite_systems

PRETENDER = """#!{python}
import json, os, sys
assert sys.argv[1:3] == ["-m", "bench.worker"], sys.argv
options = json.loads(sys.argv[4])
print(json.dumps({{"version": "9.9"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "die" in request["prompt"]:
        sys.exit(3)
    with open({log!r}, "a") as log:
        print(os.path.basename(options["model"]), request["prompt"], request["tokens"], file=log)
    reply = {{"tokens": request["tokens"], "decode_s": 0.5, "text": "same", "drafted": 0, "accepted": 0}}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def pretender(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(PRETENDER.format(python=sys.executable, log=str(tmp_path / "log")))
    script.chmod(0o755)
    return script


def test_every_suite_has_prompts_and_names_its_systems_once() -> None:
    for suite in SUITE_PROMPTS:
        systems = suite_systems(suite, models=Path("models"), threads=3)
        names = [system.name for system in systems]
        assert len(set(names)) == len(names)
        assert all(system.options["threads"] == 3 for system in systems)
        assert all(system.plain is None or system.plain in names for system in systems)


def test_systems_take_turns_in_rotating_order(
    pretender: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    peers.main([
        "--prompts", str(tmp_path / "prompts.txt"), "--count", "2", "--rounds", "1", "--tokens", "51",
        "--only", "Q4_0", "--only", "Q8_0", "--peers-python", str(pretender), "--json", str(tmp_path / "out.json"),
    ])  # fmt: skip
    asked = (tmp_path / "log").read_text().splitlines()
    four, eight = "smollm2.Q4_0.gguf", "smollm2.Q8_0.gguf"
    assert asked[:2] == [f"{four} one 8", f"{eight} one 8"]  # warm-up
    assert asked[2:] == [f"{four} one 51", f"{eight} one 51", f"{eight} two 51", f"{four} two 51"]

    written = json.loads((tmp_path / "out.json").read_text())
    assert [(s["system"], s["median"], s["runs"]) for s in written["systems"]] == [
        ("llama.cpp Q4_0", 100, 2),
        ("llama.cpp Q8_0", 100, 2),
    ]
    assert written["about"]["versions"] == {"llamacpp": "9.9"}
    assert {"cpu", "cores", "commit", "command"} <= set(written["about"])
    assert "| llama.cpp Q4_0 | 100.0" in capsys.readouterr().out


def test_a_dying_worker_is_named_with_its_status(pretender: Path) -> None:
    worker = Worker(System("Sleepy", "llamacpp", {"model": "m", "threads": 1}), python=pretender)
    with pytest.raises(RuntimeError, match="Sleepy died with status 3"):
        worker.ask("die", tokens=1)
    worker.close()


def test_without_the_peers_interpreter_there_is_no_peer_to_measure(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n")
    with pytest.raises(SystemExit, match="Peers need --peers-python"):
        peers.main(["--prompts", str(tmp_path / "prompts.txt"), "--count", "1", "--only", "llama"])
