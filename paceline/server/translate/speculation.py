"""The field `speculation` of a request, checked against the limits of the server's settings."""

from __future__ import annotations

from paceline.errors import InvalidRequest
from paceline.rules import Rule
from paceline.server.protocol.requests import SpeculationOptions
from paceline.server.settings import Settings
from paceline.types import Speculation


def read_speculation(options: SpeculationOptions | None, settings: Settings) -> Speculation:
    """Read the field `speculation` of a body; the server's defaults fill absent options."""
    if options is None:
        options = SpeculationOptions.model_validate({})
    _check_allowed(options, settings)
    rule = Rule((options.rule or settings.default_rule)[:60])
    return Speculation(
        enabled=options.enabled is not False,
        drafter=options.drafter,
        max_draft=options.max_draft,
        rule=rule,
        threshold=_threshold(options, rule, settings),
        p_min=options.p_min,
    )


def _threshold(options: SpeculationOptions, rule: Rule, settings: Settings) -> float | None:
    """Find the threshold of a rule: the request's, else the server's for its default rule, else the rule's own."""
    if options.threshold is not None or rule.threshold is None:
        return options.threshold
    own = settings.default_threshold if rule == settings.default_rule else None
    return max(own or rule.threshold, settings.allowed_threshold)


def _check_allowed(options: SpeculationOptions, settings: Settings) -> None:
    for name in ("threshold", "p_min"):
        asked, least = getattr(options, name), getattr(settings, f"allowed_{name}")
        if asked is not None and asked < least:
            raise InvalidRequest(
                f"{name} is {asked:g}; this server allows no less than {least:g}", param=f"speculation.{name}"
            )
    most = settings.allowed_max_draft
    if most is not None and options.max_draft is not None and options.max_draft > most:
        raise InvalidRequest(
            f"max_draft is {options.max_draft}; this server allows up to {most}", param="speculation.max_draft"
        )
    for name, given, allowed in (
        ("rule", options.rule, settings.allowed_rules),
        ("drafter", options.drafter, settings.allowed_drafters),
    ):
        if given is not None and allowed and given not in allowed:
            names = ", ".join(allowed)
            raise InvalidRequest(
                f"the {name} {given[:60]!r} is not allowed here; allowed: {names}", param=f"speculation.{name}"
            )
