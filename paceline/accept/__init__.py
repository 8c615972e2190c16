"""Acceptance rules: what verification does with a draft.

A package that brings a rule of its own needs these names alone; see docs/rules.md.
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
