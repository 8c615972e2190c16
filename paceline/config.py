"""Options of the engine, as one frozen record. An unknown option raises an error that says what was probably meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from paceline.checks import check_flag, check_integer, check_known, check_number, checked_tuple
from paceline.errors import InvalidRequest, UnknownOption

MAX_INTEGER = 1 << 62  # largest value of options without a limit of their own
KV_FORMATS = ("auto", "bf16", "fp8")
# Defaults that differ on a GPU, which computes more rows in the same time. Steps drawn to run plain have not been timed
# on one: after each run of them a draft model has to catch up.
GPU = {
    "max_step_tokens": 8192,
    "max_prompt_seconds": 0.05,
    "max_draft_tokens": 512,
    "measure_speedup": False,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits that a user can set. `None`: Paceline chooses by model and machine, and says at start what it chose."""

    max_sequences: int = 64  # sequences that run at once
    max_step_tokens: int = 256  # rows of one forward pass, shared by decoding, drafts and prefill chunks
    max_prompt_seconds: float = 0.0  # time for prompts in a step in which other sequences decode; 0: no limit
    max_context: int | None = None  # tokens of a sequence; None: the model's limit, as far as memory allows
    kv_memory: int | None = None  # bytes for keys and values
    kv_format: str = "auto"  # format of keys and values on a GPU: bf16 or fp8; auto: bf16
    tensor_parallel: int = 1  # processes that the target is split over, each with a part of weights and KV memory
    drafter_tensor_parallel: int = 1  # of them that draft models are split over: 1, or all
    same_bits_across_degrees: bool = False  # the same bits at every tensor_parallel, for a sum in more parts
    rank_timeout: float = 8.0  # seconds that one of these processes may keep the others waiting
    prefix_cache: bool = True  # share the pages of equal beginnings
    # Speculation. The governor keeps these limits, and drafts less where its measurements say so.
    default_drafter: str | None = None  # drafter of requests that name none; None: the portfolio, else the first one
    measure_cost: bool = True  # draft no token that costs more time than it saves
    max_draft: int = 16  # tokens of a sequence's longest draft; a drafter may have a lower limit of its own
    max_draft_tokens: int = 128  # drafted tokens of a step, over all sequences
    max_draft_batch: int | None = None  # running sequences above which nothing is drafted; None: no limit
    max_draft_context: int = 1 << 20  # tokens of a sequence above which it drafts no more
    min_acceptance: float = 0.1  # share of accepted tokens below which a sequence pauses drafting
    acceptance_window: int = 48  # drafted tokens over which the accepted share is taken
    pause_tokens: int = 32  # tokens of the first pause; each pause doubles while drafts stay bad
    corpus: tuple[str, ...] = ()  # paths of text files from which drafters that read them draft, too
    drafter_timeout: float = 2.0  # seconds that a drafter which is not inline may take for a draft
    measure_speedup: bool = True  # draw about 1 % of steps to run plain, which measures what speculation brings
    # For measurements.
    fixed_draft: bool = False  # every draft is as long as the limits allow, at any cost and acceptance
    synthetic_acceptance: float = 0.0  # above 0, on a device: a coin accepts each drafted token, and texts are void

    @classmethod
    def of(cls, *, device: str = "cpu", **options: Any) -> Self:
        """Make one from options, with the defaults of a device; a misspelt option says what was probably meant."""
        check_known(cls, options, kind="engine option")
        return cls(**(options if device == "cpu" else GPU | options))

    @property
    def is_split(self) -> bool:
        """Whether the target runs in shards, on one rank or several."""
        return self.tensor_parallel > 1 or self.same_bits_across_degrees

    def __post_init__(self) -> None:
        for name in (
            "max_sequences",
            "max_step_tokens",
            "max_draft",
            "acceptance_window",
            "pause_tokens",
            "tensor_parallel",
            "drafter_tensor_parallel",
        ):
            check_integer(name, getattr(self, name), 1, MAX_INTEGER)
        for name in ("max_draft_tokens", "max_draft_context"):
            check_integer(name, getattr(self, name), 0, MAX_INTEGER)
        for name, least in (("max_context", 2), ("kv_memory", 1), ("max_draft_batch", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least, MAX_INTEGER)
        check_number("min_acceptance", self.min_acceptance, 0, 1)
        check_number("synthetic_acceptance", self.synthetic_acceptance, 0, 1)
        check_number("max_prompt_seconds", self.max_prompt_seconds, 0, 1e9)
        check_number("drafter_timeout", self.drafter_timeout, 0, 1e9, open_low=True)
        check_number("rank_timeout", self.rank_timeout, 0, 1e6, open_low=True)
        object.__setattr__(self, "corpus", checked_tuple("corpus", self.corpus))
        for path in self.corpus:
            if not isinstance(path, str):
                raise InvalidRequest(f"corpus must be a list of paths, not of {path!r}", param="corpus")
        if self.drafter_tensor_parallel not in (1, self.tensor_parallel):
            possible = f"1 or {self.tensor_parallel}" if self.tensor_parallel > 1 else "1"
            raise InvalidRequest(
                f"drafter_tensor_parallel {self.drafter_tensor_parallel}: a drafter runs on rank 0 alone or on all "
                f"{self.tensor_parallel} ranks of tensor_parallel; take {possible}",
                param="drafter_tensor_parallel",
            )
        if self.kv_format not in KV_FORMATS:
            raise UnknownOption("kv_format", self.kv_format, KV_FORMATS)
        if self.default_drafter is not None and not isinstance(self.default_drafter, str):
            raise InvalidRequest(f"default_drafter must be a name, not {self.default_drafter!r}")
        check_flag("prefix_cache", self.prefix_cache)
        check_flag("same_bits_across_degrees", self.same_bits_across_degrees)
        check_flag("measure_cost", self.measure_cost)
        check_flag("measure_speedup", self.measure_speedup)
        check_flag("fixed_draft", self.fixed_draft)
