"""`make` says each stage of an installation and how long it took, and stops at one that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
    *"${{FAIL:-nothing}}"*) exit 1;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, target: str, **environ: str) -> tuple[int, str, str]:
    """Run a target with a Python that only writes down what it is asked; return status, output and those words."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    python, log = folder / "python", folder / "log"
    python.write_text(PYTHON.format(log=log))
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | environ
    command = ["make", "--no-print-directory", f"PYTHON={python}", target]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, log.read_text()


def test_every_stage_is_said_with_its_seconds(tmp_path: Path) -> None:
    status, out, asked = make(tmp_path, ".venv/.ready-to-serve")
    assert status == 0
    stages = [line for line in out.splitlines() if re.match(r"\d/3 ", line)]
    assert [line[:3] for line in stages] == ["1/3", "2/3", "3/3"]
    assert len(re.findall(r"^  done in \d+ s$", out, flags=re.MULTILINE)) == 3
    assert len(out.splitlines()) == 6, "a log has no more than that"
    assert re.search(r"pip install --quiet --quiet .* -e \.\[serve\]\n", asked)
    assert (tmp_path / ".venv" / ".ready-to-run").exists()


def test_a_cluster_is_installed_with_ray(tmp_path: Path) -> None:
    status, _, asked = make(tmp_path, ".venv/.ready-to-cluster")
    assert status == 0
    assert re.search(r"pip install .* -e \.\[ray\]\n", asked)
    assert (tmp_path / ".venv" / ".ready-to-serve").exists(), "the server's packages are among them"


def test_ci_tests_a_cluster_with_ray_and_the_tools_of_tests(tmp_path: Path) -> None:
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text() + (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"\bmake (.+)", ci)) == {"test", "test-ray"}
    status, _, asked = make(tmp_path, "test-ray")
    assert status == 0
    assert re.search(r"-e \.\[dev\]\n(.*\n)*.*-e \.\[ray\]\n", asked)
    tests = asked.splitlines()[-1].removeprefix("-m pytest -m slow ")
    assert (ROOT / tests).is_file()


def test_a_stage_that_fails_ends_it(tmp_path: Path) -> None:
    status, out, asked = make(tmp_path, ".venv/.ready-to-serve", FAIL="-e .[serve]")
    assert status != 0
    assert "3/3" not in out
    assert "smollm2" not in asked
    assert not (tmp_path / ".venv" / ".ready-to-serve").exists()


def test_a_missing_emulator_is_named_with_its_package(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("make", "sh", "cp", "date", "mkdir", "test", "touch"):
        (tools / name).symlink_to(shutil.which(name) or "/nowhere")
    status, out, asked = make(tmp_path, "test-arm", PATH=str(tools))
    assert status != 0
    assert "qemu-aarch64 is not installed; on Debian and Ubuntu: apt install qemu-user" in out
    assert "pytest" not in asked
