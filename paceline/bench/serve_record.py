"""Results of `bench serve` as a record for programs; `serve_text` makes tables of it for people.

A run has the keys of `vllm bench serve`, so that readers of its files read these: `ttft`, `tpot`, `itl` and `e2el` in
milliseconds, `itl` between chunks. Paceline adds keys of its own. A single run is the record itself; several
are under `runs`, and pairs of them under `comparisons`. Failed requests are counted, but have no part in latencies.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.bench.client import RequestOutcome
from paceline.bench.conclusion import conclusion, of_ratio
from paceline.bench.counters import SpecCounters
from paceline.bench.serve import Block, LoadPlan, LoadRun
from paceline.bench.statistics import Ratio, paired_ratio, summary

Record = dict[str, Any]
SPEED = "output_throughput"
LATENCIES = ("ttft", "tpot", "itl", "e2el")
DEFINITION = (
    "ttft: to the first chunk with text; tpot: (last chunk - first chunk) / (tokens - 1); itl: between two chunks, of "
    "which each may hold several tokens (tokens_per_chunk); e2el: to the last chunk"
)


def record(
    plan: LoadPlan, runs: Sequence[LoadRun], facts: Mapping[str, Any], *, goodput: Mapping[str, float]
) -> Record:
    """The record of all runs. `facts`: top-level keys such as the command and the machine. `goodput`: limits in ms."""
    found = [run_record(run, goodput=goodput) for run in runs]
    above = {"benchmark": "serve", "definition": DEFINITION, **facts, "num_prompts": len(plan.prompts)}
    pairs = comparisons(runs)
    above["conclusion"] = _conclusion(found, pairs, interrupted=above.get("interrupted", False))
    if len(found) == 1:
        return above | found[0]
    return above | {"runs": found} | ({"comparisons": pairs} if pairs else {})


def _conclusion(runs: Sequence[Record], pairs: Sequence[Record], *, interrupted: bool) -> str:
    """Conclude from the arms that took turns; without any, from the number of answers."""
    if pairs:
        outcomes = [
            of_ratio(pair["arm"], pair["ratios"][SPEED], same=pair["identical_texts"], answers=pair["pairs"])
            for pair in pairs
            if SPEED in pair["ratios"]
        ]
        arms = sorted({pair["arm"] for pair in pairs})
        lead = f"Against {pairs[0]['against']}, {' and '.join(arms)} {'makes' if len(arms) == 1 else 'make'} the server"
        return conclusion(lead, outcomes, interrupted=interrupted)
    done = sum(run["completed"] for run in runs)
    asked = done + sum(run["failed"] + run["not_sent"] for run in runs)
    best = max((run["output_throughput"] for run in runs), default=0.0)
    said = f"{done} of {asked} requests were answered, at up to {best:.0f} tokens a second."
    return f"Interrupted; so far: {said}" if interrupted else said


def run_record(run: LoadRun, *, goodput: Mapping[str, float]) -> Record:
    return {
        "arm": run.arm.name,
        "model_id": run.arm.model,
        "base_url": run.arm.client.root,
        "endpoint_type": run.arm.client.endpoint,
        "max_concurrency": run.load.at_once,
        "request_rate": run.load.rate if run.load.rate is not None else "inf",
        "last_request_rate": run.load.last_rate,
        "temperature": run.temperature,
        **figures(run.outcomes, seconds=run.seconds, not_sent=run.not_sent, counters=run.counters, goodput=goodput),
        "block_seconds": [block.seconds for block in run.blocks],
        "block_output_tokens": [sum(o.output_tokens for o in block.outcomes if o.good) for block in run.blocks],
    }


def figures(
    outcomes: Sequence[RequestOutcome],
    *,
    seconds: float,
    not_sent: int = 0,
    counters: SpecCounters | None = None,
    goodput: Mapping[str, float] | None = None,
) -> Record:
    """Summarise requests that took `seconds` together."""
    good = [outcome for outcome in outcomes if outcome.good]
    lasted = seconds or float("inf")
    total_in, total_out = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    chunks = sum(o.chunks for o in good)
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "not_sent": not_sent,
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "tokens_counted_by": "server" if all(o.counted for o in good) else "chunks",
        "request_throughput": len(good) / lasted,
        "request_goodput": sum(_within(o, goodput) for o in good) / lasted if goodput else None,
        "output_throughput": total_out / lasted,
        "total_token_throughput": (total_in + total_out) / lasted,
        "max_concurrent_requests": most_at_once(outcomes),
        "tokens_per_chunk": total_out / chunks if chunks else None,
        "tokens_per_chunk_counts": _counts(good),
        **_latencies(good),
        "median_delivery_ms": _delivery(good),
        **(counters.record() if counters else {}),
        "categories": categories(good),
        **_lists(outcomes),
    }


def _delivery(good: Sequence[RequestOutcome]) -> float | None:
    """Return the median time that first tokens took outside of the engine, in ms; None: the server does not say."""
    inside = [(o.ttft, (o.speculation or {}).get("time_to_first_token")) for o in good]
    outside = [ttft - seconds for ttft, seconds in inside if isinstance(seconds, (int, float))]
    return 1e3 * statistics.median(outside) if outside else None


def _within(outcome: RequestOutcome, goodput: Mapping[str, float]) -> bool:
    had = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1e3 * had[name] <= most for name, most in goodput.items())


def _latencies(good: Sequence[RequestOutcome]) -> Record:
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [o.tpot for o in good if o.tpot is not None],
        "itl": [gap for o in good for gap in o.gaps],
        "e2el": [o.latency for o in good],
    }
    return {
        f"{name}_{latency}_ms": value if value is None else 1e3 * value
        for latency in LATENCIES
        for name, value in summary(values[latency]).items()
    }


def _counts(good: Sequence[RequestOutcome]) -> Record | None:
    """Number of chunks by their tokens; None if the server does not count them."""
    counted = Counter(tokens for outcome in good for tokens in outcome.chunk_tokens)
    return {str(size): counted[size] for size in sorted(counted)} or None


def _lists(outcomes: Sequence[RequestOutcome]) -> Record:
    return {
        "prompt_ids": [o.prompt.id for o in outcomes],
        "prompt_categories": [o.prompt.category for o in outcomes],
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens if o.good else 0 for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.started for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }


def most_at_once(outcomes: Sequence[RequestOutcome]) -> int:
    """The largest number of requests open at the same time."""
    moments = sorted((t, d) for o in outcomes for t, d in ((o.started, 1), (o.started + o.latency, -1)))
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def categories(good: Sequence[RequestOutcome]) -> Record:
    """Speed by category, and the statistics of drafts if the server is Paceline."""
    found: Record = {}
    for name in sorted({o.prompt.category for o in good}):
        mine = [o for o in good if o.prompt.category == name]
        tpots = [o.tpot for o in mine if o.tpot is not None]
        found[name] = {"completed": len(mine), "mean_tpot_ms": 1e3 * sum(tpots) / len(tpots) if tpots else None}
        found[name] |= _drafts([o.speculation for o in mine if o.speculation])
    return found


def _drafts(said: Sequence[Mapping[str, Any]]) -> Record:
    drafts = sum(s.get("num_drafts", 0) for s in said)
    if not drafts:
        return {}
    accepted = sum(s["num_accepted_tokens"] for s in said)
    places: Counter[int] = Counter()
    for one in said:
        places.update(dict(enumerate(one["num_accepted_tokens_per_pos"])))
    return {
        "acceptance_rate": 100 * accepted / sum(s["num_draft_tokens"] for s in said),
        "acceptance_length": 1 + accepted / drafts,
        "per_position_acceptance_rates": [places[i] / drafts for i in sorted(places)],
    }


def comparisons(runs: Sequence[LoadRun]) -> list[Record]:
    """Ratios of each arm to the last one, under the same load and temperature."""
    found = []
    for key in dict.fromkeys((run.load, run.temperature) for run in runs):
        *arms, against = [run for run in runs if (run.load, run.temperature) == key]
        found += [_compared(arm, against) for arm in arms]
    return found


def _compared(arm: LoadRun, against: LoadRun) -> Record:
    """Compare two arms. Units are blocks: requests of one block ran together, and slow each other down."""
    blocks = [_pairs(mine, theirs) for mine, theirs in zip(arm.blocks, against.blocks, strict=False)]
    pairs = [pair for block in blocks for pair in block]
    ratios: dict[str, Ratio | None] = {SPEED: _speed(arm, against)}
    for name, value in _VALUES.items():
        ratios[name] = paired_ratio(*zip(*(_sums(block, value) for block in blocks), strict=True)) if blocks else None
    return {
        "arm": arm.arm.name,
        "against": against.arm.name,
        "max_concurrency": arm.load.at_once,
        "request_rate": arm.load.rate if arm.load.rate is not None else "inf",
        "temperature": arm.temperature,
        "pairs": len(pairs),
        "identical_texts": sum(x.text == y.text for x, y in pairs),
        "ratios": {name: ratio.record() for name, ratio in ratios.items() if ratio is not None},
    }


_VALUES: Mapping[str, Callable[[RequestOutcome], float | None]] = {
    "mean_ttft_ms": lambda outcome: outcome.ttft,
    "mean_tpot_ms": lambda outcome: outcome.tpot,
    "mean_e2el_ms": lambda outcome: outcome.latency,
}


def _pairs(mine: Block, theirs: Block) -> list[tuple[RequestOutcome, RequestOutcome]]:
    """Outcomes of the same prompt in the same block, if both are good."""
    other = {id(outcome.prompt): outcome for outcome in theirs.outcomes if outcome.good}
    return [
        (outcome, other[id(outcome.prompt)])
        for outcome in mine.outcomes
        if outcome.good and id(outcome.prompt) in other
    ]


def _sums(
    pairs: Sequence[tuple[RequestOutcome, RequestOutcome]], value: Callable[[RequestOutcome], float | None]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Sum and number of the values of a block, for each arm."""
    kept = [(a, b) for a, b in ((value(x), value(y)) for x, y in pairs) if a is not None and b is not None]
    return (sum(a for a, _ in kept), len(kept)), (sum(b for _, b in kept), len(kept))


def _speed(arm: LoadRun, against: LoadRun) -> Ratio | None:
    blocks = [
        [(sum(o.output_tokens for o in block.outcomes if o.good), block.seconds) for block in run.blocks]
        for run in (arm, against)
    ]
    whole = min(map(len, blocks))
    return paired_ratio(blocks[0][:whole], blocks[1][:whole])
