"""One run of a program: its thread, its calls, its limits, and its end.

The body of the program is ordinary Python on a thread of the run. A call begins as soon as the call before it in the
same text has ended, so everything that is ready runs in one batch. Whatever happens, a run ends once: then none of its
calls is open, its thread has ended, and its backend is closed.

A run is stopped by `Stopped`, which is raised where the body waits for a call or makes one. It is no `Exception`, so
that a program which catches all errors stops, too. A body that computes for ever gets it between two instructions.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from paceline.errors import InvalidRequest, ProgramError
from paceline.program.call import Call
from paceline.program.expressions import Gen, Select
from paceline.program.prompt import Text
from paceline.program.sites import calling_site, failing_site

GRACE_SECONDS = 2.0  # time for a stopped body to end by itself; then it is interrupted, or given up
SAMPLE_SECONDS = 0.1  # time over which a stopped body is watched for whether it computes
MAX_NESTED = 32  # runs inside runs
SEED_BITS = 53  # any JSON reader keeps such an integer

current: ContextVar[Run | None] = ContextVar("current", default=None)  # the run whose body this is


class Stopped(BaseException):
    """The run was stopped."""


class Backend(Protocol):
    """Runs calls: an engine in this process, or a server."""

    def open(self) -> None:
        """Prepare for a run. Every `open` is followed by one `close`."""

    def close(self) -> None: ...

    def submit(self, call: Call) -> None:
        """Begin a call, from any thread; return at once. The call ends by `end_gen`, `end_select` or `fail`."""

    def cancel(self, call: Call) -> None:
        """Free whatever a call that has ended still holds."""


class Run:
    def __init__(
        self,
        program: str,
        backend: Backend,
        *,
        file: str,
        seed: int | None,
        max_calls: int,
        timeout: float | None,
        cache_salt: str | None = None,
    ) -> None:
        """`file`: path of the program's source. `cache_salt`: None for that of the run around it."""
        self.program, self.backend, self.max_calls = program, backend, max_calls
        self.parent = current.get()
        self.cache_salt: str = (
            ("" if self.parent is None else self.parent.cache_salt) if cache_salt is None else cache_salt
        )
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.calls: list[Call] = []
        self.error: ProgramError | None = None
        self.began_at, self.ended_at = time.perf_counter(), 0.0
        self.changed = threading.Condition()  # notified of new variables, and of the end
        self.thread: threading.Thread | None = None
        self._file = file
        self._timeout = timeout
        self._children: list[Run] = []
        self._stopped: ProgramError | None = None
        self._done = threading.Event()
        self._cpu_clock: int | None = None  # clock of the body's processor time
        self._opened = False  # the backend is
        self._ending = False  # whoever comes first ends the run
        self._lock = threading.RLock()
        self._timers: list[threading.Timer] = []
        self._last: list[Callable[[], None]] = []  # called at the end
        self._depth: int = 0 if self.parent is None else self.parent._depth + 1
        if self._depth > MAX_NESTED:
            raise InvalidRequest(f"runs of programs are nested deeper than {MAX_NESTED}: does one run itself for ever?")

    def start(self, body: Callable[[], None]) -> None:
        """Begin; if that is interrupted, the run has ended."""
        with self.stopped_by_errors():
            self.backend.open()
            self._opened = True
            if self.parent is not None:
                self.parent.adopt(self)
            if self._timeout is not None:
                reason = f"it did not end within its timeout of {self._timeout:g} s"
                self._after(self._timeout, lambda: self.stop(reason))
            self.thread = threading.Thread(target=self._main, args=(body,), name=f"program {self.program}", daemon=True)
            self.thread.start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for the end; if the waiting is interrupted, the run has ended, too."""
        with self.stopped_by_errors():
            self._done.wait()

    @contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """Stop the run if the block is left by an error, such as Ctrl-C, and wait for its end."""
        try:
            yield
        except BaseException:
            self.stop("it was interrupted")
            self._done.wait()
            raise

    def when_done(self, then: Callable[[], None]) -> None:
        with self._lock:
            if not self.done:
                self._last.append(then)
                return
        then()

    def call(self, ask: Gen | Select, text: Text, *, program: str) -> Call:
        """Make a call behind a text, and begin it if nothing before it is open."""
        with self._lock:
            self.check_going()
            if len(self.calls) >= self.max_calls:
                self.stop(f"it made {self.max_calls} calls, as many as max_calls allows: raise that, or end its loops")
                raise Stopped
            path, before = text.next_path(), None if text.end is None else text.end.call
            given = ask.sampling.get("seed") if isinstance(ask, Gen) else 0
            seed = derived_seed(self.seed, path) if given is None else given
            call = Call(ask, path, seed, calling_site(program), text.end, self.cache_salt)
            self.calls.append(call)
        if before is None:
            self._begin(call)
        else:
            before.when_ended(lambda: self._begin(call))
        return call

    def check_going(self) -> None:
        """Raise if the run has ended or is stopped."""
        if self._stopped is not None and not self.done:
            raise Stopped
        if self.done:
            raise InvalidRequest(f"the program {self.program} has ended: its state can be read, but not extended")

    def stop(self, reason: str) -> None:
        """End the run soon: abort its calls and stop its body. Returns at once; a second call changes nothing."""
        with self._lock:
            if self._stopped is not None or self.done:
                return
            self._stopped = ProgramError(reason, program=self.program)
            children = [*self._children]
        for child in children:
            child.stop(f"the program {self.program} that runs it was stopped")
        self._abort_calls()
        if self.thread is None or self.thread.ident is None:  # nothing runs that could end by itself
            self._end(None)
        self._after(GRACE_SECONDS, self._interrupt)
        self._after(2 * GRACE_SECONDS, self._give_up)

    def adopt(self, child: Run) -> None:
        """Stop `child` when this run stops."""
        with self._lock:
            self._children.append(child)
            stopped = self._stopped
        child.when_done(lambda: self._children.remove(child))
        if stopped is not None:
            child.stop(f"the program {self.program} that runs it was stopped")

    def _begin(self, call: Call) -> None:
        if not call.ended:
            call.begun_at = time.perf_counter()
            self.backend.submit(call)

    def _main(self, body: Callable[[], None]) -> None:
        current.set(self)
        if hasattr(time, "pthread_getcpuclockid"):
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        error: ProgramError | None = None
        try:
            body()
            self._settle()
        except Stopped:
            pass
        except BaseException as raised:  # any error of a user's code ends this run alone
            error = failing_site(raised, program=self.program, file=self._file)
        self._end(error)

    def _settle(self) -> None:
        """Wait for all calls. Raises an error that the body has not met; one that it has met, it has handled."""
        for call in self.calls:
            call.join()
        handled = {id(call.error) for call in self.calls if call.told}  # calls behind one that failed have its error
        for call in self.calls:
            if call.error is not None and id(call.error) not in handled:
                raise call.error

    def _end(self, error: ProgramError | None) -> None:
        with self._lock:
            if self._ending:
                return
            self._ending = True
            self.error = self._stopped or error
            self._stopped = self._stopped or error  # a call that is being made now is too late
            for timer in self._timers:
                timer.cancel()
        self._abort_calls()
        if self._opened:
            self.backend.close()
        with self._lock:
            self.ended_at = time.perf_counter()
            self._done.set()
            last = [*self._last]
        with self.changed:
            self.changed.notify_all()
        for then in last:
            then()

    def _abort_calls(self) -> None:
        for call in reversed(self.calls):  # the last first: the end of one begins the next
            if not call.ended:
                call.fail(Stopped())
                self.backend.cancel(call)

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, then)
        timer.daemon = True
        with self._lock:
            if self.done:
                return
            self._timers.append(timer)
            timer.start()

    def _interrupt(self) -> None:
        """Raise Stopped in a body that computes without a call. One that waits in code outside of Python would not get
        it, and while it waits, other threads that are traced can hang (seen on Python 3.11)."""
        if self.thread is not None and self._computes() and not self.done:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(Stopped)
            )

    def _computes(self) -> bool:
        """Return whether the body uses a core. False where a thread's time cannot be asked for."""
        if self._cpu_clock is None:
            return False
        try:
            before = time.clock_gettime(self._cpu_clock)
            time.sleep(SAMPLE_SECONDS)
            return time.clock_gettime(self._cpu_clock) - before > SAMPLE_SECONDS / 100
        except OSError:  # the thread has ended
            return False

    def _give_up(self) -> None:
        """End the run without its thread, which some code outside of Python keeps."""
        if self.done:
            return
        reason = str(self._stopped).partition(": ")[2]
        self._stopped = ProgramError(
            f"{reason}; its thread still runs: code of it does not return", program=self.program
        )
        self._end(None)


def derived_seed(seed: int, path: str) -> int:
    """Make the seed of a call from that of its run and from its place in the run."""
    digest = hashlib.blake2b(f"{seed}{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - SEED_BITS)
