"""aider, by `--message`: a whole run against OpenAI's form, against Ollama's, and against Anthropic's.

python clients/with_aider.py --url http://127.0.0.1:8000/v1

aider sends prompts of some thousand tokens; the model is too small to edit well. What counts is that each run gets its
answer and ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, Checks, expect, get

QUIET = ("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes")
QUIET += ("--no-analytics", "--no-pretty", "--no-suggest-shell-commands", "--no-detect-urls", "--map-tokens", "0")
ASK = ("--chat-mode", "ask", "--message", "What does this file print? Answer in one short sentence.")
EDIT = ("--edit-format", "whole", "--message", "Change the greeting to Goodbye. Answer with the whole file.")
TOKENS = re.compile(r"sent, ([\d.]+k?) received|Output tokens: ~(\d+)")  # the latter if max_tokens cut the answer


def main() -> None:
    checks = Checks("aider-chat")
    homes = {
        f"openai/{checks.model}": {"OPENAI_API_BASE": checks.url, "OPENAI_API_KEY": KEY},
        f"ollama_chat/{checks.model}": {"OLLAMA_API_BASE": checks.root},
        f"anthropic/{checks.model}": {"ANTHROPIC_API_BASE": checks.root, "ANTHROPIC_API_KEY": KEY},
    }
    for model, environ in homes.items():
        with checks(f"{model.partition('/')[0]}: a question about a file"), tempfile.TemporaryDirectory() as folder:
            run(folder, model, environ, *ASK)
        with checks(f"{model.partition('/')[0]}: an edit, not streamed"), tempfile.TemporaryDirectory() as folder:
            run(folder, model, environ, *EDIT, "--no-stream")
    with checks("the server is well"):
        expect(get(f"{checks.root}/health")["status"] == "ready", "ready")
    checks.end()


def run(folder: str, model: str, environ: dict[str, str], *words: str) -> None:
    """Run aider on a small file until it ends, and look for the tokens that it counted."""
    file = Path(folder) / "hello.py"
    file.write_text('print("Hello")\n', encoding="utf-8")
    settings = Path(folder) / "settings.yml"
    settings.write_text(
        f"- name: {model}\n  use_temperature: true\n  extra_params:\n    temperature: 0\n    max_tokens: 300\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "aider", "--model", model, "--weak-model", model, *QUIET, *words]
    command += ["--model-settings-file", str(settings), str(file)]
    own = os.environ | {"HOME": folder, "AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"} | environ
    done = subprocess.run(
        command, env=own, cwd=folder, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    said = done.stdout + done.stderr
    expect(done.returncode == 0, f"status {done.returncode}: {said[-600:]}")
    counted = TOKENS.search(said)
    expect(counted and "0" not in counted.groups(), f"no answer: {said[-600:]}")


if __name__ == "__main__":
    main()
