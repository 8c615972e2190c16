"""Schemathesis on /openapi.json: thousands of requests, good and bad; no 500, no hang, and what is documented.

The server's answers should be short: start it with --max-context 256.

python clients/with_schemathesis.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks, expect, get

LOOK_AT = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
HERE = Path(__file__).parent


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=int, default=60, help="for the whole run (default: %(default)s)")
    options.add_argument("--seed", type=int, default=1)
    checks = Checks("schemathesis", options)
    program = str(Path(sys.executable).parent / "schemathesis")
    command = [program, "run", f"{checks.root}/openapi.json", "--checks", LOOK_AT, "--request-timeout", "30"]
    command += ["--max-time", str(checks.options.seconds), "--seed", str(checks.options.seed), "--max-examples", "25"]
    command += ["--workers", "1", "--no-color", "--continue-on-failure"]
    hooks = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)}

    with checks("every answer is documented, none is a 500"), tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=hooks, cwd=folder, capture_output=True, text=True)
        print(done.stdout[-4000:])
        expect(done.returncode == 0, f"schemathesis found something, or failed itself: {done.returncode}")

    with checks("the server is well afterwards"):
        expect(get(f"{checks.root}/health")["status"] == "ready", "ready")

    checks.end()


if __name__ == "__main__":
    main()
