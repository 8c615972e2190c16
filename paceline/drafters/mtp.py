"""MTP heads that draft: modules for several tokens ahead that models come with, in their own checkpoints.

    mtp            the head in the target's checkpoint; the default where there is one
    mtp:PATH       the head of a directory or a hub id, as `paceline train mtp` and `speculators` write it
    mtp:max_draft=3, mtp:PATH,max_draft=3      with the options of `eagle`

To the engine it is an EAGLE head that reads the state after the target's last norm (`models.mtp`): everything else is
in `drafters.eagle`.
"""

from __future__ import annotations

import logging
from functools import partial

from paceline.drafters.eagle import recipe_of
from paceline.drafters.recipe import Recipe
from paceline.drafters.shipped import HEAD_OPTIONS, head_directory, options_of_head
from paceline.errors import InvalidRequest, PacelineError
from paceline.models.load import open_model
from paceline.models.mtp import check_mtp, has_mtp, load_mtp
from paceline.models.resolve import resolve
from paceline.models.weights import Progress, TensorSource
from paceline.runner.loading.heads import read_eagle
from paceline.runner.loading.models import ReadyModel

logger = logging.getLogger(__name__)
NAME = "mtp"
BRANCHES = {"branches": int}


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    name, _, rest = options.partition(",")
    inside = not name or name.partition("=")[0] in HEAD_OPTIONS | BRANCHES
    format, given = options_of_head(NAME, options if inside else rest, BRANCHES)
    directory = target.model.path if inside else head_directory(name)
    if not directory.is_dir():
        raise InvalidRequest(
            f"the drafter {NAME} reads the head in a directory of safetensors, and {target.name} is none; name a head "
            f"that was trained for it: {NAME}:PATH"
        )
    load = partial(load_mtp, beside=None if inside else files_of(target))
    return recipe_of(NAME, read_eagle(directory, target, format=format, load=load), target, given)


def files_of(target: ReadyModel) -> TensorSource | None:
    """Return the files of a target; None: it has random weights."""
    if target.stored is not None:
        return target.stored.source
    return open_model(str(target.model.path)).source if target.model.path.exists() else None


def in_checkpoint(target: str | ReadyModel, progress: Progress | None) -> list[str]:
    """Name the drafter of a target with an MTP head in its checkpoint. The log says why a head is not used."""
    try:
        path = resolve(target, progress) if isinstance(target, str) else target.model.path
        if not path.is_dir() or not has_mtp(path):
            return []
    except PacelineError:
        return []  # loading the target says what is wrong
    try:
        check_mtp(path)
    except PacelineError as error:
        logger.warning("the MTP head in the checkpoint is not used, and the target runs without it: %s", error)
        return []
    return [NAME]
