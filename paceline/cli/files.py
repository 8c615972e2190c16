"""Where commands find prompt sets, and how they write what they found."""

from __future__ import annotations

import os
from argparse import Namespace, _ArgumentGroup
from pathlib import Path

from paceline.errors import StorageError


def add_data(group: _ArgumentGroup) -> None:
    group.add_argument("--data", type=Path, metavar="DIR", help="where sets lie (default: $PACELINE_DATA)")


def data_of(args: Namespace) -> Path | None:
    given = os.environ.get("PACELINE_DATA")
    return args.data or (Path(given) if given else None)


def write(path: Path, text: str, *, mode: str = "w") -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); choose another place") from error
