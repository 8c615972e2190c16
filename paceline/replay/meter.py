"""Measure passes of an idle engine into a `PassTable`: over many numbers of rows, with and without logits, and behind
short and long contexts. Each pass runs twice, the second one counts, and of all turns the quickest."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.engine.probe import Probes
from paceline.replay.step_times import PassTable
from paceline.runner.batch import Share, build_batch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_OUTS = 128  # rows with logits of the largest measured pass
MANY_ROWS = 64  # rows of the pass that tells what a row's context costs
SHORT, LONG = 64, 2048  # tokens of context
TURNS = 3
Tick = Callable[[], None]  # called after every measured pass


def measure_passes(
    probes: Probes, *, clock: Callable[[], float] = time.perf_counter, tick: Tick = lambda: None
) -> PassTable:
    """The engine must be idle."""
    most = min(probes.max_step_tokens, probes.admission.max_context // 2)
    short, long = (min(context, (probes.admission.max_context - most) // 2) for context in (SHORT, LONG))
    sizes = [rows for rows in (*ROWS, most) if rows <= most]
    many = min(MANY_ROWS, most)
    wanted = {(rows, 0, short) for rows in sizes} | {(rows, rows, short) for rows in sizes if rows <= MAX_OUTS}
    wanted |= {(rows, 0, context) for rows in (1, many) for context in (short, long)}
    found: dict[tuple[int, int, int], float] = {}
    for _ in range(TURNS):
        for key in sorted(wanted):
            found[key] = min(_timed(probes, *key, clock), found.get(key, float("inf")))
            tick()
    return _table(found, short=short, long=long, many=many)


def _timed(probes: Probes, rows: int, outs: int, context: int, clock: Callable[[], float]) -> float:
    """Seconds of a pass over `rows` behind a context, which is not computed: what it holds does not matter."""
    with probes.seated([0] * (context + rows)) as lane:
        batch = build_batch(probes.lanes, [Share(lane, start=context, count=rows, outs=outs)], features=False)
        probes.forward(batch)
        began = clock()
        probes.forward(batch)
        return clock() - began


def _table(found: dict[tuple[int, int, int], float], *, short: int, long: int, many: int) -> PassTable:
    slopes = {rows: (found[rows, 0, long] - found[rows, 0, short]) / max(long - short, 1) for rows in (1, many)}
    attended = max(0.0, (slopes[many] - slopes[1]) / max(many - 1, 1))
    read = max(0.0, slopes[1] - attended)

    def context(rows: int) -> float:
        return read * (short + rows) + attended * (short * rows + rows * (rows + 1) // 2)

    body = {
        rows: max(seconds - context(rows), 0.0)
        for (rows, outs, at), seconds in found.items()
        if not outs and at == short
    }
    head = {outs: max(s - found[rows, 0, short], 0.0) for (rows, outs, at), s in found.items() if outs}
    return PassTable(body=body, head=head, read_token=read, attended_token=attended)
