"""A checkpoint of a training in one file: parameters, best parameters so far, the optimiser's state, and progress.

It holds no random state: batches are a function of the seed and of their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import InvalidRequest
from paceline.train.loop.optimiser import Optimiser
from paceline.train.storage import read_tensors, write_tensors


@dataclass(slots=True)
class Progress:
    """Progress of a training."""

    settings: dict[str, Any]  # options that must not change when the training resumes
    step: int = 0
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    seconds: float = 0.0
    tokens: int = 0
    best: float = 0.0  # best worth of an evaluation; see `Trainer._worth`
    best_step: int = 0
    finished: bool = False
    history: list[dict[str, float]] = field(default_factory=list)  # one record per evaluation
    curve: list[dict[str, float]] = field(default_factory=list)  # one record per progress report


def save(
    path: Path,
    progress: Progress,
    params: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    optimiser: Optimiser,
) -> None:
    tensors = {f"param.{name}": tensor for name, tensor in params.items()}
    tensors |= {f"best.{name}": tensor for name, tensor in best.items()}
    tensors |= {f"constant.{name}": tensor for name, tensor in constants.items()}
    tensors |= optimiser.state()
    write_tensors(path, tensors, note=json.dumps(asdict(progress)))


def load(path: Path, settings: Mapping[str, Any]) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """Read the progress and the tensors in groups: `param`, `best`, `constant` and the optimiser's state tensors.
    A checkpoint with other settings is refused."""
    tensors, note = read_tensors(path)
    progress = Progress(**json.loads(note))
    for name, value in settings.items():
        if progress.settings.get(name) != value:
            raise InvalidRequest(
                f"{path}: a training with {name} = {progress.settings.get(name)!r:.80}, not {value!r:.80}; give the "
                "same options again, or another --out"
            )
    groups: dict[str, dict[str, Tensor]] = {"best": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = tensor
    return progress, groups
