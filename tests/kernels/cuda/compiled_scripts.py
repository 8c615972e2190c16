"""Scripts beside the tests that compile kernels, each in a process of its own: this one has Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_script(name: str, *words: str) -> dict[str, Any]:
    """Run a script with Triton's compiler, and return the JSON that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, script, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
