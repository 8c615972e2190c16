"""Requests of a simulated cluster: arrivals, lengths and prefixes, from a rate and a seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from paceline.bench.arrivals import Load, times
from paceline.checks import check_integer, check_number
from paceline.errors import InvalidRequest, UnknownOption

Lengths = Literal["fixed", "geometric"]
MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of `seconds`, Poisson. With prefixes, each prompt begins with one of them, all equally often."""

    rate: float  # requests a second, of all replicas together
    seconds: float = 60.0
    prompt_tokens: int = 512  # in the mean, the prefix included
    output_tokens: int = 256  # in the mean
    lengths: Lengths = "geometric"
    prefixes: int = 0  # different ones; 0: prompts have nothing in common
    prefix_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 0, MAX_REQUESTS, open_low=True)
        check_number("seconds", self.seconds, 0, 1e6, open_low=True)
        check_integer("prompt_tokens", self.prompt_tokens, 1, MAX_TOKENS)
        check_integer("output_tokens", self.output_tokens, 1, MAX_TOKENS)
        check_integer("prefixes", self.prefixes, 0, MAX_REQUESTS)
        check_integer("prefix_tokens", self.prefix_tokens, 0, MAX_TOKENS)
        if self.lengths not in get_args(Lengths):
            raise UnknownOption("lengths", self.lengths, get_args(Lengths))
        if bool(self.prefixes) != bool(self.prefix_tokens):
            raise InvalidRequest(
                "--prefixes and --prefix-tokens belong together: how many there are, and how long each is"
            )
        if self.prefix_tokens >= self.prompt_tokens:
            raise InvalidRequest(
                f"--prefix-tokens {self.prefix_tokens} must be below --prompt-tokens {self.prompt_tokens}: a prompt "
                "has at least one token of its own"
            )
        if not 1 <= self.count <= MAX_REQUESTS:
            raise InvalidRequest(
                f"{self.rate:g} requests a second for {self.seconds:g} s are {self.count} requests; a simulation takes "
                f"1 to {MAX_REQUESTS}: change --rate or --seconds"
            )

    @property
    def count(self) -> int:
        return round(self.rate * self.seconds)


@dataclass(frozen=True, slots=True)
class Requests:
    """Entry i of each list is of request i, in the order of arrival."""

    due: list[float]  # seconds
    prompts: list[int]  # tokens
    outputs: list[int]  # tokens
    prefixes: list[int]  # number of the prefix; -1: none
    prefix_tokens: int
    cut: int = 0  # requests that were longer than a replica takes


def draw(workload: Workload, *, longest: int) -> Requests:
    """Draw the requests. Prompts and answers longer than half of `longest` tokens are cut there, and counted."""
    random, count, most = np.random.default_rng(workload.seed), workload.count, longest // 2
    if most <= workload.prefix_tokens:
        raise InvalidRequest(
            f"--prefix-tokens {workload.prefix_tokens} is too long: a replica takes prompts of {most} tokens at most"
        )
    due = list(times(Load(rate=workload.rate), count=count, arrivals="poisson", seed=workload.seed))
    own = workload.prompt_tokens - workload.prefix_tokens
    prompts = workload.prefix_tokens + _lengths(own, count, workload.lengths, random)
    outputs = _lengths(workload.output_tokens, count, workload.lengths, random)
    prefixes = random.integers(0, workload.prefixes, count) if workload.prefixes else np.full(count, -1)
    return Requests(
        due=due,
        prompts=np.minimum(prompts, most).tolist(),
        outputs=np.minimum(outputs, most).tolist(),
        prefixes=prefixes.tolist(),
        prefix_tokens=workload.prefix_tokens,
        cut=int(((prompts > most) | (outputs > most)).sum()),
    )


def _lengths(mean: int, count: int, kind: Lengths, random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.full(count, mean) if kind == "fixed" else random.geometric(1 / mean, count)
