"""Drafters that are there for a target: where each comes from, what it needs, what is known of it, how to use it.

Headers of files are read, and no pass runs. What cannot be read or cannot draft has a line that says why; the others
are listed all the same. Figures come from stored results: the card of a head, a file of `python -m peers.drafters`,
else those that come with the package (`tune.expected`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.drafters.registry import Recipe, check_device, head_directory, recipe, shipped_drafters
from paceline.errors import InvalidRequest, PacelineError
from paceline.models.block_config import is_block
from paceline.models.directory import read_json
from paceline.models.resolve import name_of, resolve, served_name
from paceline.runner.loading.models import ReadyModel
from paceline.sizes import format_size
from paceline.tune.candidates import kind_of, memory_of, reason, vocabulary_share
from paceline.tune.expected import figure_of

LOOKUPS = {  # what they look up, and what they need
    "suffix": ("lookup in prompt, output, past answers and a corpus", "a C compiler; no weights"),
    "ngram": ("lookup in prompt and output", "nothing"),
    "prediction": ("lookup in the text that a request predicts", "requests with a prediction"),
}
WITHOUT_TRAINING = {  # on a CPU: what drafts, and what it needs
    "recycling": ("tokens that the target preferred the last time", "nothing"),
    "lookahead": ("guesses that the target improves in its own passes", "nothing"),
    "layers:auto": ("the target's first layers, as many as pay", "a measurement of some seconds when it is loaded"),
}
COPY = "the target in fewer bits", "room for its weights once more, and weights that can lose bits"
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of config.json; a GGUF file has one of its own
TO_TRAIN = {  # kind of drafter that `paceline train` makes for any target → what it needs
    "eagle": "prompts, and some minutes of a GPU",
    "block": "prompts, and half an hour of a GPU",
    "mtp": "prompts, and some minutes of a GPU; it reads the target's whole output layer for each token",
}
UNTRAINED = "to be trained"  # origin of a drafter that does not exist yet
CARD_ROW = re.compile(r"^\| ([\w-]+) \| (\d+) \| ([\d.]+) \|", flags=re.MULTILINE)  # set, prompts, tokens per round


@dataclass(frozen=True, slots=True)
class Available:
    """A drafter for a target."""

    drafter: str  # as --drafter takes it
    origin: str
    needs: str
    command: str | None = None  # that uses or makes it; None: it cannot be used
    why_not: str | None = None
    vocabulary: float | None = None  # share of the target's tokens that it can draft; None: all, or not known
    known: tuple[str, ...] = ()  # stored figures, each with its source


def available(
    target: ReadyModel, models: Iterable[str], *, device: str, folder: Path | None, results: Path | None
) -> list[Available]:
    """List the drafters of a target on a device. `models`: names of those on this disk."""
    found = [
        *(_judged(words, "comes with Paceline", target, device) for words in shipped_drafters(target.name)),
        *_in_checkpoint(target, device),
        *(_judged(f"model:{name}", "on this disk", target, device) for name in models if _is_other(name, target)),
        *(() if folder is None else _in_folder(folder, target, device)),
        *(Available(name, *said, _command(target, name)) for name, said in LOOKUPS.items()),
        *([] if device != "cpu" else (_made(name, *said, target, device) for name, said in WITHOUT_TRAINING.items())),
        _made("self:int4" if device == "cpu" else "self", *COPY, target, device),
    ]
    there = {kind_of(each.drafter) for each in found if each.why_not is None}
    found += [_to_train(kind, target) for kind in TO_TRAIN if kind not in there]
    stored = {} if results is None else results_of(results, target)
    return [_with_figures(each, stored.get(_named(each.drafter)), target, device) for each in found]


def _with_figures(each: Available, stored: list[str] | None, target: ReadyModel, device: str) -> Available:
    """Add stored figures; where there are none and it can draft, those that come with the package."""
    packaged = figure_of(each.drafter, target.name, device=device) if each.why_not is None else ()
    return replace(each, known=(*each.known, *(stored or packaged)))


def _judged(words: str, origin: str, target: ReadyModel, device: str) -> Available:
    """Say what a drafter with weights needs, or why it cannot draft."""
    kind = kind_of(words)
    try:
        check_device(words, device)
        made = recipe(f"{words},format=int8" if kind == "model" else words, target)  # a format that is not timed
    except (PacelineError, OSError) as error:
        return Available(words, origin, needs="", why_not=reason(error))
    why_not = _problem(made, target, device)
    return Available(
        words,
        origin,
        needs=_needs(made),
        command=None if why_not else _command(target, words),
        why_not=why_not,
        vocabulary=vocabulary_share(made, target),
        known=() if kind == "model" or words == kind else card_figures(head_directory(words.partition(":")[2])),
    )


def _problem(made: Recipe, target: ReadyModel, device: str) -> str | None:
    sizes = [sum(part.parameters for part in model.parts) for model in (made.model, target) if model is not None]
    if len(sizes) == 2 and sizes[0] >= sizes[1]:
        return f"it has {sizes[0] / 1e6:.0f} M parameters, the target {sizes[1] / 1e6:.0f} M: it can only lose"
    if device != "cpu" and made.model is not None and made.on_device is None:
        return "it has another vocabulary than the target, and drafts over a bridge run on a CPU only"
    return None


def _needs(made: Recipe) -> str:
    memory = memory_of(made)
    kept = f", {memory['kv_bytes_per_token']} bytes of KV a token" if memory["kv_bytes_per_token"] else ""
    bridged = made.model is not None and made.on_device is None
    share = f"; {made.how.partition('; ')[2].partition('. ')[0]}" if bridged else ""
    in_format = "" if made.model is None else " in int8"
    return f"{format_size(memory['weight_bytes'])} of weights{in_format}{kept}{share}"


def _in_folder(folder: Path, target: ReadyModel, device: str) -> Iterator[Available]:
    if not folder.is_dir():
        raise InvalidRequest(f"--in {folder} is no directory: give one that holds models or heads")
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise InvalidRequest(f"--in {folder} cannot be read: {error}") from None
    for path in [folder, *paths]:
        found = _at(path, f"in {folder}", target, device)
        if found is not None:
            yield found


def _at(path: Path, origin: str, target: ReadyModel, device: str) -> Available | None:
    """Judge what stands at a path; None: nothing of it looks like a drafter, or it is the target itself."""
    try:
        kinds = ["model"] if path.suffix == ".gguf" and path.is_file() else _kinds_of(path)
        if not kinds or not _is_other(str(path), target):
            return None
    except (PacelineError, OSError, RuntimeError) as error:  # RuntimeError: links in a loop
        return Available(str(path), origin, needs="", why_not=reason(error))
    tried = [_judged(f"{kind}:{path}", origin, target, device) for kind in kinds]
    return next((each for each in tried if each.why_not is None), tried[0])


def _kinds_of(path: Path) -> list[str]:
    """Name the kinds of drafter that a directory may hold, the likeliest first."""
    config = path / "config.json"
    if not os.path.lexists(config):
        if path.is_dir():
            next(path.iterdir(), None)  # raises if it cannot be read
        return []
    values = read_json(config)
    said = json.dumps([values.get("architectures"), values.get("speculators_model_type")]).lower()
    if "medusa_num_heads" in values:
        return ["medusa"]
    if is_block(values):
        return ["block"]
    if values.get("speculators_model_type") == "mtp":
        return ["mtp"]
    return ["eagle"] if "eagle" in said else ["model", "eagle"]


def _is_other(name: str, target: ReadyModel) -> bool:
    try:
        return resolve(name).resolve() != target.model.path.resolve()
    except PacelineError:
        return True  # judging it says why it cannot be read


def _in_checkpoint(target: ReadyModel, device: str) -> list[Available]:
    """Find layers for several tokens at once that were trained with the target."""
    config = target.model.path / "config.json"
    values: Mapping[str, Any] = read_json(config) if config.is_file() else target.model.metadata
    said = [value for key, value in values.items() if key in MTP_KEYS or key.endswith(".nextn_predict_layers")]
    if not any(said):
        return []
    count = sum(value for value in said if isinstance(value, (int, float)))
    return [_judged("mtp", f"{count or 'some'} layers in the checkpoint", target, device)]


def _made(words: str, origin: str, needs: str, target: ReadyModel, device: str) -> Available:
    """Say whether a drafter made of the target itself can draft. On a GPU that takes a copy, and is not tried."""
    try:
        if device == "cpu":
            recipe(words, target)
    except (PacelineError, OSError) as error:
        return Available(words, origin, needs, why_not=reason(error))
    return Available(words, origin, needs, _command(target, words))


def _to_train(kind: str, target: ReadyModel) -> Available:
    command = f"paceline train {kind} {shlex.quote(target.name)} --prompts FILE --out drafter"
    return Available(f"{kind}:drafter", UNTRAINED, TO_TRAIN[kind], command)


def _command(target: ReadyModel, words: str) -> str:
    return f"paceline serve {shlex.quote(target.name)} --drafter {shlex.quote(words)}"


# ── stored figures ──


def card_figures(directory: Path) -> tuple[str, ...]:
    """Read the measured tokens per round from the card of a head that Paceline trained."""
    card = directory / "README.md"
    try:
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    except OSError:
        return ()
    measured = text.partition("## Measured acceptance")[2].partition("\n## ")[0]
    rows = [f"{tokens} on {name}" for name, _, tokens in CARD_ROW.findall(measured)]
    return (f"tokens per round by its card: {', '.join(rows)}",) if rows else ()


def results_of(path: Path, target: ReadyModel) -> dict[str, list[str]]:
    """Read the figures of a target's drafters from a file of `python -m peers.drafters`."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found: dict[str, list[str]] = {}
        for each in lines:
            if "cell" in each and each["target"] in (target.name, name_of(target.model.path)):
                found.setdefault(_named(each["drafter"]), []).append(_figures(each))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"--results {path} is no file of `python -m peers.drafters` ({error})") from None
    return found


def _named(words: str) -> str:
    """Return a drafter's words without the folders of its file, as stored results have them."""
    kind, colon, name = words.partition(":")
    return f"{kind}{colon}{served_name(name)}" if colon else words


def _figures(each: Mapping[str, Any]) -> str:
    cell = each["cell"]
    interval = cell["ratio_interval"]
    spread = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    speed = "" if cell["ratio"] is None else f"{cell['ratio']:.2f} times plain speed{spread}, "
    return f"{speed}{cell['tokens_per_step']:.2f} tokens per step on {each['set']}, {each['format']}"


def lines_of(found: Sequence[Available]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each drafter, and what there is to say of it."""
    for each in found:
        needs = [f"needs {each.needs}"] if each.needs else []
        use = [f"cannot draft: {each.why_not}"] if each.why_not else [str(each.command)]
        yield each.drafter, [each.origin, *needs, *each.known, *use]
