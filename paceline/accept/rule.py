"""An acceptance rule as an object, for rules of other packages too: `AcceptRule`, and the `Verification` it judges.

A rule knows nothing of requests, queues or engines. It gets the rows of some drafts and the target's outputs for
them, and returns which rows are accepted and the token after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.accept.rows import Outcome, Rows


class Verification(Protocol):
    """Drafts of some sequences, and the target's outputs for them. Each property is computed on first use."""

    @property
    def rows(self) -> Rows:
        """The drafted tokens as a tree, with the parent of each row."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def targets(self) -> Tensor:
        """int64 [rows]: the token that the target itself draws after each row, with the noise of (seed, position)."""

    @property
    def p(self) -> Tensor:
        """[rows, vocab]: the distribution that the target draws from after each row; one-hot at temperature 0."""

    @property
    def likelihood(self) -> Tensor:
        """[rows, vocab]: the target's distribution like `p`, but at temperature 1 for a request of temperature 0."""

    @property
    def q(self) -> Tensor:
        """[rows, vocab]: the distribution that the drafter drew each row's token from; 0 at roots.

        Only for rules with `wants_probs`; their drafts are chains."""

    @property
    def confidence(self) -> Tensor:
        """float32 [rows]: how sure the drafter is of each row's token, if all before it are right; 0.5 where it does
        not say. Only Paceline's own rule "confidence" makes drafters say it."""

    @property
    def coins(self) -> Tensor:
        """float64 [rows]: uniform in (0, 1), keyed by the position of each row's token. A rule must use no coin
        beyond the first token that it rejects: the next round uses those again."""

    @property
    def round_coins(self) -> Tensor:
        """float64 [rows]: uniform in (0, 1), not used by any other round, for a rule that looks at all of them."""

    @property
    def noise(self) -> Tensor:
        """float32 [seqs, vocab]: Gumbel noise for the one token that follows the last accepted row."""

    @property
    def thresholds(self) -> Sequence[float]:
        """The threshold of each sequence: the request's, or the rule's own. Only for rules that have one."""


Judge = Callable[[Verification], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptRule:
    """An acceptance rule: its judge, and its properties.

    A package offers a rule by an entry point of the group `paceline.rules`, under the rule's name; a program offers one
    by `register`.
    """

    name: str
    judge: Judge
    lossless: bool  # True: what is emitted is distributed as the target's own text
    wants_probs: bool = False  # judge drafts by `Verification.q`; a draft without distributions is judged as coupled
    threshold: float | None = None  # default in (0, 1] of a request's threshold; None: the rule has no threshold
    # Devices of engines that may use the rule. On "cuda" a rule of another package judges on the host, and the rounds
    # of its sequences wait for it, unless the rule is lossless and the sequence has temperature 0.
    devices: tuple[str, ...] = ("cpu",)
