"""List: the models that are here, with their sizes and places.

paceline list
paceline list --json

Shows the embedded model, models that `paceline pull` fetched, and those in the cache of huggingface_hub, which every
command can use and only its owner removes.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from paceline.errors import ModelNotFound
from paceline.sizes import format_size

if TYPE_CHECKING:
    from paceline.models.hub.store import Stored


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a model")


def run(args: Namespace) -> int:
    models = models_here()
    if args.json:
        for model in models:
            facts = {"name": model.name, "bytes": model.bytes, "format": model.format, "owner": model.owner}
            print(json.dumps(facts | {"path": str(model.path)}))
    else:
        _print(models)
    return 0


def models_here() -> list[Stored]:
    """List the models that need not be fetched."""
    from paceline.models.hub.choice import tag_of
    from paceline.models.hub.store import Stored, stored
    from paceline.models.resolve import KNOWN

    found = []
    for name, place in KNOWN.items():
        try:
            path = place()
        except ModelNotFound:  # its package is not installed
            continue
        found.append(Stored(name, path.stat().st_size, f"GGUF {tag_of(path.name)}", path, "pip"))
    return [*found, *stored()]


def _print(models: list[Stored]) -> None:
    if not models:
        print("no models here; `paceline pull org/name` fetches one")
        return
    rows = [(model.name, format_size(model.bytes), model.format, str(model.path)) for model in models]
    name, size, format = (max(len(row[column]) for row in rows) for column in range(3))
    for row in rows:
        print(f"{row[0]:<{name}}  {row[1]:>{size}}  {row[2]:<{format}}  {row[3]}")
