"""Drafters of other installed packages: one that is written by docs/drafters.md alone, and ones that are broken."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from paceline import plugins
from paceline.cli.main import main
from paceline.drafters import DeviceDrafter
from paceline.drafters.registry import REGISTRY, check_device, find, names, recipe
from paceline.errors import InvalidRequest, UnknownOption
from paceline.llm import LLM
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.protocol import Chunk, Seat
from paceline.sampling.sampler import Sampler
from paceline.types import OFF, SamplingParams
from tests.cli.tiny_model import write_model
from tests.runs import prompt
from tests.tiny_models import TARGET, VOCAB

ROOT = Path(__file__).parent.parent.parent
GREEDY = ("--format", "fp32", "--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--no-measure-cost")
SHOWN = dict(
    re.findall(
        r"^```\w+\n# ([^\n]+)\n(.*?)^```",
        (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
)  # code of the document, by the comment that it begins with


def install(site: Path, package: str, entry_points: dict[str, str], code: str) -> None:
    """Do what pip does to a package of one module."""
    (site / f"{package}.py").write_text(code, encoding="utf-8")
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[{plugins.DRAFTERS}]\n{lines}", encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: echo, as the document has it, and three that cannot be used."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads(SHOWN["pyproject.toml"])["project"]
    echo = project["entry-points"]["paceline.drafters"]
    code = SHOWN["paceline_echo.py"] + SHOWN["paceline_echo.py, for a GPU"]
    install(folder, project["name"].replace("-", "_"), echo, code)
    install(folder, "paceline_broken", {"broken": "paceline_broken:KIND"}, "raise RuntimeError('out of order')\n")
    install(folder, "paceline_odd", {"odd": "paceline_odd:KIND"}, "KIND = 'a text'\n")
    install(folder, "paceline_cpu", {"cpu_only": "paceline_cpu:kind"}, "def kind(*_): raise AssertionError\n")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    plugins.load.cache_clear()
    yield
    plugins.load.cache_clear()
    logging.getLogger("paceline").handlers.clear()
    for package in site.glob("*.py"):
        sys.modules.pop(package.stem, None)


@pytest.mark.usefixtures("_installed")
def test_generate(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", tiny, "aaaa", *GREEDY, "--json", "--drafter")
    told = []
    for drafter in ("none", "echo", "echo:period=3"):
        assert main([*words, drafter]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert len({one["text"] for one in told}) == 1
    assert [one["stats"]["drafted"] > 0 for one in told] == [False, True, True]
    assert main([*words, "echo:perod=3"]) == 2
    assert "unknown option of the echo drafter 'perod'; did you mean 'period'?" in capsys.readouterr().err


def test_serve(tiny: str, site: Path) -> None:
    """The whole command, in a process of its own."""
    words = ["serve", tiny, "--port", "0", "--drafter", "echo:period=1", "--no-measure-cost", "--threads", "1"]
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", str(ROOT))])
    command = [sys.executable, "-m", "paceline.cli.main", *words, "--format", "fp32"]
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = _until_ready(process)
            assert any("echo: repeats the last tokens" in line for line in said)
            url = next(line.split()[0] for line in said if "/v1 " in line)
            model = httpx.get(f"{url}/models").json()["data"][0]["id"]
            asked = {"model": model, "prompt": "aaaa", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/completions", json=asked, timeout=60).json()
            assert answer["speculation"]["drafter"] == "echo"
            assert answer["speculation"]["num_draft_tokens"] > 0
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def _until_ready(process: subprocess.Popen[str]) -> list[str]:
    """What the server says before it waits for requests."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("Ctrl-C"):
            break
    return said


@pytest.mark.usefixtures("_installed")
def test_the_text_is_the_target_s_own(tiny: str) -> None:
    llm = LLM(tiny, drafter="echo", format="fp32", device="cpu", measure_cost=False)
    sampling = SamplingParams(temperature=1, seed=3, max_tokens=30, ignore_eos=True)
    plain, drafted = (llm.generate("aaaa", sampling, speculation=each)[0] for each in (OFF, None))
    assert plain.tokens == drafted.tokens
    assert drafted.stats.drafted > 0


@pytest.mark.usefixtures("_installed")
def test_a_broken_one_is_named_and_skipped(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    target: Any = None
    assert find("ngram") is not None
    assert not caplog.records, "nothing is loaded that is not asked for"
    assert names() == [*REGISTRY, "cpu_only", "echo"]
    warned = [record.getMessage() for record in caplog.records]
    assert "the plug-in broken cannot be loaded and is skipped: paceline_broken:KIND raised RuntimeError" in warned[0]
    assert "the plug-in odd is a str, not a DrafterKind or a function: skipped" in warned[1]
    with pytest.raises(InvalidRequest, match=r"'broken' of another package .*: paceline_broken:KIND raised RuntimeErr"):
        recipe("broken", target)
    with pytest.raises(InvalidRequest, match=r"'odd' of another package .* neither a DrafterKind nor a function"):
        recipe("odd:x", target)
    with pytest.raises(UnknownOption, match="unknown drafter 'ech'; did you mean 'echo'"):
        LLM(tiny, drafter="ech", format="fp32", device="cpu")


@pytest.mark.usefixtures("_installed")
def test_a_plug_in_runs_where_it_has_an_implementation() -> None:
    """A plain function is a kind for CPUs."""
    check_device("echo:period=2", "cuda")
    check_device("cpu_only", "cpu")
    with pytest.raises(InvalidRequest, match=r"'cpu_only' runs on a CPU only: it has no paceline.drafters.DeviceDraft"):
        check_device("cpu_only:x", "cuda")


@pytest.mark.usefixtures("_installed")
def test_the_drafter_for_a_gpu_runs_inside_rounds() -> None:
    import paceline_echo  # type: ignore[import-not-found]

    kind = paceline_echo.ECHO_ANYWHERE
    made = kind.make("", None, None)
    assert kind.on_gpu == "device"
    drafter = made.on_device(made.build(None), None)
    assert isinstance(drafter, DeviceDrafter)
    rounds = PortableRounds(
        TARGET.forward("toy", num_pages=8), lanes=1, max_context=64, max_draft=8, drafters={"echo": drafter}
    )
    tokens = prompt(20, seed=1)
    rounds.write(0, np.array(tokens), Sampler(SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, eos_ids=()))
    rounds.set_pages(0, 0, range(4))
    rounds.launch([Chunk(0, 0, 19, draws=False)], [], drafter="echo", context=40)
    _, (landed,), _ = rounds.collect(rounds.launch([], [Seat(0, 4)], drafter="echo", context=40))
    assert landed.drafted == (tokens[-1],) * 4
