"""Drafters that are loaded and unloaded while the engine runs.

`HotDrafters.load` reads weights and builds, on any thread but the engine's. `join` and `unload` run on the engine's
thread, between two steps. A drafter that joins gets a name of its own, so that two of a kind can be compared. What the
drafter holds (weights, keys and values under the target's pages, a thread) is given back when it is unloaded.

On a GPU drafters are recorded into the rounds when the engine starts: there nothing can be loaded or unloaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.drafters.guard import Guard
from paceline.drafters.portfolio import PortfolioDrafter
from paceline.drafters.prediction import PREDICTION
from paceline.drafters.recipe import MODEL, Recipe
from paceline.drafters.registry import PORTFOLIO, check_corpus, check_device, check_split, find, recipe
from paceline.engine.assemble import Parts
from paceline.engine.building import build_drafter
from paceline.errors import InvalidRequest, OutOfMemory, UnknownOption
from paceline.models.weights import Progress
from paceline.runner.loading.memory import available_memory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NONE = "none"  # the name that stands for plain decoding


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter that is built, and has not joined the engine yet."""

    recipe: Recipe
    guard: Guard
    members: tuple[str, ...] = ()  # of a portfolio

    @property
    def name(self) -> str:
        return self.recipe.name


class HotDrafters:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._members: dict[str, tuple[str, ...]] = {}  # portfolio → its members; loaded at the start: all
        if PORTFOLIO in parts.drafters:
            self._members[PORTFOLIO] = tuple(name for name in parts.drafters if name not in (PORTFOLIO, PREDICTION))

    def load(self, words: str, *, name: str | None = None, progress: Progress | None = None) -> Loaded:
        """Read and build a drafter by a user's words, under a name that is free. Raises before anything is read if
        that is known."""
        parts, context = self._parts, self._parts.context
        check_hot(parts, words)
        check_device(words, parts.target.device)
        if context.corpus:
            check_corpus(context.corpus, [words, *parts.drafters])
        if parts.target.splits_drafters and context.ranks is not None:
            check_split([words, *parts.drafters], context.ranks.size)
        kind = words.partition(":")[0]
        self.check_free(name or (MODEL if find(kind) is None else kind))
        made = recipe(words, parts.target, progress=progress)
        _check_whole(made)
        made = replace(made, name=name or made.name)
        self.check_free(made.name)
        self._check_taps(made)
        self._check_memory(made)
        others = {each: guard for each, guard in parts.engine.drafters.items() if each not in self._members}
        drafter = build_drafter(made, replace(context, drafters=others, hot=True))
        assert drafter is not None, "only a device has drafters that the host cannot run"
        guard = Guard(drafter, vocab_size=context.vocab_size, timeout=parts.engine.drafter_timeout)
        guard.name = made.name
        members = [each.name for each in drafter.members] if isinstance(drafter, PortfolioDrafter) else ()
        return Loaded(made, guard, tuple(members))

    def join(self, loaded: Loaded) -> None:
        """Hand a drafter to the engine, on its thread."""
        self.check_free(loaded.name)
        self._parts.engine.add_drafter(loaded.name, loaded.guard)
        if loaded.members:
            self._members[loaded.name] = loaded.members

    def unload(self, name: str) -> None:
        """Take a drafter from the engine, on its thread, and give its memory back."""
        self.check_unload(name)
        self._members.pop(name, None)
        self._parts.engine.remove_drafter(name)

    def check_unload(self, name: str) -> None:
        """Raise InvalidRequest if the drafter must stay."""
        engine = self._parts.engine
        check_hot(self._parts, name)
        if name not in engine.drafters:
            raise UnknownOption("drafter", name, engine.drafters, param="name")
        if name == PREDICTION:
            raise InvalidRequest(f"the drafter {name} serves requests with a prediction, and stays", param="name")
        if name == engine.default_drafter:
            raise InvalidRequest(
                f"the drafter {name} is the default: make another one the default first, or {NONE!r}", param="name"
            )
        for owner, members in self._members.items():
            if name in members:
                raise InvalidRequest(f"the drafter {name} is a member of {owner}: unload {owner} first", param="name")

    def check_free(self, name: str) -> None:
        if not NAME.fullmatch(name) or name == NONE:
            raise InvalidRequest(
                f"a drafter's name is 1 to 64 letters, digits, '.', '_' and '-', and not {NONE!r}; it is {name[:80]!r}",
                param="name",
            )
        if name in self._parts.engine.drafters:
            raise InvalidRequest(f"a drafter named {name!r} is loaded: give this one another name", param="name")

    def _check_taps(self, made: Recipe) -> None:
        kept: Sequence[int] = self._parts.context.target.taps
        missing = [tap for tap in made.taps if tap not in kept]
        if missing:
            raise InvalidRequest(
                f"the drafter {made.name} reads hidden states at {_listed(missing)}, and the target keeps "
                f"{_listed(kept) or 'none'} since its start: it cannot be loaded while the server runs; "
                "name it with --drafter and start again",
                param="drafter",
            )

    def _check_memory(self, made: Recipe) -> None:
        need = made.host_bytes(self._parts.context.pool.num_pages)
        if need > (free := available_memory()):
            raise OutOfMemory(
                f"the drafter {made.name} needs {need / 2**20:.0f} MiB for weights and KV memory, and "
                f"{free / 2**20:.0f} MiB are free: unload another one, or start with a smaller kv_memory"
            )


def check_hot(parts: Parts, what: str) -> None:
    """Refuse changes of drafters where a device has recorded them."""
    if not parts.engine.is_hot:
        raise InvalidRequest(
            f"{what!r} cannot be loaded or unloaded while the server runs: this device records its rounds for the "
            "drafters that it starts with; name them with --drafter and start again",
            param="drafter",
        )


def _check_whole(made: Recipe) -> None:
    """Refuse a drafter that all ranks would have to read: requests would wait meanwhile."""
    if made.model is not None and made.model.split is not None:
        raise InvalidRequest(
            f"the drafter {made.name} is split over {made.model.split.degree} ranks, which cannot read it while they "
            "serve requests: name it with --drafter and start again, or leave drafter_tensor_parallel out",
            param="drafter",
        )


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps))
