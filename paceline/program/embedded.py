"""The backend of an LLM in this process. All programs that run on an LLM at the same time share one session."""

from __future__ import annotations

import threading

from paceline.llm import LLM
from paceline.program.call import Call
from paceline.program.session import Session

_sessions: dict[LLM, Session] = {}  # of LLMs on which programs run
_lock = threading.Lock()


class Embedded:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def open(self) -> None:
        with _lock:
            if self._llm not in _sessions:
                _sessions[self._llm] = Session(self._llm)
            _sessions[self._llm].users += 1

    def close(self) -> None:
        with _lock:
            session = _sessions[self._llm]
            session.users -= 1
            if not session.users:
                session.end()  # before another can begin: one thread at a time steps the engine
                del _sessions[self._llm]

    def submit(self, call: Call) -> None:
        if (session := _sessions.get(self._llm)) is not None:  # None: the call has ended with its run
            session.submit(call)

    def cancel(self, call: Call) -> None:
        if (session := _sessions.get(self._llm)) is not None:
            session.cancel(call)
