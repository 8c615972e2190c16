"""Old module names: each still imports, with a DeprecationWarning that says where the module is now.

`install` adds a finder to `sys.meta_path` that knows the names of `MOVED` alone. An import of an old name returns the
module under its new name: the same object, so that classes stay the same. Where a module has become a package of the
same name, `names_of` keeps its old names importable.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MOVED = {
    "paceline.chat_budget": "paceline.chat.budget",
    "paceline.chat_messages": "paceline.chat.messages",
    "paceline.chat_sandbox": "paceline.chat.sandbox",
    "paceline.chat_shield": "paceline.chat.shield",
    "paceline.cli.progress": "paceline.progress",
    "paceline.detokenizer": "paceline.text.detokenizer",
    "paceline.filters": "paceline.sampling.filters",
    "paceline.grammar": "paceline.sampling.grammar",
    "paceline.pretokenizers": "paceline.text.pretokenizers",
    "paceline.runner.load": "paceline.runner.loading.models",
    "paceline.schema_limits": "paceline.sampling.schema_limits",
    "paceline.server.run": "paceline.server.process",
    "paceline.tokenizer": "paceline.text.tokenizer",
    "paceline.tokenizer_gguf": "paceline.text.gguf",
    "paceline.tokenizer_hf": "paceline.text.hf",
    "paceline.vocab": "paceline.text.vocabulary",
}


class _Loader(importlib.abc.Loader):
    """A loader that returns the module of the new name."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which importlib overwrote. The module ran when its new name was imported."""
        module.__spec__ = self._own


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MOVED:
            return None
        # The two frames of importlib's machinery are skipped by the warnings module itself.
        warnings.warn(f"{name} has moved to {MOVED[name]}", DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(name, _Loader())


def install() -> None:
    """Make the old names importable; a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def names_of(package: str, module: str) -> Callable[[str], Any]:
    """Make a `__getattr__` for `package` that takes missing names from `module`, with a DeprecationWarning."""

    def find(name: str) -> Any:
        if name.startswith("__") or not hasattr(found := importlib.import_module(module), name):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} has moved to {module}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(found, name)

    return find
