"""A call of a program: one `gen` or `select`, from the line that asks for it to its value.

    made ─▶ waits for the call before it ─▶ submitted to the backend ─▶ pieces of text ─▶ ended: a value or an error

A call ends once, by whoever comes first: the backend, or the end of its run. Any thread may wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.llm import Sample
from paceline.program.expressions import Gen, Select
from paceline.program.prompt import Node, Prompt, prompt_of
from paceline.program.sites import Site


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call; of a select, over all its options."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Call:
    ask: Gen | Select
    path: str  # place in the run, such as "/0" or "/1.2/0": the third fork of the second child
    seed: int
    site: Site
    behind: Node | None  # the text before it
    cache_salt: str = ""  # prefixes are shared only within one salt
    made_at: float = field(default_factory=time.perf_counter)
    begun_at: float | None = None  # when the call before it had ended
    first_at: float | None = None  # when its first text came
    ended_at: float | None = None
    pieces: list[str] = field(default_factory=list)
    sample: Sample | None = None  # of a gen that has ended
    scores: Mapping[str, float] = field(default_factory=dict)  # of a select that has ended, by option
    usage: Usage = field(default_factory=Usage)
    error: BaseException | None = None
    told: bool = False  # the program has met the error, and may have handled it
    _value: str | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watchers: list[Callable[[], None]] = field(default_factory=list)  # called with every piece, and at the end
    _last: list[Callable[[], None]] = field(default_factory=list)  # called once, at the end

    @property
    def name(self) -> str:
        return self.ask.name

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def value(self) -> str:
        assert self._value is not None, f"the call {self.name} has no value yet"
        return self._value

    @property
    def prompt(self) -> Prompt:
        """The prompt of the call, once the calls before it have ended. Raises the error of one that failed."""
        if self.behind is not None and self.behind.call is not None and self.behind.call.error is not None:
            raise self.behind.call.error
        return prompt_of(self.behind)

    def wait(self) -> str:
        """Return the value; raise the error of the call, or of the run that stopped it."""
        self.join()
        if self.error is not None:
            self.told = True
            raise self.error
        return self.value

    def join(self) -> None:
        """Wait for the end, whatever it is."""
        self._ended.wait()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have `watcher` called with every piece and at the end, and once now."""
        with self._lock:
            self._watchers.append(watcher)
        watcher()

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` at the end; at once if that has been."""
        with self._lock:
            if not self.ended:
                self._last.append(then)
                return
        then()

    # For backends.

    def add(self, piece: str) -> None:
        if piece and not self.ended:
            self.first_at = self.first_at or time.perf_counter()
            self.pieces.append(piece)
            for watcher in self._watchers:
                watcher()

    def end_gen(self, sample: Sample, usage: Usage) -> None:
        self._end(value=sample.text, sample=sample, usage=usage)

    def end_select(self, scores: Mapping[str, float], usage: Usage) -> None:
        """End with the likeliest option; of several, with the first."""
        best = max(scores, key=scores.__getitem__)
        self.add(best)
        self._end(value=best, scores=scores, usage=usage)

    def fail(self, error: BaseException) -> None:
        """End with an error. One of Paceline's gets the line of the call."""
        self._end(error=self.site.located(error) if isinstance(error, PacelineError) else error)

    def _end(
        self,
        *,
        value: str | None = None,
        sample: Sample | None = None,
        scores: Mapping[str, float] | None = None,
        usage: Usage | None = None,
        error: BaseException | None = None,
    ) -> None:
        with self._lock:
            if self.ended:
                return
            self._value, self.sample, self.error = value, sample, error
            self.scores, self.usage, self.ended_at = scores or {}, usage or self.usage, time.perf_counter()
            self._ended.set()
            last = [*self._watchers, *self._last]
            self._last.clear()
        for then in last:
            then()
