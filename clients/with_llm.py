"""Simon Willison's `llm`: its own OpenAI-compatible models, and the plug-ins llm-ollama and llm-anthropic.

python clients/with_llm.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from checks import KEY, PERSON, QUESTION, Checks, expect, get

PROMPT = QUESTION[0]["content"]


def main() -> None:
    checks = Checks("llm")
    with tempfile.TemporaryDirectory() as home:
        models = Path(home) / "extra-openai-models.yaml"
        models.write_text(
            f"- model_id: paceline\n  model_name: {checks.model}\n  api_base: {checks.url}\n"
            "  can_stream: true\n  supports_schema: true\n  supports_tools: true\n"
        )
        environ = os.environ | {"LLM_USER_PATH": home, "OLLAMA_HOST": checks.root, "OPENAI_API_KEY": KEY}
        environ |= {"ANTHROPIC_BASE_URL": checks.root, "ANTHROPIC_API_KEY": KEY}

        def llm(*words: str) -> str:
            command = [sys.executable, "-m", "llm", *words]
            done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=120)
            expect(done.returncode == 0, f"{words}: {done.stderr[-500:]}")
            return done.stdout.strip()

        greedy = ("-o", "temperature", "0", "-o", "max_tokens", "24")

        with checks("OpenAI's form: prompt, streamed and not; system; the next turn"):
            text = llm("prompt", "-m", "paceline", *greedy, PROMPT)
            expect(text and text == llm("prompt", "-m", "paceline", "--no-stream", *greedy, PROMPT), text)
            expect(llm("prompt", "-m", "paceline", "-s", "You are brief.", *greedy, "Hello"), "an answer")
            expect(llm("prompt", "-c", *greedy, "And at night?"), "an answer to the next turn")

        with checks("OpenAI's form: schema, tool"):
            made = llm(
                "prompt", "-m", "paceline", "--schema", json.dumps(PERSON), "-o", "max_tokens", "100", "A person"
            )
            expect(set(json.loads(made)) == {"name", "age"}, made)
            expect(llm("prompt", "-m", "paceline", "-T", "llm_version", *greedy, "Hello") is not None, "an answer")

        if find_spec("llm_ollama"):
            with checks("llm-ollama: found by itself; prompt, schema"):
                name = f"ollama/{checks.model}:latest"
                expect(name in llm("models", "list"), "the model is in the list")
                few = ("-o", "temperature", "0", "-o", "num_predict", "24")
                expect(llm("prompt", "-m", name, *few, PROMPT) == text, "the same text")
                made = llm("prompt", "-m", name, "--schema", json.dumps(PERSON), "-o", "num_predict", "100", "A person")
                expect(set(json.loads(made)) == {"name", "age"}, made)

        if find_spec("llm_anthropic"):
            with checks("llm-anthropic: after `llm anthropic refresh`; prompt, the next turn"):
                llm("anthropic", "refresh")
                name = f"anthropic/{checks.model}"
                expect(llm("prompt", "-m", name, "-o", "max_tokens", "24", PROMPT), "an answer")
                expect(llm("prompt", "-c", "-o", "max_tokens", "24", "And at night?"), "an answer to the next turn")

        with checks("the server is well"):
            expect(get(f"{checks.root}/health")["status"] == "ready", "ready")
    checks.end()


if __name__ == "__main__":
    main()
