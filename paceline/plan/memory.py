"""Memory of one rank: weights, workspace, and what is left for keys and values.

The workspace is computed from the buffers that a pass allocates (`runner/forwards/cuda.py`), and the reserve for graphs
that the engine keeps. Neither was compared with a measurement, so that the room for keys and values is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.engine.memory_share import GRAPH_MEMORY, GRAPH_SHARE
from paceline.kernels.base import PAGE_SIZE
from paceline.models.config import ModelConfig
from paceline.plan.drafting import PaperDrafter
from paceline.plan.passes import Place
from paceline.plan.size import ModelSize

EDIT_BYTES = 8  # for each sequence and token of the vocabulary: counts and biases of sampling parameters


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one GPU."""

    total: int
    weights: int
    drafter: int
    workspace: int
    kv_token: int  # of target and drafter together

    @property
    def kv(self) -> int:
        return max(0, self.total - self.weights - self.drafter - self.workspace)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV memory holds, in whole pages."""
        return self.kv // (self.kv_token * PAGE_SIZE) * PAGE_SIZE

    def sequences(self, context: int) -> int:
        """Count the sequences of `context` tokens that have room at once."""
        return self.kv_tokens // (-(-context // PAGE_SIZE) * PAGE_SIZE)


def rank_memory(
    target: ModelSize, place: Place, drafter: PaperDrafter | None, *, max_sequences: int, longest: int
) -> RankMemory:
    """`longest`: tokens of the longest draft."""
    config = EngineConfig.of(device="cuda", max_sequences=max_sequences)
    drafted = min(max_sequences * longest, config.max_draft_tokens) if drafter else 0
    outs = max_sequences + drafted
    workspace = _buffers(target.config, ranks=place.ranks, rows=config.max_step_tokens, outs=outs)
    if drafter and drafter.size:
        workspace += _buffers(
            drafter.size.config, ranks=drafter.ranks, rows=config.max_step_tokens, outs=2 * max_sequences
        )
    workspace += EDIT_BYTES * max_sequences * target.config.vocab_size
    workspace += max(GRAPH_MEMORY, int(GRAPH_SHARE * place.gpu.memory))
    return RankMemory(
        total=place.gpu.memory,
        weights=target.matrices // place.ranks + target.vectors,
        drafter=drafter.weight_bytes if drafter else 0,
        workspace=workspace,
        kv_token=target.kv_token(place.ranks) + (drafter.kv_token if drafter else 0),
    )


def _buffers(config: ModelConfig, *, ranks: int, rows: int, outs: int) -> int:
    """Count the bytes of the buffers of the largest pass. Each is as large as the next power of two of its rows."""
    queries = config.num_heads * config.head_dim // ranks
    keys = max(1, config.num_kv_heads // ranks) * config.head_dim
    inner = 2 * config.hidden_size + (3 * queries + 2 * keys) + config.intermediate_size // ranks
    inner += config.hidden_size * config.post_norms
    return 2 * _power(rows) * inner + 4 * _power(outs) * config.vocab_size


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
