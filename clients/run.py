"""Starts servers with SmolLM2 and lets every client at them that is installed.

python clients/run.py --python /tmp/clients/bin/python --tokenizer DIRECTORY

Each --python is an environment with some of the clients (`pip install openai litellm mcp langchain-openai schemathesis
'lm-eval[api]' transformers`; aiperf may need one of its own); the first that has a client runs it. The Node client runs
where `npm install` was done in clients/openai_node. Prints a table, and JSON as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NODE = HERE / "openai_node"
PACKAGES = {  # script → module that it needs
    "with_openai": "openai",
    "with_litellm": "litellm",
    "with_langchain": "langchain_openai",
    "with_lm_eval": "lm_eval",
    "with_aiperf": "aiperf",
    "with_schemathesis": "schemathesis",
}
NEED_TOKENIZER = ("with_lm_eval", "with_aiperf")
STARTS = 60.0  # seconds for a server to start
RUNS = 300.0  # seconds for a client to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="of an environment with clients (default: this one)")
    parser.add_argument("--serve-python", default=sys.executable, help="of Paceline's environment (default: this one)")
    parser.add_argument("--tokenizer", help="a directory with SmolLM2's tokenizer.json, for lm-eval and aiperf")
    parser.add_argument("--only", action="append", help="names of scripts")
    args = parser.parse_args()
    outcomes = []
    with ExitStack() as servers:
        url = servers.enter_context(server(args.serve_python))
        for name, command in commands(args):
            if args.only and name not in args.only:
                continue
            with ExitStack() as own:
                if command is None:
                    outcomes.append(skipped(name))
                    continue
                at = url
                if name == "with_schemathesis":
                    at = own.enter_context(server(args.serve_python, "--max-context", "256"))
                if name == "with_lm_eval":
                    command += ["--plain-url", own.enter_context(server(args.serve_python, "--drafter", "none"))]
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
    ready = shutil.which("node") and (NODE / "node_modules" / "openai").exists()
    yield "openai_node", ["node", str(NODE / "index.mjs")] if ready else None


def has(python: str, module: str) -> bool:
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", looks], cwd="/").returncode == 0


@contextmanager
def server(python: str, *options: str) -> Iterator[str]:
    """A server's base URL, while it runs."""
    port = free_port()
    command = [python, "-m", "paceline.cli.main", "serve", "smollm2", "--port", str(port), "--kv-memory", "512M"]
    process = subprocess.Popen(
        [*command, *options], cwd=HERE.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + STARTS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the server did not start: try `paceline serve smollm2`")


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
