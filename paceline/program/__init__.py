"""Programs: Python functions that write a text with a target, whose calls run in one batch.

    from paceline.program import gen, program, select

docs/programs.md has every construct. A program runs on an `LLM` or on a `Remote` server.
"""

from paceline.errors import ProgramError
from paceline.program.expressions import Expression, assistant, gen, select, system, user
from paceline.program.page import save_traces
from paceline.program.program import Program, program
from paceline.program.remote import Remote
from paceline.program.state import State

__all__ = [
    "Expression",
    "Program",
    "ProgramError",
    "Remote",
    "State",
    "assistant",
    "gen",
    "program",
    "save_traces",
    "select",
    "system",
    "user",
]
