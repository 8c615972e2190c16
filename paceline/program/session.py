"""Threads that run calls on an LLM, while at least one program does:

    threads of programs      encoding thread            engine thread
    submit ── call ───────▶ │ prompt, tokens, │ ─order─▶ │ hold, submit, │
    Call.wait ◀──────────── text of events ───────────── │ step, step, … │

Meanwhile the LLM takes no requests of its own. A request whose beginning another one is reading is held until that has
been read (see prefixes.py). A call that has ended holds nothing: its requests are aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from paceline.engine.engine import Engine
from paceline.engine.thread import EngineThread
from paceline.errors import EngineDead, InvalidRequest, PacelineError
from paceline.llm import LLM
from paceline.program.call import Call
from paceline.program.expressions import Gen
from paceline.program.job import Job
from paceline.program.prefixes import Prefixes, page_keys
from paceline.program.prompt import Prompt
from paceline.program.selection import prefix_length
from paceline.types import OFF, Request, SamplingParams, TokenEvent

SCORING = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)  # of an option
Held = tuple[Request, list[int]]  # a request, and the keys of its pages


class Session:
    def __init__(self, llm: LLM) -> None:
        if llm.engine.has_work:
            raise InvalidRequest("the LLM has open streams: read them to their end or close them before a program runs")
        self.users = 0
        self._llm = llm
        self._jobs: dict[Call, Job] = {}
        self._dead: PacelineError | None = None  # why no call can be run any more
        self._lock = threading.Lock()  # of the jobs, and of their end
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoding")
        self._thread = EngineThread(llm.engine, deliver=self._deliver)
        # On the engine's thread.
        self._owners: dict[str, Job] = {}  # by request
        self._held: dict[str, list[Held]] = {}  # request that reads → those that wait for it
        self._prefixes = Prefixes()
        llm.stepped_by = "programs"
        self._thread.start()

    def end(self) -> None:
        """End both threads. All calls have ended."""
        self._encoder.shutdown()
        self._thread.stop()
        self._thread.join()
        self._llm.stepped_by = None

    def submit(self, call: Call) -> None:
        self._encoder.submit(self._encode, call)

    def cancel(self, call: Call) -> None:
        with self._lock:
            job = self._jobs.pop(call, None)
            if job is not None:
                self._thread.order(lambda engine: self._abort(engine, job))

    # On the encoding thread.

    def _encode(self, call: Call) -> None:
        try:
            if call.ended:
                return
            requests = self._requests(call)
            for request in requests:
                self._llm.engine.validate(request)
            keys = [page_keys(request.prompt, salt=request.cache_salt) for request in requests]
        except BaseException as error:  # of any kind: nobody may wait for the call for ever
            call.fail(error)
            return
        job = Job(call, requests)
        with self._lock:
            if self._dead is None and not call.ended:
                self._jobs[call] = job
                self._thread.order(lambda engine: self._enter(engine, job, [*zip(requests, keys, strict=True)]))
        if self._dead is not None:
            call.fail(self._dead)

    def _requests(self, call: Call) -> list[Request]:
        ask, prompt, llm = call.ask, call.prompt, self._llm
        if isinstance(ask, Gen):
            sampling = replace(llm.default_sampling, **{**ask.sampling, "seed": call.seed})
            predicted = () if ask.prediction is None else tuple(llm.tokenizer.encode(ask.prediction, add_bos=False))
            request = llm.request(self._tokens(prompt), sampling, ask.speculation, predicted)
            return [replace(request, cache_salt=call.cache_salt)]
        texts = [self._tokens(prompt.followed_by(option)) for option in ask.options]
        first = prefix_length(self._tokens(prompt), texts)
        requests = [llm.request(tokens, SCORING, OFF) for tokens in texts]
        return [replace(request, scores_from=first, cache_salt=call.cache_salt) for request in requests]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.messages:
            return tuple(self._llm.chat_template.encode(prompt.messages, continuation=prompt.text))
        return self._llm.encode(prompt.text)

    # On the engine's thread.

    def _enter(self, engine: Engine, job: Job, requests: Sequence[Held]) -> None:
        self._owners |= {request.id: job for request, _ in requests}
        for request, keys in requests:
            self._begin(engine, request, keys)

    def _begin(self, engine: Engine, request: Request, keys: list[int]) -> None:
        """Submit a request, or hold it behind the one that reads its beginning."""
        leader = self._prefixes.leader(keys)
        if leader is not None:
            self._held.setdefault(leader, []).append((request, keys))
            return
        try:
            engine.submit(request, validated=True)
        except PacelineError as error:
            self._owners.pop(request.id).call.fail(error)
            return
        self._prefixes.begin(request.id, keys)

    def _abort(self, engine: Engine, job: Job) -> None:
        for request in job.requests:
            if self._owners.pop(request.id, None) is not None:
                engine.abort(request.id)

    def _deliver(self, events: list[TokenEvent], dead: str | None) -> None:
        for event in events:
            job = self._owners.get(event.request_id)
            if job is not None:
                job.take(event, dead=dead)
                if event.finish is not None:
                    del self._owners[event.request_id]
            if job is not None and job.call.ended:
                self._forget(job)
            self._release(event.request_id)
        if dead is not None:
            self._fail_all(EngineDead(f"the engine stopped after an error ({dead}); load the model anew"))

    def _release(self, request_id: str) -> None:
        """Begin the requests that waited for this one to read its prompt."""
        if self._prefixes.reads(request_id):
            self._prefixes.end(request_id)
            for request, keys in self._held.pop(request_id, ()):
                if request.id in self._owners:
                    self._begin(self._llm.engine, request, keys)

    def _forget(self, job: Job) -> None:
        with self._lock:
            self._jobs.pop(job.call, None)
        self._abort(self._llm.engine, job)  # other options, if one has failed

    def _fail_all(self, error: PacelineError) -> None:
        with self._lock:
            self._dead, calls = error, [*self._jobs]
            self._jobs.clear()
        self._owners.clear()
        self._held.clear()
        for call in calls:
            call.fail(error)
