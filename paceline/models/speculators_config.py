"""The key `speculators_config` of a head's config.json: by which algorithm it drafts, how far, and beside which model.

The library `speculators` writes it. Nothing of it changes a network. An algorithm that contradicts the rest of the
config is an error; what else it says becomes notes for users. Rules by which it would have a target accept tokens are
never followed: they would change the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.config import ModelConfig
from paceline.models.fields import Fields
from paceline.models.hf_config import FAMILIES

KEY, TYPE = "speculators_config", "speculators_model_type"
BACKBONES = {"dspark": "dflash", "dflash2": "dflash", "peagle": "eagle3"}  # a type → the algorithm that it builds on
LOSSY: Mapping[str, float] = {"verifier_accept_k": 1, "accept_tolerance": 0}  # key → the value that changes no text


def published_notes(fields: Fields, target: ModelConfig) -> tuple[str, ...]:
    """Say for which model and drafts a head was published. Raise if it names another algorithm than its type."""
    said = fields.inner(KEY)
    _check_algorithm(said, fields)
    return (*_of_verifier(said.inner("verifier"), target), *_of_proposals(said))


def _check_algorithm(said: Fields, fields: Fields) -> None:
    algorithm, kind = said.text("algorithm", ""), fields.get(TYPE)
    if not algorithm or kind is None or _plain(algorithm) in (_plain(kind), BACKBONES.get(_plain(kind))):
        return
    raise said.error("algorithm", f"is {algorithm!r:.50}, but {TYPE} is {kind!r:.50}; keep the right one")


def _plain(name: object) -> str:
    return str(name).lower().replace("-", "").replace("_", "")


def _of_verifier(verifier: Fields, target: ModelConfig) -> list[str]:
    name, names = verifier.text("name_or_path", ""), verifier.get("architectures") or []
    if not isinstance(names, list):
        raise verifier.error("architectures", f"is {names!r:.100}; allowed: a list of names")
    families = [FAMILIES[each].architecture for each in map(str, names) if each in FAMILIES]
    other = families[0] if families and target.architecture not in families else ""
    of = f" ({other}; this target is {target.architecture})" if other else ""
    return [f"trained for {name or 'another model'}{of}"] if name or other else []


def _of_proposals(said: Fields) -> list[str]:
    methods = said.get("proposal_methods")
    if methods is None or methods == []:
        return []
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise said.error("proposal_methods", f"is {methods!r:.100}; allowed: a list of mappings")
    chosen = _chosen(methods, said.get("default_proposal_method"), said)
    tokens = chosen.integer("speculative_tokens", low=1, high=1 << 12)
    unlike = [f"{key} {chosen.get(key)}" for key, usual in LOSSY.items() if chosen.number(key, usual, low=0) != usual]
    lossy = [f"its rule of acceptance ({', '.join(unlike)}) is not used"] if unlike else []
    return [f"published for drafts of {tokens}", *lossy]


def _chosen(methods: list[Mapping[str, Any]], default: object, said: Fields) -> Fields:
    """Return the method that is the default, or the first one."""
    named = [place for place, method in enumerate(methods) if method.get("proposal_type") == default]
    if default is not None and not named and any("proposal_type" in method for method in methods):
        types = [method.get("proposal_type") for method in methods]
        raise said.error("default_proposal_method", f"is {default!r:.50}, but proposal_methods has {types!r:.100}")
    place = named[0] if default is not None and named else 0
    return Fields(methods[place], source=f"{said.source}: proposal_methods[{place}]")
