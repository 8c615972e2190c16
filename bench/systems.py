"""What is compared with what: the systems of each suite, and the process each of them runs in.

    plain   SmolLM2, batch 1, no speculation: Paceline, llama.cpp at three quantisations, OpenVINO GenAI at int8
    draft   Qwen2.5-Coder 1.5B with 0.5B drafting, each system against its own plain speed
    ngram   SmolLM2 with lookup in prompt and output, each system against its own plain speed

A worker is one interpreter with one model in it. Workers are asked one after the other; while one runs, the others
sleep.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

QWEN = "qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
SUITE_PROMPTS = {"plain": "spec_bench", "draft": "humaneval", "ngram": "code_edit"}
TICKS = os.sysconf("SC_CLK_TCK")  # a second
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class System:
    name: str
    kind: str  # a function of bench.worker
    options: dict[str, Any] = field(default_factory=dict)
    plain: str | None = None  # the system whose text a speculating one must repeat

    @property
    def is_peer(self) -> bool:
        return self.kind != "paceline"


def suite_systems(suite: str, *, models: Path, threads: int) -> list[System]:
    build = {"plain": _plain, "draft": _draft, "ngram": _ngram}[suite]
    return [replace(system, options={**system.options, "threads": threads}) for system in build(models)]


def _plain(models: Path) -> list[System]:
    quantised = [
        System(f"llama.cpp {bits}", "llamacpp", {"model": str(models / f"smollm2.{bits}.gguf")})
        for bits in ("Q4_0", "Q4_1", "Q8_0")
    ]
    intel = System("OpenVINO int8", "openvino", {"model": str(models / "smollm2.openvino-int8")})
    return [System("Paceline", "paceline", {"model": "smollm2"}), *quantised, intel]


def _draft(models: Path) -> list[System]:
    pair = {"model": str(models / QWEN.format(size="1.5b"))}
    drafter = {"drafter": str(models / QWEN.format(size="0.5b"))}
    return [
        System("Paceline plain", "paceline", pair),
        System("Paceline draft", "paceline", {**pair, **drafter}, plain="Paceline plain"),
        System("llama.cpp plain", "llamacpp", pair),
        *(
            System(f"llama.cpp draft {k}", "llamacpp", {**pair, **drafter, "max_draft": k}, plain="llama.cpp plain")
            for k in (2, 3, 5, 8)
        ),
        System(
            "llama.cpp draft 8 p≥.75",
            "llamacpp",
            {**pair, **drafter, "max_draft": 8, "p_min": 0.75},
            plain="llama.cpp plain",
        ),
    ]


def _ngram(models: Path) -> list[System]:
    llama = {"model": str(models / "smollm2.Q4_0.gguf")}
    intel = {"model": str(models / "smollm2.openvino-int8"), "dynamic": True}  # faster with several rows
    lookup = {"drafter": "ngram"}
    return [
        System("Paceline plain", "paceline", {"model": "smollm2"}),
        System("Paceline ngram", "paceline", {"model": "smollm2", **lookup}, plain="Paceline plain"),
        System("llama.cpp plain", "llamacpp", llama),
        System("llama.cpp ngram", "llamacpp", {**llama, **lookup, "max_draft": 8}, plain="llama.cpp plain"),
        System("OpenVINO plain", "openvino", intel),
        System("OpenVINO lookup", "openvino", {**intel, **lookup}, plain="OpenVINO plain"),
    ]


def machine_cpu_seconds() -> float:
    """CPU time that all processes together have used so far (Linux); else 0."""
    stat = Path("/proc/stat")
    ticks = stat.read_text().splitlines()[0].split()[1:9] if stat.exists() else []
    return sum(int(t) for i, t in enumerate(ticks) if i not in (3, 4)) / TICKS  # without idle and waiting for a disk


class Worker:
    """A system in its own process. `ask` blocks until it has answered."""

    def __init__(self, system: System, *, python: Path) -> None:
        self.system = system
        command = [str(python), "-m", "bench.worker", system.kind, json.dumps(system.options)]
        env = {**os.environ, "OMP_NUM_THREADS": str(system.options["threads"])}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.version: str = self._read()["version"]

    def ask(self, prompt: str, *, tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        return self._read()

    def cpu_seconds(self) -> float:
        """CPU time used so far, where the operating system tells (Linux); else 0."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        ticks = stat.read_text().rpartition(")")[2].split()[11:13] if stat.exists() else []  # user, system
        return sum(map(int, ticks)) / TICKS

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

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.system.name} died with status {self._process.wait()}; see why with: "
                f"python -m bench.worker {self.system.kind} '{json.dumps(self.system.options)}'"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply
