"""Compare servers: send the same requests to each, and tell whether they answer with the same text.

Every prompt is asked with every variant's sampling parameters and a fixed seed, so that servers of one configuration
must agree token by token, and in every bit of the log-probabilities where these are asked for. Behind an address may be
many replicas: each repeat has a session of its own, which a cluster routes to any of them, and answers that name their
replica are counted by it. Nothing is judged here but equality.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.audit.cases import Variant
from paceline.bench.client import Client, error_text
from paceline.prompts.files import Prompt

if TYPE_CHECKING:
    import httpx

SENT = (  # parameters of a variant, which every request names: servers may differ in defaults
    "temperature",
    "max_tokens",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
AROUND = 30  # characters that are shown on each side of a difference


@dataclass(frozen=True, slots=True)
class Case:
    """One request, which every server gets."""

    prompt: Prompt
    variant: Variant
    seed: int
    scored: bool = False  # log-probabilities are asked for, and compared

    @property
    def name(self) -> str:
        return f"{self.prompt.id}, {self.variant.name}, seed {self.seed}"

    def request(self) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        sampling = self.variant.sampling
        fields = {name: getattr(sampling, name) for name in SENT} | {"seed": self.seed, "return_token_ids": True}
        if self.prompt.tokens:
            scores: dict[str, Any] = {"logprobs": 0} if self.scored else {}
            return "/v1/completions", {"prompt": list(self.prompt.tokens), **fields, **scores}
        scores = {"logprobs": True} if self.scored else {}
        return "/v1/chat/completions", {"messages": [dict(each) for each in self.prompt.messages], **fields, **scores}


@dataclass(frozen=True, slots=True)
class Said:
    """The answer of a server to a case."""

    case: int  # index of the case
    url: str
    replica: str | None = None  # which one answered, if the server says so
    text: str = ""
    tokens: tuple[int, ...] | None = None  # None: the server does not tell
    scores: tuple[float | None, ...] = ()  # log-probability of each token, if they were asked for
    finish: str | None = None
    error: str | None = None

    @property
    def who(self) -> str:
        return self.url if self.replica is None else f"{self.url} (replica {self.replica})"


@dataclass(frozen=True, slots=True)
class Difference:
    case: Case
    first: Said
    other: Said

    @property
    def place(self) -> int:
        """The first character at which the texts differ."""
        pairs = enumerate(itertools.zip_longest(self.first.text, self.other.text))
        return next((i for i, (a, b) in pairs if a != b), len(self.first.text))

    def show(self) -> str:
        if _outcome(self.first) == _outcome(self.other) and _same_tokens(self.first, self.other):
            return self._show_scores()
        start, end = max(0, self.place - AROUND), self.place + AROUND
        lines = [f"{said.who}: …{said.text[start:end]!r}… {said.finish}" for said in (self.first, self.other)]
        return "\n    ".join([f"{self.case.name}, from character {self.place} on", *lines])

    def _show_scores(self) -> str:
        """Show the first log-probability that differs, of equal texts."""
        pairs = [*itertools.zip_longest(self.first.scores, self.other.scores)]
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        both = zip((self.first, self.other), pairs[place], strict=True)
        lines = [f"{said.who}: {score}" for said, score in both]
        return "\n    ".join([f"{self.case.name}, log-probability of token {place}", *lines])


@dataclass(slots=True)
class Compared:
    """Every answer so far. Complete once all cases have one from every server and repeat."""

    cases: Sequence[Case]
    answers: list[Said] = field(default_factory=list)
    asked: int = 0
    interrupted: bool = False

    @property
    def failures(self) -> list[Said]:
        return [said for said in self.answers if said.error is not None]

    @property
    def differences(self) -> list[Difference]:
        """Answers that are not those of the first server, the earliest case first."""
        good = [said for said in self.answers if said.error is None]
        by_case = {i: [said for said in good if said.case == i] for i in range(len(self.cases))}
        return [
            Difference(self.cases[i], said[0], other)
            for i, said in by_case.items()
            for other in said[1:]
            if _outcome(other) != _outcome(said[0])
            or not _same_tokens(said[0], other)
            or other.scores != said[0].scores
        ]

    @property
    def scored(self) -> bool:
        return all(case.scored for case in self.cases)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.differences

    def replicas(self, url: str) -> set[str]:
        return {said.replica for said in self.answers if said.url == url and said.replica is not None}


def _outcome(said: Said) -> tuple[str, str | None]:
    return said.text, said.finish


def _same_tokens(first: Said, other: Said) -> bool:
    return first.tokens is None or other.tokens is None or first.tokens == other.tokens


def cases(prompts: Sequence[Prompt], variants: Sequence[Variant], *, seed: int, scored: bool = False) -> list[Case]:
    return [Case(prompt, variant, seed + i, scored) for i, prompt in enumerate(prompts) for variant in variants]


async def compare(
    urls: Sequence[str],
    cases: Sequence[Case],
    *,
    repeats: int = 1,
    at_once: int = 8,
    key: str | None = None,
    said: Callable[[], None] = lambda: None,
    connect: Callable[..., Client] = Client,
) -> Compared:
    """Ask every server every case, `repeats` times. `said` is called after each answer. Raises if a server is away."""
    found = Compared(cases)
    clients = {url: connect(url, key=key) for url in urls}
    places = asyncio.Semaphore(at_once)
    try:
        for client in clients.values():
            await client.first_model()

        async def ask(case: int, url: str, repeat: int) -> None:
            async with places:
                found.answers.append(await _ask(clients[url], url, case, cases[case], repeat))
            said()

        work = [asyncio.create_task(ask(*each)) for each in _asked(urls, len(cases), repeats)]
        found.asked = len(work)
        await _all(work, found)
    finally:
        for client in clients.values():
            await client.http.aclose()
    found.answers.sort(key=lambda each: (each.case, urls.index(each.url)))
    return found


def _asked(urls: Sequence[str], cases: int, repeats: int) -> Iterator[tuple[int, str, int]]:
    return itertools.product(range(cases), urls, range(repeats))


async def _all(work: list[asyncio.Task[None]], found: Compared) -> None:
    """Wait for all answers. An interruption keeps those that are there."""
    try:
        await asyncio.gather(*work)
    except (asyncio.CancelledError, KeyboardInterrupt):
        found.interrupted = True
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def _ask(client: Client, url: str, index: int, case: Case, repeat: int) -> Said:
    path, body = case.request()
    try:
        answer = await client.http.post(path, json=body, headers={"x-session-id": f"audit-{index}-{repeat}"})
    except client.errors as error:
        return Said(index, url, error=str(error) or type(error).__name__)
    replica = answer.headers.get("x-paceline-replica")
    if answer.status_code != 200:
        return Said(index, url, replica, error=f"{answer.status_code}: {error_text(answer.content)}")
    return _read(answer, index, url, replica, scored=case.scored)


def _read(answer: httpx.Response, index: int, url: str, replica: str | None, *, scored: bool) -> Said:
    try:
        [choice] = answer.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        scores = _scores(choice) if scored else ()
    except (ValueError, LookupError, TypeError):
        wanted = "OpenAI's form" + (" with log-probabilities" if scored else "")
        return Said(index, url, replica, error=f"no answer of {wanted}: {answer.text[:AROUND]!r}…")
    ids = choice.get("token_ids")
    tokens = None if ids is None else tuple(ids)
    return Said(index, url, replica, text or "", tokens, scores, choice.get("finish_reason"))


def _scores(choice: dict[str, Any]) -> tuple[float | None, ...]:
    """Read the log-probability of each token: of a completion, or of a chat."""
    found = choice["logprobs"]
    return tuple(found["token_logprobs"] if "text" in choice else (each["logprob"] for each in found["content"]))


def report(found: Compared, urls: Sequence[str]) -> str:
    """Say what was asked, who answered, and the first difference."""
    lines = [f"{len(found.cases)} requests to {len(urls)} servers: {len(found.answers)} of {found.asked} answers"]
    for url in urls:
        count = sum(said.url == url and said.error is None for said in found.answers)
        replicas = found.replicas(url)
        lines.append(f"  {url}: {count} answers" + (f" from {len(replicas)} replicas" if replicas else ""))
    differences, failures = found.differences, found.failures
    if failures:
        lines.append(f"{len(failures)} requests failed; the first, of {failures[0].who}: {failures[0].error}")
    if differences:
        lines.append(f"{len(differences)} answers differ; the first:\n    {differences[0].show()}")
    if found.passed:
        what = "the same text and log-probabilities" if found.scored else "the same text"
        lines.append(f"{what} everywhere" + (", as far as it was asked" if found.interrupted else ""))
    return "\n".join(lines)


def facts(found: Compared, urls: Sequence[str]) -> dict[str, Any]:
    """Return the findings as a record for programs."""
    return {
        "servers": {url: sorted(found.replicas(url)) for url in urls},
        "requests": len(found.cases),
        "answers": len(found.answers),
        "tokens": sum(len(said.tokens or ()) for said in found.answers),
        "logprobs": found.scored,
        "failed": [f"{said.who}: {said.error}" for said in found.failures],
        "differences": [each.show() for each in found.differences],
        "interrupted": found.interrupted,
        "passed": found.passed,
    }
