"""Places in a program's source: the line of a call, and the line at which Python code failed."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, ProgramError

HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a program. `program` is its name, with the programs that called it."""

    program: str
    file: str
    line: int

    def located(self, error: BaseException) -> ProgramError:
        """Return the error with this line; one that has a line keeps it."""
        return error if isinstance(error, ProgramError) else _caused(error, self.program, self.file, self.line)


def calling_site(program: str) -> Site:
    """Return the line outside of this package that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return Site(program, Path(frame.f_code.co_filename).name, frame.f_lineno)


def failing_site(error: BaseException, *, program: str, file: str) -> ProgramError:
    """Return the error with the last line of `file` that it passed."""
    if isinstance(error, ProgramError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames[-1:]
    line = own[-1].lineno if own else None
    return _caused(error, program, Path(file).name if own else None, line)


def _caused(error: BaseException, program: str, file: str | None, line: int | None) -> ProgramError:
    kind = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
    made = ProgramError(f"{kind}{error}", program=program, file=file, line=line)
    made.__cause__ = error
    return made
