"""The field `speculation` of a request, checked against the limits of the server's settings."""

from __future__ import annotations

from collections.abc import Callable

from paceline.checks import check_number
from paceline.errors import InvalidRequest
from paceline.rules import Rule
from paceline.server.protocol.requests import SpeculationOptions
from paceline.server.settings import Settings
from paceline.types import MAX_TARGET_TPOT, Speculation
from paceline.work_kinds import WorkKind


def read_speculation(
    options: SpeculationOptions | None, settings: Settings, *, resolve: Callable[[Speculation], Speculation]
) -> Speculation:
    """Read the field `speculation` of a body; the server's defaults fill absent options. `resolve`: puts the kind of
    work in the place of a threshold `auto`."""
    if options is None:
        options = SpeculationOptions.model_validate({})
    _check_allowed(options, settings)
    rule = Rule((options.rule or settings.default_rule)[:60])
    asked = Speculation.of(
        enabled=options.enabled is not False,
        drafter=options.drafter,
        max_draft=options.max_draft,
        rule=rule,
        threshold=_threshold(options, rule, settings),
        p_min=options.p_min,
        target_tpot=_target(options),
    )
    made = resolve(asked)
    _check_threshold(made, settings, automatic=asked.threshold is WorkKind.AUTO)
    return made


def _target(options: SpeculationOptions) -> float | None:
    """Read the wanted time per output token, in seconds."""
    given = options.target_tpot_ms
    if given is None:
        return None
    check_number("target_tpot_ms", given, 0, MAX_TARGET_TPOT * 1000, open_low=True, param="speculation.target_tpot_ms")
    return given / 1000


def _threshold(options: SpeculationOptions, rule: Rule, settings: Settings) -> float | str | None:
    """Find the threshold of a rule: the request's, else the server's for its default rule, else the rule's own."""
    if options.threshold is not None or rule.threshold is None:
        return options.threshold
    own = settings.default_threshold if rule == settings.default_rule else None
    return max(own or rule.threshold, settings.allowed_threshold)


def _check_threshold(made: Speculation, settings: Settings, *, automatic: bool) -> None:
    """Raise InvalidRequest if the rule may accept less than the server allows. `automatic`: the kind was detected."""
    given, least = made.min_likelihood, settings.allowed_threshold
    if made.threshold is not None and given < least:
        how = "" if made.kind is None else f" ({made.kind}{', as auto found' if automatic else ''})"
        raise InvalidRequest(
            f"threshold is {given:g}{how}; this server allows no less than {least:g}", param="speculation.threshold"
        )


def _check_allowed(options: SpeculationOptions, settings: Settings) -> None:
    if options.p_min is not None and options.p_min < settings.allowed_p_min:
        raise InvalidRequest(
            f"p_min is {options.p_min:g}; this server allows no less than {settings.allowed_p_min:g}",
            param="speculation.p_min",
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
