"""Where a drafter begins: shapes from the target's, first weights, and a draft vocabulary counted on the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import Texts
from paceline.train.output.packing import Packing
from paceline.train.output.storage import same_seed
from paceline.train.students.eagle import EagleHead, EagleShape
from paceline.train.students.teacher import Insight, Teacher

SPREAD = 0.02  # standard deviation of first weights
QUIET = 0.2  # of those that add to the residual stream, relative to the others: at first the head hardly interferes


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    ids: Tensor  # int64 [size], ascending
    coverage: float  # share of the answers' tokens that are among them


def draft_vocabulary(exchanges: Sequence[Exchange], *, size: int, vocab: int, always: Iterable[int]) -> DraftVocabulary:
    """The most frequent tokens of the answers; `always`: such as end tokens."""
    ranked = _counts(exchanges, vocab)
    ranked[list(always)] = ranked.sum() + 1
    ids = np.sort(np.argsort(-ranked, kind="stable")[: min(size, vocab)])
    return given_vocabulary(exchanges, torch.from_numpy(ids), vocab=vocab)


def given_vocabulary(exchanges: Sequence[Exchange], ids: Tensor, *, vocab: int) -> DraftVocabulary:
    """These tokens, and what the answers say of them."""
    counts = _counts(exchanges, vocab)
    return DraftVocabulary(ids, float(counts[ids.numpy()].sum() / max(1, counts.sum())))


def _counts(exchanges: Sequence[Exchange], vocab: int) -> np.ndarray:
    """How often each token is said [vocab]."""
    counts = np.zeros(vocab, dtype=np.int64)
    for exchange in exchanges:
        counts += np.bincount(exchange.tokens[exchange.prompt :], minlength=vocab)
    return counts


def feature_layers(layers: int) -> tuple[int, int, int]:
    """The published choice: early, middle and late; a target of very few layers has them closer together."""
    wanted = (2, layers // 2, layers - 3)
    low, middle, high = (min(max(index, 0), layers - 1) for index in wanted)
    return min(low, middle), middle, max(middle, high)


def feature_scale(insight: Insight, texts: Texts) -> Tensor:
    """The usual size of each feature in answers [features]. Some are a hundred times larger than others, and a learning
    rate that suits one would not suit the other."""
    at = torch.arange(texts.ids.shape[1], device=texts.ids.device)
    inside = (at >= texts.starts[:, None] - 1) & (at < texts.ends[:, None])
    return insight.features[inside].float().abs().mean(dim=0).clamp_min(1e-3)


def eagle_shape(
    config: ModelConfig, *, layers: tuple[int, ...], draft_vocab: int, intermediate: int, steps: int
) -> EagleShape:
    return EagleShape(
        hidden=config.hidden_size,
        intermediate=intermediate,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        draft_vocab=draft_vocab,
        layers=layers,
        eps=config.norm_eps,
        theta=config.rope_theta,
        max_context=config.max_context,
        steps=steps,
    )


def new_eagle(
    shape: EagleShape,
    teacher: Teacher,
    *,
    draft_ids: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    seed: int,
    packing: Packing,
) -> EagleHead:
    """At first it says what the target's own head would make of the last feature."""
    random = same_seed(seed, 7)
    params = {name: torch.ones(size) for name, size in shape.sizes().items()}
    for name, ones in params.items():
        if ones.dim() == 2:
            quiet = QUIET if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            params[name] = torch.randn(ones.shape, generator=random) * SPREAD * quiet
    params["fc.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)
    last = scale[-shape.hidden :].cpu()
    params["norm.weight"] = teacher.norm.float().cpu() * last / last.square().mean().sqrt()
    params["lm_head.weight"] = teacher.head.float().cpu()[draft_ids.cpu()]
    return EagleHead(shape, params=params, draft_ids=draft_ids, feature_scale=scale, dtype=dtype, packing=packing)
