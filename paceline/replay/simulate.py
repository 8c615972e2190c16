"""Replay a schedule in simulated time: the engine's own step, with a model and a drafter on paper.

Admission, prompt chunks, prefix cache, preemption and the governor are those of the engine, because they are the
engine. Only the clock, the forward pass and the drafts are made up. The server's `stream_interval` holds tokens back as
`server.bridge` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.bench.client import RequestOutcome
from paceline.bench.counters import SpecCounters
from paceline.bench.workloads import BenchPrompt
from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.engine import Engine
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead
from paceline.kv.cache import KVCache
from paceline.replay.arrivals import Arrival
from paceline.replay.drafts import Drafts
from paceline.replay.paper import DrafterTraits, PaperClock, PaperDrafter, PaperForward, Script, script
from paceline.replay.step_times import StepTimes
from paceline.runner.lanes import Lanes
from paceline.types import Request, SamplingParams, TokenEvent

Tick = Callable[[], None]  # called when an answer has ended


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to serve: the engine's limits, and the drafter."""

    name: str
    config: EngineConfig
    num_pages: int
    max_context: int
    times: StepTimes
    drafter: DrafterTraits | None = None  # None: plain
    drafts: Drafts | None = None
    stream_interval: float = 0.0  # seconds
    delivery: float = 0.0  # seconds that the server takes for a request beside the engine, before its first token
    seed: int = 0


@dataclass(slots=True)
class Run:
    """The outcome of a schedule under one setting; if it was interrupted, as far as it came."""

    name: str
    outcomes: list[RequestOutcome] = field(default_factory=list)
    seconds: float = 0.0  # from the first arrival to the last token
    stats: EngineStats | None = None
    counters: SpecCounters = field(default_factory=SpecCounters)
    interrupted: bool = False
    not_sent: int = 0


def simulate(setting: Setting, arrivals: Sequence[Arrival], *, tick: Tick = lambda: None) -> Run:
    """Replay the arrivals. An interrupt ends it early, and the run says so."""
    run = Run(setting.name)
    simulation = _Simulation(setting, arrivals, run, tick)
    try:
        simulation.run()
    except KeyboardInterrupt:
        run.interrupted = True
    run.not_sent = len(simulation.coming)
    run.stats = simulation.engine.stats
    run.seconds = simulation.clock.now
    return run


class _Simulation:
    def __init__(self, setting: Setting, arrivals: Sequence[Arrival], run: Run, tick: Tick) -> None:
        self.coming = deque(arrivals)
        self._setting = setting
        self._run = run
        self._tick = tick
        self._scripts: dict[int, Script] = {}
        self.clock = PaperClock()
        self.engine = self._engine()
        self._open: dict[str, RequestOutcome] = {}
        self._held: list[TokenEvent] = []
        self._posted = float("-inf")  # time of the latest call to the readers
        while self.engine.improve():  # as a server does before traffic comes
            pass
        self.clock.now = 0.0  # the first arrival is due; no other zero, or rounding could let an arrival never be due

    def run(self) -> None:
        while self.coming or self.engine.has_work:
            while self.coming and self.coming[0].due <= self.clock.now:
                self._submit(self.coming.popleft())
            if not self.engine.has_work:
                self.clock.now = self.coming[0].due
                continue
            events = self.engine.step()
            self._held += events
            self._count(events)
            if self.engine.dead is not None:
                raise EngineDead(f"the simulated engine stopped after an error ({self.engine.dead})")
            self._post()

    def _submit(self, arrival: Arrival) -> None:
        setting = self._setting
        self._scripts[arrival.number] = made = script(arrival, max_draft=setting.config.max_draft, seed=setting.seed)
        sampling = SamplingParams(temperature=0, max_tokens=arrival.answer.length, seed=arrival.number, ignore_eos=True)
        self._open[str(arrival.number)] = outcome = RequestOutcome(
            BenchPrompt(arrival.id, "", max_tokens=arrival.answer.length),
            started=arrival.due,
            prompt_tokens=arrival.request.length,
            counted=True,
        )
        self._run.outcomes.append(outcome)
        outcome.error = "not ended"
        self.engine.submit(Request(id=str(arrival.number), prompt=made.prompt, sampling=sampling))

    def _count(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.drafted:
                places = dict.fromkeys(range(event.accepted), 1.0)
                self._run.counters += SpecCounters(1, event.drafted, event.accepted, places)

    def _post(self) -> None:
        """Hand the events of the latest steps to the readers, unless the interval between two calls is not over."""
        now, held = self.clock.now, self._held
        ended = any(event.finish for event in held) or not self.engine.has_work
        if not held or not (ended or now - self._posted >= self._setting.stream_interval):
            return
        for identity in dict.fromkeys(event.request_id for event in held):
            self._hear([event for event in held if event.request_id == identity], self.clock.now)
        self._held, self._posted = [], now

    def _hear(self, events: Sequence[TokenEvent], now: float) -> None:
        """Take all events that reach one reader together: a chunk."""
        outcome = self._open[events[0].request_id]
        since, tokens = now - outcome.started + self._setting.delivery, sum(len(event.tokens) for event in events)
        if outcome.ttft:
            outcome.gaps.append(since - outcome.latency)
        else:
            outcome.ttft = since
        outcome.latency = since
        outcome.output_tokens += tokens
        last = events[-1]
        if last.finish is not None:
            outcome.finish, outcome.error = str(last.finish), None
            del self._open[last.request_id], self._scripts[int(last.request_id)]
            self._tick()

    def _engine(self) -> Engine:
        setting, config = self._setting, self._setting.config
        forward = PaperForward(self._scripts, num_pages=setting.num_pages, times=setting.times, clock=self.clock)
        guards = {}
        if setting.drafter is not None and setting.drafts is not None:
            drafter = PaperDrafter(setting.drafter, self._scripts, setting.drafts, setting.times, self.clock)
            guards[drafter.name] = Guard(drafter, vocab_size=forward.vocab_size, timeout=config.drafter_timeout)
        return Engine(
            forward,
            config=config,
            lanes=Lanes(count=config.max_sequences, max_context=setting.max_context, max_draft=config.max_draft),
            cache=KVCache(forward.kv, share_prefixes=config.prefix_cache),
            max_context=setting.max_context,
            drafters=guards,
            default_drafter=next(iter(guards), None),
            clock=self.clock,
        )
