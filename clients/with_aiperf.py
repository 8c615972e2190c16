"""AIPerf: a short run over streamed chat, which also reads /metrics.

python clients/with_aiperf.py --url http://127.0.0.1:8000/v1 --tokenizer DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks, expect

REQUESTS, TOKENS = 12, 32


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tokenizer", required=True, help="a directory with the model's tokenizer.json")
    checks = Checks("aiperf", options)
    program = str(Path(sys.executable).parent / "aiperf")
    tokenizer = str(Path(checks.options.tokenizer).resolve())
    command = [program, "profile", "--model", checks.model, "--url", checks.root, "--tokenizer", tokenizer]
    command += ["--endpoint-type", "chat", "--streaming", "--ui", "none", "--concurrency", "4"]
    command += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "64"]
    command += ["--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"]
    command += ["--extra-inputs", f"min_tokens:{TOKENS}"]

    with tempfile.TemporaryDirectory() as folder:
        with checks("a run to its end"):
            done = subprocess.run([*command, "--artifact-dir", folder], capture_output=True, text=True)
            expect(done.returncode == 0, done.stdout[-2000:])

        with checks("no request failed, and each had all its tokens"):
            report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
            expect(report["request_count"]["avg"] == REQUESTS, report["request_count"])
            expect(not report["error_summary"], report["error_summary"])
            expect(report["usage_completion_tokens"]["min"] == TOKENS, report["usage_completion_tokens"])

        with checks("it found the counters of speculation in /metrics"):
            found = json.loads((Path(folder) / "server_metrics_export.json").read_text())["metrics"]
            expect("vllm:spec_decode_num_drafts" in found, sorted(found))

    checks.end()


if __name__ == "__main__":
    main()
