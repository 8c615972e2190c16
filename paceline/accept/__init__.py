"""Acceptance rules decide how many tokens of a draft are accepted, and which token follows.

A package with a rule of its own needs only these names; see docs/rules.md.
"""

from paceline.accept.lossy import accept_likely
from paceline.accept.registry import register
from paceline.accept.rejection import accept_rejection
from paceline.accept.rows import Outcome, Rows, walk
from paceline.accept.rule import AcceptRule, Verification

__all__ = [
    "AcceptRule",
    "Outcome",
    "Rows",
    "Verification",
    "accept_likely",
    "accept_rejection",
    "register",
    "walk",
]
