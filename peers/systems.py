"""The systems that are compared, their modes, and the process that each mode runs in.

A mode is a system with its way of drafting; a drafting mode names the plain mode that its answers must equal. Modes run
one after the other; while one runs, the others sleep. A system that cannot be started, or dies, raises `Unusable` with
the reason, and the comparison continues without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = {  # kind → module that an interpreter must have
    "llama.cpp": "xllamacpp",
    "openvino": "openvino_genai",
    "transformers": "transformers",
    "vllm": "vllm",
}
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).resolve().parent.parent
ONEDNN_ISA = (
    "AVX512_CORE_FP16"  # the most: on machines that advertise AMX without supporting it a process ends with SIGILL
)


class Unusable(Exception):
    """A system is not installed, did not start, or died."""


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    kind: str  # key of peers.backends.KINDS
    options: dict[str, Any] = field(default_factory=dict)
    plain: str | None = None  # mode whose answers a drafting mode must equal
    at_once: int | None = None  # limit of prompts at once; None: no limit
    slow: bool = False  # gets fewer prompts

    @property
    def system(self) -> str:
        return self.name.split(",")[0]

    @property
    def is_peer(self) -> bool:
        return self.kind != "paceline"


def all_modes(*, models: Path) -> list[Mode]:
    return [*_paceline(), *_llamacpp(models), *_openvino(models), *_on_torch(models)]


def _paceline() -> list[Mode]:
    plain = Mode("Paceline, plain", "paceline", {"model": "smollm2"})
    drafts = Mode("Paceline, default", "paceline", {"model": "smollm2", "drafter": "default"}, plain=plain.name)
    eight = {"model": "smollm2", "format": "int8"}  # the format of OpenVINO's model
    plain8 = Mode("Paceline, int8 plain", "paceline", eight)
    drafts8 = Mode("Paceline, int8", "paceline", eight | {"drafter": "default"}, plain=plain8.name)
    return [drafts, plain, drafts8, plain8]


def _llamacpp(models: Path) -> list[Mode]:
    four = {"model": str(models / "smollm2.Q4_0.gguf")}  # the fastest of Q4_0, Q4_1 and Q8_0
    lookup = four | {"drafter": "ngram_simple", "options": {"size_n": 3, "size_m": 8}}
    cache = four | {"drafter": "ngram_cache"}
    return [
        Mode("llama.cpp, Q4_0 plain", "llama.cpp", four),
        Mode("llama.cpp, Q4_0 ngram-simple", "llama.cpp", lookup, plain="llama.cpp, Q4_0 plain"),
        Mode("llama.cpp, Q4_0 ngram-cache", "llama.cpp", cache, plain="llama.cpp, Q4_0 plain"),
    ]


def _openvino(models: Path) -> list[Mode]:
    model = {"model": str(models / "smollm2.openvino-int8")}
    plain, lookup = "OpenVINO, int8 plain", "OpenVINO, int8 prompt lookup"
    return [
        Mode("OpenVINO, int8 plain, activations in float", "openvino", model | {"dynamic": False}),
        Mode(plain, "openvino", model),
        Mode(lookup, "openvino", model | {"drafter": "lookup"}, plain=plain),
    ]


def _on_torch(models: Path) -> list[Mode]:
    model = {"model": str(models / "smollm2.hf-bf16")}
    return [
        Mode("transformers, bf16 plain", "transformers", model, slow=True),
        Mode(
            "transformers, bf16 prompt lookup", "transformers", model | {"drafter": "lookup"},
            plain="transformers, bf16 plain", at_once=1, slow=True,
        ),
        Mode("vLLM, bf16 plain", "vllm", model, slow=True),
        Mode("vLLM, bf16 n-gram", "vllm", model | {"drafter": "ngram"}, plain="vLLM, bf16 plain", slow=True),
    ]  # fmt: skip  # a field a line would hide what belongs together


def interpreter_of(kind: str, *, pythons: Sequence[Path]) -> Path:
    """The first interpreter that has the system installed."""
    for python in pythons:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULES[kind]!r}) is None)"
        if subprocess.run([python, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return python
    raise Unusable(f"not installed: no --peers-python has {MODULES[kind]}")


def machine_cpu_seconds() -> float:
    """CPU time that all processes together have used so far (Linux); else 0."""
    stat = Path("/proc/stat")
    ticks = stat.read_text().splitlines()[0].split()[1:9] if stat.exists() else []
    return sum(int(t) for i, t in enumerate(ticks) if i not in (3, 4)) / TICKS_PER_SECOND  # without idle and iowait


class Worker:
    """The process of a mode. `ask` blocks until it has answered."""

    def __init__(self, mode: Mode, *, python: Path, threads: int) -> None:
        self.mode = mode
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        options = mode.options | {"threads": threads}
        env = {"ONEDNN_MAX_CPU_ISA": ONEDNN_ISA, "HF_HUB_OFFLINE": "1"} | os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [str(python), "-m", "peers.worker", mode.kind, json.dumps(options)], cwd=ROOT, env=env, text=True,
            bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip  # a field a line would hide what belongs together

    def started(self) -> str:
        """Wait until the model is loaded; return the version of the system."""
        version: str = self._read()["version"]
        return version

    def ask(self, prompts: Sequence[Sequence[int]], *, tokens: int, at_once: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens, "at_once": at_once}) + "\n")
        except BrokenPipeError:
            raise Unusable(self._last_words()) from None
        reply = self._read()
        if "error" in reply:
            raise Unusable(reply["error"])
        return reply

    def cpu_seconds(self) -> float:
        """CPU time used so far, where the operating system tells (Linux); else 0."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        ticks = stat.read_text().rpartition(")")[2].split()[11:13] if stat.exists() else []  # user, system
        return sum(map(int, ticks)) / TICKS_PER_SECOND

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unusable(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"died with status {status}: {said[-1][:300] if said else 'without a word'}"
