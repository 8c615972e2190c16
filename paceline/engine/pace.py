"""How one sequence paces its drafting: longer while drafts are right, shorter after a miss, a pause when hopeless.

Every sequence has its own pace, because acceptance differs more between texts than between drafters.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig

FIRST_DRAFT = 4  # a draft's length before anything is known


@dataclass(slots=True)
class Pace:
    length: int = FIRST_DRAFT  # of the next draft
    pauses: int = 0
    _drafted: int = 0  # in the window that is being judged
    _accepted: int = 0
    _resume_at: int = 0  # output tokens
    _strikes: int = 0  # bad windows in a row

    def paused(self, output_tokens: int) -> bool:
        return output_tokens < self._resume_at

    def learn(self, drafted: int, accepted: int, *, output_tokens: int, config: EngineConfig) -> None:
        self.length = min(2 * max(self.length, drafted), config.max_draft) if accepted == drafted else accepted + 2
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted >= config.acceptance_window:
            self._judge(output_tokens, config)

    def _judge(self, output_tokens: int, config: EngineConfig) -> None:
        hopeless = self._accepted < config.min_acceptance * self._drafted
        self._drafted = self._accepted = 0
        if not hopeless:
            self._strikes = 0
            return
        self._resume_at = output_tokens + config.pause_tokens * 2**self._strikes
        self._strikes += 1
        self.pauses += 1
        self.length = FIRST_DRAFT
