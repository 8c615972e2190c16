"""A simulated cluster by number of replicas, routing and speculation: one row for each, for people and as a record.

Times to the first token count from the arrival at the router. Tokens a second are those that came while requests
arrived: what comes after the last arrival does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paceline.checks import check_number
from paceline.errors import InvalidRequest, UnknownOption
from paceline.plan.cluster import Outcome, simulate
from paceline.plan.fleet import Plan
from paceline.plan.report import aligned
from paceline.plan.routing import ROUTINGS
from paceline.plan.service import Service, service_of
from paceline.plan.workload import Workload, draw

Record = dict[str, Any]
NO_ROUTER = "no limit: none was given (--router-rate)"
GIVEN_ROUTER = "as given by --router-rate, not measured"
Say = Callable[[str, int, int], None]  # name of a row, its requests, how many of them are done


@dataclass(frozen=True, slots=True)
class Study:
    """Clusters to be simulated."""

    replicas: tuple[int, ...]
    workload: Workload  # its rate is of the whole cluster, or of each replica
    rate_each: bool = False  # True: the rate is of each replica
    routings: tuple[str, ...] = ROUTINGS
    router_rate: float | None = None  # requests a second that the router takes; None: no limit

    def __post_init__(self) -> None:
        if self.router_rate is not None:
            check_number("router_rate", self.router_rate, 0, 1e9, open_low=True)
        for routing in self.routings:
            if routing not in ROUTINGS:
                raise UnknownOption("routing", routing, ROUTINGS)
        for count in self.replicas:
            self.of(count)  # a workload that is too large is an error before anything runs

    def of(self, replicas: int) -> Workload:
        rate = self.workload.rate * replicas if self.rate_each else self.workload.rate
        return replace(self.workload, rate=rate)


def rows(plan: Plan, study: Study, *, say: Say = lambda name, total, done: None) -> Iterator[Record]:
    """Simulate each cluster, and yield a row for each. With a known acceptance, plain and speculative."""
    check_study(plan, study)
    arms = (False, True) if plan.question.acceptance is not None else (False,)
    services = {speculation: service_of(plan, speculation=speculation) for speculation in arms}
    for count in study.replicas:
        workload = study.of(count)
        requests = draw(workload, longest=longest_request(plan))
        for routing in study.routings:
            for speculation in arms:
                name = f"{count} replicas, {routing}, {'speculation' if speculation else 'plain'}"
                outcome = simulate(
                    services[speculation],
                    requests,
                    replicas=count,
                    routing=routing,
                    router_rate=study.router_rate,
                    seed=workload.seed,
                    tick=partial(say, name, workload.count),
                )
                about = {"replicas": count, "routing": routing, "speculation": speculation}
                yield about | figures(outcome, workload, services[speculation], router_rate=study.router_rate)


def figures(outcome: Outcome, workload: Workload, service: Service, *, router_rate: float | None) -> Record:
    first, finish, due = (np.asarray(times) for times in (outcome.first, outcome.finish, outcome.requests.due))
    outputs = np.asarray(outcome.requests.outputs)
    several = outputs > 1
    gaps = (finish - first)[several] / (outputs[several] - 1)
    seconds, window = outcome.seconds, max(due[-1], 1 / workload.rate)
    return {
        "rate": workload.rate,
        "requests": len(due),
        "tok_s": float(_tokens_by(window, first, finish, outputs).sum() / window),
        "ttft_s": _percentiles(first - due),
        "tpot_s": _percentiles(gaps),
        "at_once": outcome.open_seconds / seconds / len(outcome.busy),  # requests of a replica, in the mean
        "utilisation": float(np.mean(outcome.busy)) / seconds,
        "router_load": None if router_rate is None else workload.rate / router_rate,  # 1: all that it takes
        "prefix_hits": outcome.hits / len(due) if workload.prefixes else None,
        "cut": outcome.requests.cut,
        "drain_s": float(seconds - due[-1]),
    }


def _tokens_by(window: float, first: Any, finish: Any, outputs: Any) -> Any:
    """Count the tokens of each request by then; between the first and the last they come evenly."""
    whole = np.maximum(finish - first, 1e-12)
    share = np.clip((window - first) / whole, 0, 1)
    return np.where(first <= window, 1 + share * (outputs - 1), 0)


def _percentiles(values: Any) -> dict[str, float | None]:
    if not len(values):
        return {"p50": None, "p99": None}
    low, high = np.percentile(values, (50, 99))
    return {"p50": float(low), "p99": float(high)}


def about(plan: Plan, study: Study) -> Record:
    """Facts that all rows share."""
    work = study.workload
    return {
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "lengths": work.lengths,
        "prefixes": work.prefixes,
        "prefix_tokens": work.prefix_tokens,
        "seconds": work.seconds,
        "seed": work.seed,
        "gpus_a_replica": plan.machine.place.ranks,
        "router_rate": study.router_rate,
        "router_source": NO_ROUTER if study.router_rate is None else GIVEN_ROUTER,
    }


HEADER = (
    "replicas",
    "routing",
    "drafts",
    "requests/s",
    "tok/s",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "at once",
    "busy",
)


def table(found: Sequence[Record]) -> list[str]:
    """Rows for people; times in milliseconds."""
    hits = any(row["prefix_hits"] is not None for row in found)
    return aligned([[*HEADER, *(["prefix hits"] if hits else [])], *(_cells(row, hits=hits) for row in found)])


def markdown(found: Sequence[Record]) -> list[str]:
    """Rows as a table of a page."""
    hits = any(row["prefix_hits"] is not None for row in found)
    header = [*HEADER, *(["prefix hits"] if hits else [])]
    lines = [header, ["---:", "---", "---", *["---:"] * (len(header) - 3)], *(_cells(row, hits=hits) for row in found)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _cells(row: Record, *, hits: bool) -> list[str]:
    times = [row[name][part] for name in ("ttft_s", "tpot_s") for part in ("p50", "p99")]
    cells = [str(row["replicas"]), row["routing"], "on" if row["speculation"] else "off"]
    cells += [f"{row['rate']:.0f}", f"{row['tok_s']:.0f}"]
    cells += ["" if value is None else f"{1e3 * value:.1f}" for value in times]
    cells += [f"{row['at_once']:.1f}", f"{row['utilisation']:.0%}"]
    return [*cells, f"{row['prefix_hits']:.0%}"] if hits else cells


def notes(plan: Plan, study: Study, found: Sequence[Record]) -> list[str]:
    work = study.workload
    lines = [
        f"simulated: {work.seconds:g} s of Poisson arrivals, prompts of {work.prompt_tokens} and answers of "
        f"{work.output_tokens} tokens in the mean ({work.lengths}), seed {work.seed}; times in milliseconds",
        "router: " + (NO_ROUTER if study.router_rate is None else f"{study.router_rate:g} requests/s, {GIVEN_ROUTER}"),
    ]
    over = sorted({row["replicas"] for row in found if (row["router_load"] or 0) >= 1})
    if over:
        lines.append(f"the router is the limit with {', '.join(map(str, over))} replicas: its queue grows without end")
    cut = max((row["cut"] for row in found), default=0)
    if cut:
        lines.append(f"up to {cut} requests had a prompt or an answer too long for a replica, which was cut")
    return lines


def check_study(plan: Plan, study: Study) -> None:
    """Raise InvalidRequest where a plan and its study contradict each other."""
    if "prefix" in study.routings and not study.workload.prefixes:
        raise InvalidRequest("--routing prefix needs prompts that share something: give --prefixes and --prefix-tokens")
    longest = longest_request(plan)
    mean = max(study.workload.prompt_tokens, study.workload.output_tokens)
    if mean > longest // 2:
        raise InvalidRequest(
            f"prompts or answers of {mean} tokens in the mean are too long for a replica that takes {longest} tokens "
            "of both together: take shorter ones, or more GPUs a replica"
        )


def longest_request(plan: Plan) -> int:
    """Return the tokens of prompt and answer that a replica takes at most."""
    return min(plan.memory.kv_tokens, plan.machine.target.config.max_context)
