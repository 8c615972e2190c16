"""Where a training stands, in one file: parameters, the best so far, the optimiser's memory, how far it has come.

Nothing random is in it: batches are a function of the seed and of their number.
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
from paceline.train.output.storage import read_tensors, write_tensors


@dataclass(slots=True)
class Progress:
    """How far a training has come."""

    settings: dict[str, Any]  # that decide its course
    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch, the next one
    seconds: float = 0.0
    tokens: int = 0
    best: float = 0.0  # of what an evaluation finds: tokens per round, or how close
    best_step: int = 0
    finished: bool = False
    history: list[dict[str, float]] = field(default_factory=list)  # one record an evaluation
    curve: list[dict[str, float]] = field(default_factory=list)  # one record a line of the report


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
    tensors |= optimiser.memory()
    write_tensors(path, tensors, note=json.dumps(asdict(progress)))


def load(path: Path, settings: Mapping[str, Any]) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """How far it had come, and its tensors: groups `param`, `best`, `constant` and the optimiser's moments."""
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
