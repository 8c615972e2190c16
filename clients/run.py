"""Starts servers with SmolLM2 and lets every client at them that is installed.

python clients/run.py --python /tmp/clients/bin/python --tokenizer DIRECTORY

Each --python is an environment with some of the clients (`pip install openai anthropic ollama llm llm-ollama
llm-anthropic litellm mcp langchain-openai schemathesis 'lm-eval[api]' transformers`; openai-agents and
'pydantic-ai-slim[openai]' go together; aider-chat, aiperf, guidellm, instructor and vllm may need one each of their
own); the first that has a client runs it. The Node clients run where `npm install` was done in clients/openai_node and
clients/ai_sdk_node; the browser's, too, if there is a Chromium. Prints a table, and JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai_browser import BROWSERS
from served import free_port, served

HERE = Path(__file__).parent
NODE = {"openai_node": "openai", "ai_sdk_node": "ai"}  # folder → package that it needs
PACKAGES = {  # script → module that it needs
    "with_openai": "openai",
    "with_anthropic": "anthropic",
    "with_ollama": "ollama",
    "with_llm": "llm",
    "with_aider": "aider",
    "with_litellm": "litellm",
    "with_langchain": "langchain_openai",
    "with_openai_agents": "agents",
    "with_pydantic_ai": "pydantic_ai",
    "with_instructor": "instructor",
    "with_lm_eval": "lm_eval",
    "with_aiperf": "aiperf",
    "with_schemathesis": "schemathesis",
    "with_vllm": "vllm",
    "with_guidellm": "guidellm",
}
NEED_TOKENIZER = ("with_lm_eval", "with_aiperf", "with_vllm", "with_guidellm")
MEMORY = ("--kv-memory", "512M")
RUNS = 300.0  # seconds for a client to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="of an environment with clients (default: this one)")
    parser.add_argument("--serve-python", default=sys.executable, help="of Paceline's environment (default: this one)")
    parser.add_argument("--tokenizer", help="a directory with SmolLM2's tokenizer.json, for those that count tokens")
    parser.add_argument("--only", action="append", help="names of scripts")
    args = parser.parse_args()
    outcomes = []
    with ExitStack() as servers:
        url = servers.enter_context(served(args.serve_python, *MEMORY)).url
        for name, command in commands(args):
            if args.only and name not in args.only:
                continue
            with ExitStack() as own:
                if command is None:
                    outcomes.append(skipped(name))
                    continue
                at = url
                if name == "with_schemathesis":
                    at = own.enter_context(served(args.serve_python, *MEMORY, "--max-context", "256")).url
                if name == "openai_browser":
                    port = free_port()
                    origin = ("--cors-origins", f"http://127.0.0.1:{port}")
                    at = own.enter_context(served(args.serve_python, *MEMORY, *origin)).url
                    command += ["--page-port", str(port)]
                if name == "with_lm_eval":
                    plain = own.enter_context(served(args.serve_python, *MEMORY, "--drafter", "none"))
                    command += ["--plain-url", plain.url]
                outcomes.append(run([*command, "--url", at], name))
    show(outcomes)
    print(json.dumps({"clients": outcomes}))
    sys.exit(any(outcome["failed"] for outcome in outcomes))


def commands(args: argparse.Namespace) -> Iterator[tuple[str, list[str] | None]]:
    """Names of scripts and how to start them; none where something is missing."""
    for name, module in PACKAGES.items():
        python = next((each for each in args.python or [sys.executable] if has(each, module)), None)
        if python is None or (name in NEED_TOKENIZER and args.tokenizer is None):
            yield name, None
        else:
            extra = ["--tokenizer", args.tokenizer] if name in NEED_TOKENIZER else []
            yield name, [python, str(HERE / f"{name}.py"), *extra]
    for folder, package in NODE.items():
        ready = shutil.which("node") and (HERE / folder / "node_modules" / package).exists()
        yield folder, ["node", str(HERE / folder / "index.mjs")] if ready else None
    ready = (HERE / "openai_node" / "node_modules" / "openai").exists() and any(map(shutil.which, BROWSERS))
    yield "openai_browser", [sys.executable, str(HERE / "openai_browser.py")] if ready else None


def has(python: str, module: str) -> bool:
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", looks], cwd="/").returncode == 0


def run(command: list[str], name: str) -> dict[str, Any]:
    print(f"── {name}", flush=True)
    quiet = os.environ | {"HF_HUB_OFFLINE": "1"} if name == "with_lm_eval" else None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUNS, env=quiet)
    except subprocess.TimeoutExpired:
        return skipped(name) | {"failed": {"all": f"did not end within {RUNS:g} s"}, "skipped": False}
    *lines, last = done.stdout.splitlines() or [""]
    print("\n".join(lines), flush=True)
    try:
        outcome: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError:
        return skipped(name) | {"failed": {"all": (last + done.stderr)[-1000:]}, "skipped": False}
    return outcome | {"skipped": False}


def skipped(name: str) -> dict[str, Any]:
    return {"client": name, "version": None, "passed": [], "failed": {}, "skipped": True}


def show(outcomes: list[dict[str, Any]]) -> None:
    print(f"\n{'client':<20} {'version':<10} {'passed':>6} {'failed':>6}")
    for outcome in outcomes:
        counts = "not installed" if outcome["skipped"] else f"{len(outcome['passed']):>6} {len(outcome['failed']):>6}"
        print(f"{outcome['client']:<20} {outcome['version'] or '':<10} {counts}")


if __name__ == "__main__":
    main()
