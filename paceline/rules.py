"""Acceptance rules by name, as a request asks for them, with the traits that are known without running a rule.

`Rule(name)` finds a rule: one of Paceline's own, one that `paceline.accept.register` has added, or one that an
installed package offers by an entry point of the group `paceline.rules`. The rules themselves are in `paceline.accept`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from paceline import plugins
from paceline.checks import check_flag, check_number
from paceline.errors import InvalidRequest, UnknownOption

logger = logging.getLogger(__name__)
DEVICES = ("cpu", "cuda")


class Rule(str):
    """The name of an acceptance rule, with its traits. There is one object of each name: compare rules with `is`."""

    COUPLED: ClassVar[Rule]
    REJECTION: ClassVar[Rule]
    BLOCK: ClassVar[Rule]
    THRESHOLD: ClassVar[Rule]
    TYPICAL: ClassVar[Rule]
    CONFIDENCE: ClassVar[Rule]

    lossless: bool  # False: the text may not be the one that the target alone would have written
    wants_probs: bool  # True: a drafter that samples uses noise of its own, and reports the distributions it drew from
    wants_confidence: bool  # True: a drafter that knows how sure it is of each token reports `Draft.confidence`
    threshold: float | None  # default of `Speculation.threshold`: how likely a token must be; None: the rule takes none
    devices: tuple[str, ...]  # devices on which an engine may use it

    def __new__(cls, name: object) -> Rule:
        """Find a rule by its name. Raises UnknownOption if there is none."""
        found = (_KNOWN.get(name) or _from_plugin(name)) if isinstance(name, str) else None
        if found is not None:
            return found
        offered = plugins.names(plugins.RULES)
        if name in offered:
            problem = plugins.problem(plugins.RULES, str(name)) or "it is no paceline.accept.AcceptRule of this name"
            raise InvalidRequest(f"the rule {str(name)!r} of another package cannot be loaded: {problem}", param="rule")
        others = [other for other in offered if other in _KNOWN or _from_plugin(other) is not None]
        raise UnknownOption("rule", str(name), {*_KNOWN, *others}, param="rule")

    def check_device(self, device: str) -> None:
        """Raise InvalidRequest if an engine on this device cannot use the rule."""
        if device not in self.devices:
            raise InvalidRequest(
                f"the rule {str(self)!r} does not run on {device}: its AcceptRule.devices names only "
                f"{', '.join(self.devices)}; load the model there, or take one of {', '.join(BUILT_IN)}",
                param="rule",
            )


def define(
    name: str,
    *,
    lossless: bool,
    wants_probs: bool = False,
    wants_confidence: bool = False,
    threshold: float | None = None,
    devices: Sequence[str] = ("cpu",),
) -> Rule:
    """Make a rule known by its name, for as long as the process runs."""
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidRequest(f"a rule is named with letters, digits and underscores, not {name!r}")
    if name in _KNOWN:
        raise InvalidRequest(f"there is already a rule named {name!r}; choose another name")
    check_flag("lossless", lossless)
    check_flag("wants_probs", wants_probs)
    if threshold is not None:
        check_number("threshold", threshold, 0, 1, open_low=True)
    unknown = [device for device in devices if device not in DEVICES]
    if unknown:
        raise UnknownOption("device", unknown[0], DEVICES)
    rule = str.__new__(Rule, name)
    rule.lossless, rule.wants_probs, rule.wants_confidence = lossless, wants_probs, wants_confidence
    rule.threshold, rule.devices = threshold, tuple(devices)
    _KNOWN[name] = rule
    return rule


def with_threshold() -> list[Rule]:
    """List the rules that take a threshold. A plug-in is listed once it has been asked for by name."""
    return [rule for rule in _KNOWN.values() if rule.threshold is not None]


def _from_plugin(name: str) -> Rule | None:
    """Find a rule among the plug-ins. A plug-in that is no `AcceptRule` of this name is logged and skipped."""
    found: Any = plugins.load(plugins.RULES, name)
    if found is None:
        return None
    try:
        if found.name != name or not callable(found.judge):
            raise InvalidRequest(f"it is named {found.name!r}, or cannot judge")
        return define(
            name,
            lossless=found.lossless,
            wants_probs=found.wants_probs,
            threshold=found.threshold,
            devices=found.devices,
        )
    except (AttributeError, TypeError, InvalidRequest) as error:
        logger.warning("the plug-in %s is no paceline.accept.AcceptRule and is skipped: %s", name, error)
        return None


_KNOWN: dict[str, Rule] = {}
Rule.COUPLED = define("coupled", lossless=True, devices=DEVICES)
Rule.REJECTION = define("rejection", lossless=True, wants_probs=True, devices=DEVICES)
Rule.BLOCK = define("block", lossless=True, wants_probs=True, devices=DEVICES)
Rule.THRESHOLD = define("threshold", lossless=False, threshold=0.3, devices=DEVICES)
Rule.TYPICAL = define("typical", lossless=False, threshold=0.09, devices=DEVICES)
Rule.CONFIDENCE = define("confidence", lossless=False, wants_confidence=True, threshold=0.3, devices=DEVICES)
BUILT_IN = tuple(_KNOWN.values())
