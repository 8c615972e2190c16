"""Acceptance in portable rounds, in plain torch: drafts against what the target drew, and what follows from it."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels import edit_reference
from paceline.kernels import round_reference as ops
from paceline.kernels import tree_reference as tree_ops
from paceline.kernels.base import KVMemory
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import Landed, read_all
from paceline.runner.rounds.scores import Scorer, Verified


class PortableAccept:
    """Accepts drafts, chains or trees, in the lanes of a device and in the target's KV memory."""

    def __init__(self, state: DeviceState, scorer: Scorer, kv: KVMemory) -> None:
        self._state = state
        self._scorer = scorer
        self._kv = kv

    def __call__(
        self,
        seats: Tensor,
        logits: Tensor,
        targets: Tensor,
        *,
        out: Tensor,
        row_starts: Tensor | None = None,
        roots: Tensor | None = None,
        verdicts: Tensor | None = None,
        tree: bool = False,
        synthetic_acceptance: float = 0.0,
    ) -> list[Landed]:
        """Accept, advance the lengths, and return the outcomes, with scores by the raw logits [rows, vocab]. `out` gets
        the reports of `accept`, or of `tree_accept`."""
        if not len(seats):
            return []
        if tree:
            assert row_starts is not None
            self._accept_trees(seats, row_starts, targets, verdicts, out, synthetic_acceptance)
        else:
            ops.accept(
                self._state,
                seats=seats,
                targets=targets,
                out=out,
                row_starts=row_starts,
                roots=roots,
                verdicts=verdicts,
                synthetic_acceptance=synthetic_acceptance,
            )
        if self._state.marks.shape[1]:
            edit_reference.count(self._state, seats=seats, outcomes=out)
        landed = read_all(out.tolist(), tree=tree)
        starts = roots if row_starts is None else row_starts
        assert starts is not None
        scores = self._scorer.score_seats(seats.tolist(), Verified(logits, out, seats, starts, seats, tree=tree))
        if scores is not None:
            scores.attach(landed)
        return landed

    def _accept_trees(
        self,
        seats: Tensor,
        row_starts: Tensor,
        targets: Tensor,
        verdicts: Tensor | None,
        out: Tensor,
        synthetic_acceptance: float,
    ) -> None:
        """Accept paths of trees, and move their keys and values into place."""
        tree_ops.tree_accept(
            self._state,
            seats=seats,
            row_starts=row_starts,
            targets=targets,
            out=out,
            verdicts=verdicts,
            synthetic_acceptance=synthetic_acceptance,
        )
        source, target = tree_ops.tree_moves(self._state, seats=seats, out=out)
        moved = source != target
        self._kv.move(source[moved].tolist(), target[moved].tolist())
