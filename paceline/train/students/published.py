"""EAGLE-3 heads read from files, as `paceline train` writes them or as they are published: to be measured, or to be
trained further.

A head with a feature that training does not have (say a norm before the residual) is refused, not approximated.
Quantised matrices are read as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafters.registry import head_directory
from paceline.errors import InvalidRequest, UnsupportedModel
from paceline.models.config import ModelConfig
from paceline.models.eagle_config import EagleConfig
from paceline.models.heads import load_eagle
from paceline.train.data.teacher import Teacher
from paceline.train.options import TrainOptions
from paceline.train.students.eagle import EagleShape, EagleStudent, shape_of_head
from paceline.train.students.packing import FUSION, Packing

TRAINING_NAMES = {  # name in `models.heads` → name in training and in files
    "fc": FUSION,
    "embed_norm": "midlayer.input_layernorm.weight",
    "layers.0.attn_norm": "midlayer.hidden_norm.weight",
    **{f"layers.0.{name}": f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"},
    "layers.0.mlp_norm": "midlayer.post_attention_layernorm.weight",
    **{f"layers.0.{name}": f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "norm": "norm.weight",
    "head": "lm_head.weight",
}
MAX_EMBEDDING_DISTANCE = 0.2  # relative to the norm; rounding of one embedding explains no more


@dataclass(frozen=True, slots=True)
class HeadOrigin:
    """The head whose weights a training started from, for the model card."""

    name: str
    license: str | None


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """An EAGLE-3 head as floats, under the names that training uses."""

    folder: Path
    shape: EagleShape
    params: dict[str, Tensor]  # float32
    draft_ids: Tensor  # int64 [draft vocabulary]
    embedding: Tensor | None  # [vocab, hidden] if the file has one

    @classmethod
    def read(cls, folder: Path, target: ModelConfig, *, steps: int) -> PublishedHead:
        head = load_eagle(folder, target).in_format("fp32")
        weights = {name: weight.float() for name, weight in head.weights.items() if isinstance(weight, Tensor)}
        shape = _shape(folder, head.config, target, steps)
        _check_tensors(folder, weights)
        return cls(
            folder=folder,
            shape=shape,
            params={name: weights[key] for key, name in TRAINING_NAMES.items()},
            draft_ids=head.ids.long(),
            embedding=weights.get("embed"),
        )

    def student(self, teacher: Teacher, *, scale: Tensor, dtype: torch.dtype, packing: Packing) -> EagleStudent:
        """Make a student of the head. `scale` [features]: divisors of the features in training, which the file does not
        have; the weights of the fusion are multiplied by them."""
        if self.embedding is not None:
            self._check_embedding(teacher)
        params = self.params | {FUSION: self.params[FUSION] * scale.cpu()}
        return EagleStudent(
            self.shape, params=params, draft_ids=self.draft_ids, feature_scale=scale, dtype=dtype, packing=packing
        )

    def _check_embedding(self, teacher: Teacher) -> None:
        """Refuse a head whose embedding differs from the target's: training uses the target's embedding."""
        assert self.embedding is not None, "nothing to check"
        ids = self.draft_ids.to(teacher.head.device)
        wanted = teacher.embed(ids).float().cpu()
        distance = (self.embedding[self.draft_ids] - wanted).norm() / wanted.norm().clamp_min(1e-12)
        if not distance <= MAX_EMBEDDING_DISTANCE:
            raise UnsupportedModel(
                f"{self.folder}: a head with an embedding of its own, {distance:.0%} away from the target's; heads are "
                "trained with the target's: take one that was made with it"
            )


def read_initial_head(options: TrainOptions, target: ModelConfig) -> tuple[PublishedHead, HeadOrigin]:
    """Read the head that `--begin` names; refuse it if it does not fit the target or the other options."""
    assert options.initial_head is not None, "no initial head"
    folder = head_directory(options.initial_head)
    if options.out.resolve() == folder.resolve():
        raise InvalidRequest(
            f"--out and --begin are both {folder}: write to another place, and keep what it began with"
        )
    head = PublishedHead.read(folder, target, steps=options.unroll)
    _check_asked("--draft-vocab", options.draft_vocab, head.shape.draft_vocab, folder)
    _check_asked("--intermediate", options.intermediate, head.shape.intermediate, folder)
    return head, HeadOrigin(name=Path(options.initial_head).name, license=_license(folder))


def _check_asked(option: str, asked: int | None, there: int, folder: Path) -> None:
    if asked is not None and asked != there:
        raise InvalidRequest(
            f"{option} {asked}, but the head in {folder} has {there}, which it keeps: leave {option} out, or train "
            "without --begin"
        )


def _shape(folder: Path, config: EagleConfig, target: ModelConfig, steps: int) -> EagleShape:
    layer = config.decoder
    for wrong, what in (
        (config.kind != "EAGLE-3", f"the network of {config.kind}"),
        (bool(config.flags), ", ".join(config.flags)),
        (max(config.taps) > target.num_layers, "a hidden state after the last layer"),
        (layer.activation != "silu", f"the activation {layer.activation!r}"),
        (layer.hidden_size != target.hidden_size, f"a width of {layer.hidden_size}, not {target.hidden_size}"),
    ):
        if wrong:
            raise UnsupportedModel(f"{folder}: a head with {what} drafts, but is not trained or measured here")
    return shape_of_head(config, steps=steps)


def _check_tensors(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse a head with other tensors than those that are trained."""
    missing = sorted(TRAINING_NAMES.keys() - weights.keys())
    more = sorted(weights.keys() - TRAINING_NAMES.keys() - {"embed"})
    if missing or more:
        what = f"without {missing[0]} of its own" if missing else f"with {more[0]}"
        raise UnsupportedModel(f"{folder}: a head {what} drafts, but is not trained or measured here")


def _license(folder: Path) -> str | None:
    """Read the licence in the front matter of a head's model card, between its first two lines of `---`."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    before, _, rest = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
    lines = [] if before.strip() else rest.partition("\n---")[0].splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("license:")]
    return found[0] if found and found[0] else None
