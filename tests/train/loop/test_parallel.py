"""Several processes, one drafter: as torchrun starts them, with gloo on a CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from paceline.train.loop.checkpoint import load
from paceline.train.loop.parallel import World
from paceline.train.loop.trainer import Trainer
from paceline.train.run import train
from paceline.train.storage import read_tensors, write_tensors
from tests.train.conftest import MakeOptions
from tests.train.toy_training import toy_options

OTHER = """
import sys
from pathlib import Path
from unittest import mock
from tests.train.loop.test_parallel import train_and_keep
train_and_keep(*map(Path, sys.argv[1:]))
"""


def train_and_keep(target: Path, prompts: Path, out: Path, kept: Path) -> None:
    """Train, and write this process' own weights to `kept`."""
    ended: list[Trainer] = []
    end = Trainer.run

    def watched(trainer: Trainer) -> None:
        end(trainer)
        ended.append(trainer)

    with mock.patch.object(Trainer, "run", watched):
        train(toy_options(target, prompts, out, max_steps=4, evaluations=2), lambda text: None)
    write_tensors(kept, ended[0].student.params)


@pytest.mark.filterwarnings("ignore")  # torch's own, about process groups
def test_two_processes_train_one_drafter(
    answered: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see different batches and end with the same weights; one of them writes. This process is the first."""
    options = answered(tmp_path / "out")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    words = [options.target.model, str(options.prompts), str(options.out), str(tmp_path / "other")]
    other = subprocess.Popen([sys.executable, "-c", OTHER, *words], env=os.environ | shared | {"RANK": "1"})
    for name, value in (shared | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    train_and_keep(Path(options.target.model), options.prompts, options.out, tmp_path / "first")
    assert other.wait(timeout=200) == 0
    one, two = (read_tensors(tmp_path / name)[0] for name in ("first", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    progress, _ = load(options.work / "checkpoint.safetensors", {"processes": 2})
    assert progress.step == 4
    assert progress.finished
    assert (options.out / "model.safetensors").exists()


def test_alone_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = World.join("cpu")
    gradient = torch.ones(3)
    world.average([gradient])
    world.wait()
    world.leave()
    assert world.first
    assert world.broadcast(2.5) == 2.5
    assert gradient.tolist() == [1, 1, 1]
