"""GuideLLM: chats and completions, streamed, several at once.

python clients/with_guidellm.py --url http://127.0.0.1:8000/v1 --tokenizer DIRECTORY

It asks for `ignore_eos` and `stream_options.continuous_usage_stats`, and looks at /health first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Checks, expect

REQUESTS, TOKENS, AT_ONCE = 12, 32, 4


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tokenizer", required=True, help="a directory with the model's tokenizer.json")
    checks = Checks("guidellm", options)
    for endpoint in ("/v1/chat/completions", "/v1/completions"):
        requests: dict[str, list[Any]] = {}
        with checks(f"{endpoint}: a run to its end"):
            requests = bench(checks, endpoint)
            expect(not requests["errored"] and not requests["incomplete"], requests["errored"][:1])
            expect(len(requests["successful"]) == REQUESTS, len(requests["successful"]))
        with checks(f"{endpoint}: each had all its tokens, and usage in its stream"):
            counts = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
            expect(counts == {TOKENS}, counts)
            expect(all(request["time_to_first_token_ms"] > 0 for request in requests["successful"]), "first tokens")
    checks.end()


def bench(checks: Checks, endpoint: str) -> dict[str, list[Any]]:
    """Its requests: successful, errored, incomplete."""
    with tempfile.TemporaryDirectory() as folder:
        report, tokenizer = Path(folder) / "report.json", Path(checks.options.tokenizer).resolve()
        backend = {"kind": "openai_http", "target": checks.root, "model": checks.model, "request_format": endpoint}
        data = {"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": TOKENS}
        given = {
            "backend": backend,
            "profile": {"kind": "concurrent", "streams": [AT_ONCE]},
            "constraint": {"kind": "max_requests", "count": REQUESTS},
            "tokenizer": {"kind": "hf_auto", "model": str(tokenizer)},
            "data": data,
            "output": {"kind": "json", "path": str(report)},
        }
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
        for name, value in given.items():
            command += [f"--{name}", json.dumps(value)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        expect(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        requests: dict[str, list[Any]] = benchmark["requests"]
        return requests


if __name__ == "__main__":
    main()
