"""The seconds of a step that each of its sequences caused, for requests in an arm of a canary (docs/adr/0032).

    step   │ draft, by drafter │ verify, accept, emit: base + row · rows │
    shares   those that asked    base by sequences, rows by their rows

A pass takes about base + row · rows seconds (`engine.cost`). Every sequence needs the base once, and each row its own
seconds. So the shares of a mixed batch are what each kind would cost in a batch of its own kind. A drafter's call is
shared by the sequences that asked. If the whole batch asked, the call would take as long or longer, but not more than
in proportion. Hence two bounds: divided by those that asked, and divided by all.

Only steps that decode and nothing else count, and a sequence's last step does not. It reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.arms import ArmSpeed
from paceline.engine.scheduler import Work


def has_arms(works: Seq[Work]) -> bool:
    """Tell whether a sequence is in an arm. A loop: a generator would be a call for each sequence of every step."""
    for work in works:  # noqa: SIM110
        if work.sequence.request.arm is not None:
            return True
    return False


def charge_arms(works: Seq[Work], seconds: float, drafting: Mapping[str, float], *, row_seconds: float) -> None:
    """Charge a step to its sequences that are in an arm. `drafting`: seconds of each drafter's call, part of
    `seconds`. `row_seconds`: of one more row of a pass."""
    count, rows = len(works), sum(work.rows for work in works)
    rest = max(seconds - sum(drafting.values()), 0.0)
    row = min(row_seconds, rest / rows)
    base, bits = (rest - row * rows) / count, (count - 1).bit_length()
    asked = {name: sum(_asked(work) == name for work in works) for name in drafting}
    for work in works:
        if work.sequence.request.arm is None or work.sequence.finish is not None:
            continue
        name, own = _asked(work), base + row * work.rows
        drafted = drafting.get(name or "", 0.0)
        least, most = own + drafted / count, own + drafted / max(asked.get(name or "", 1), 1)
        speeds = work.sequence.counters.arm_speeds
        speeds[bits] = speeds.get(bits, ArmSpeed(bits)).plus(len(work.tokens), least, most)


def _asked(work: Work) -> str | None:
    """Return the drafter that was asked for the work's draft; None: none was."""
    return work.drafter if work.max_draft and not work.forced else None
