"""Optional packages: what needs them, and what does without."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOADED = """
import sys
import paceline.bench.engine, paceline.engine.engine, paceline.engine.device, paceline.llm
print(sorted({"fastapi", "uvicorn", "pydantic", "llguidance", "httpx"} & sys.modules.keys()))
"""


def test_grammars_need_one_package_alone() -> None:
    extras = PROJECT["optional-dependencies"]
    assert [package.partition(">")[0] for package in extras["grammar"]] == ["llguidance"]
    assert "paceline[grammar]" in extras["serve"]


def test_the_engine_and_its_benchmark_load_without_extras() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
