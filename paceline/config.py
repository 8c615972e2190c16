"""Options of the engine. One frozen record; an unknown option is an error that says what was probably meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from paceline.checks import check_flag, check_integer, check_known, check_number
from paceline.errors import UnknownOption

MOST = 1 << 62
KV_FORMATS = ("auto", "bf16", "fp8")
GPU = {"max_step_tokens": 4096, "max_draft_tokens": 512, "max_draft_batch": 256}  # it has room for more at once


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits a user can set. `None` means: chosen from the model and the machine, and said at start."""

    max_sequences: int = 64  # running at once
    max_step_tokens: int = 256  # rows of one forward pass: drafts and prefill chunks share it
    max_context: int | None = None  # tokens a sequence; None: the model's, as far as memory allows
    kv_memory: int | None = None  # bytes for keys and values
    kv_format: str = "auto"  # of keys and values on a GPU: bf16 or fp8; auto: bf16
    prefix_cache: bool = True
    # Speculation. The governor applies these, and what it measures.
    measure_cost: bool = True  # draft no token that costs more time than it saves
    max_draft: int = 16  # longest draft of a sequence; a drafter may have a lower limit of its own
    max_draft_tokens: int = 128  # drafted tokens a step, over all sequences
    max_draft_batch: int = 2  # no speculation with more sequences running: a CPU of two cores is busy without it
    max_draft_context: int = 1 << 20  # no speculation beyond this many tokens
    min_acceptance: float = 0.1  # below it a sequence pauses drafting
    acceptance_window: int = 48  # drafted tokens before that is judged
    pause_tokens: int = 32  # length of the first pause; doubles while drafts stay bad
    drafter_timeout: float = 2.0  # seconds a foreign drafter may think
    # For measurements.
    fixed_draft: bool = False  # no pace, no pauses, no cost: every draft as long as the limits above allow
    synthetic_acceptance: float = 0.0  # above 0, where a device runs rounds: a coin decides on each drafted token

    @classmethod
    def of(cls, *, device: str = "cpu", **options: Any) -> Self:
        """As the constructor, with the defaults of a device; a misspelt option says what was probably meant."""
        check_known(cls, options, kind="engine option")
        return cls(**(options if device == "cpu" else GPU | options))

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_step_tokens", "max_draft", "acceptance_window", "pause_tokens"):
            check_integer(name, getattr(self, name), 1, MOST)
        for name in ("max_draft_tokens", "max_draft_batch", "max_draft_context"):
            check_integer(name, getattr(self, name), 0, MOST)
        for name, least in (("max_context", 2), ("kv_memory", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least, MOST)
        check_number("min_acceptance", self.min_acceptance, 0, 1)
        check_number("synthetic_acceptance", self.synthetic_acceptance, 0, 1)
        check_number("drafter_timeout", self.drafter_timeout, 0, 1e9, open_low=True)
        if self.kv_format not in KV_FORMATS:
            raise UnknownOption("kv_format", self.kv_format, KV_FORMATS)
        check_flag("prefix_cache", self.prefix_cache)
        check_flag("measure_cost", self.measure_cost)
        check_flag("fixed_draft", self.fixed_draft)
