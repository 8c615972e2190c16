"""Initial weights of EAGLE and MTP heads, their shape, and a draft vocabulary counted on the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import Teacher
from paceline.train.seeds import EAGLE_STREAM, seeded_generator
from paceline.train.students.eagle import EagleShape, EagleStudent
from paceline.train.students.mtp import PREFIX, MtpStudent, sizes
from paceline.train.students.packing import MTP_FUSION, Packing

INITIAL_STD = 0.02  # standard deviation of initial weights
RESIDUAL_FACTOR = 0.2  # times INITIAL_STD for weights that add to the residual stream: they change little at first


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    ids: Tensor  # int64 [size], ascending
    coverage: float  # share of the answers' tokens that the vocabulary contains


def draft_vocabulary(exchanges: Sequence[Exchange], *, size: int, vocab: int, always: Iterable[int]) -> DraftVocabulary:
    """Choose the most frequent tokens of the answers, and the tokens of `always` (such as end tokens)."""
    ranked = token_counts(exchanges, vocab)
    ranked[list(always)] = ranked.sum() + 1
    ids = np.sort(np.argsort(-ranked, kind="stable")[: min(size, vocab)])
    return vocabulary_of(exchanges, torch.from_numpy(ids), vocab=vocab)


def vocabulary_of(exchanges: Sequence[Exchange], ids: Tensor, *, vocab: int) -> DraftVocabulary:
    """Return the draft vocabulary `ids`, with its coverage of the answers."""
    counts = token_counts(exchanges, vocab)
    return DraftVocabulary(ids, float(counts[ids.numpy()].sum() / max(1, counts.sum())))


def token_counts(exchanges: Sequence[Exchange], vocab: int) -> np.ndarray:
    """Count each token in the answers, [vocab]."""
    counts = np.zeros(vocab, dtype=np.int64)
    for exchange in exchanges:
        counts += np.bincount(exchange.tokens[exchange.prompt :], minlength=vocab)
    return counts


def feature_layers(layers: int) -> tuple[int, int, int]:
    """Layers whose inputs are the features: early, middle and late, as published. A target of few layers has them
    closer together."""
    wanted = (2, layers // 2, layers - 3)
    low, middle, high = (min(max(index, 0), layers - 1) for index in wanted)
    return min(low, middle), middle, max(middle, high)


def feature_scale(teacher: Teacher, batches: Iterable[TextBatch]) -> Tensor:
    """Mean magnitude of each feature in answers [features]. Some are a hundred times larger than others, and no single
    learning rate would suit both."""
    total, rows = torch.zeros(()), 0
    for texts in batches:
        at = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        inside = (at >= texts.starts[:, None] - 1) & (at < texts.ends[:, None])
        magnitudes = teacher(texts.ids).features[inside].float().abs()
        total, rows = total.to(magnitudes.device) + magnitudes.sum(dim=0), rows + len(magnitudes)
    return (total / max(1, rows)).clamp_min(1e-3)


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
) -> EagleStudent:
    """Create a head that at first computes the target's output layer over the last feature."""
    params = _drawn(shape.sizes(), seed)
    params["fc.weight"][:, -shape.hidden :] += torch.eye(shape.hidden)
    last = scale[-shape.hidden :].cpu()
    params["norm.weight"] = teacher.norm.float().cpu() * last / last.square().mean().sqrt()
    params["lm_head.weight"] = teacher.head.float().cpu()[draft_ids.cpu()]
    return EagleStudent(shape, params=params, draft_ids=draft_ids, feature_scale=scale, dtype=dtype, packing=packing)


def new_mtp(shape: EagleShape, teacher: Teacher, *, dtype: torch.dtype, seed: int, packing: Packing) -> MtpStudent:
    """Create an MTP head that at first computes the target's output layer over the target's last state."""
    params = _drawn(sizes(shape), seed)
    params[MTP_FUSION][:, shape.hidden :] += torch.eye(shape.hidden)
    final = f"{PREFIX}final_layernorm.weight"
    params[final] *= teacher.norm.float().square().mean().sqrt().cpu()  # about the magnitude of the target's states
    return MtpStudent(shape, params=params, dtype=dtype, device=teacher.head.device, packing=packing)


def _drawn(sizes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Draw the matrices of a head; norms are 1."""
    random = seeded_generator(seed, EAGLE_STREAM)
    params = {name: torch.ones(size) for name, size in sizes.items()}
    for name, ones in params.items():
        if ones.dim() == 2:
            factor = RESIDUAL_FACTOR if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            params[name] = torch.randn(ones.shape, generator=random) * INITIAL_STD * factor
    return params
