"""Medusa-1 heads in training: head i reads the target's last hidden state at position p and guesses token p + 2 + i.

Each head is x + silu(W x + b), then an output layer over the whole vocabulary, initialised with the target's. The heads
do not see each other's guesses, so one pass drafts all of them. Names are those of the published format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import UnsupportedModel
from paceline.models.config import ModelConfig
from paceline.models.heads import load_medusa
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher
from paceline.train.storage import tensors_file
from paceline.train.students.labels import Aim, Labels, soft_loss
from paceline.train.students.packing import Packing, packed
from paceline.train.students.student import Losses, best_tokens, label_rows, leaves

HEAD_DECAY = 0.8  # weight of a head in the loss, relative to the head before


@dataclass(frozen=True, slots=True)
class MedusaShape:
    hidden: int
    vocab: int
    heads: int

    def sizes(self) -> dict[str, tuple[int, ...]]:
        one = {
            "0.linear.weight": (self.hidden, self.hidden),
            "0.linear.bias": (self.hidden,),
            "1.weight": (self.vocab, self.hidden),
        }
        return {f"{index}.{name}": size for index in range(self.heads) for name, size in one.items()}


class MedusaStudent:
    kind = "medusa"

    def __init__(
        self,
        shape: MedusaShape,
        *,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing = "bf16",
    ) -> None:
        self.shape = shape
        self.params = leaves(params, device)
        self.constants: dict[str, Tensor] = {}
        self._dtype = dtype
        self._packing: Packing = packing
        self._all = torch.ones(shape.vocab, dtype=torch.bool, device=device)

    @classmethod
    def new(cls, shape: MedusaShape, teacher: Teacher, *, dtype: torch.dtype, packing: Packing) -> MedusaStudent:
        params = {name: torch.zeros(size) for name, size in shape.sizes().items()}
        for index in range(shape.heads):
            params[f"{index}.1.weight"] = teacher.head.float().cpu()
        return cls(shape, params=params, dtype=dtype, device=teacher.head.device, packing=packing)

    @classmethod
    def read(cls, folder: Path, target: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> MedusaStudent:
        """Read heads to measure them. Those with other layers than those that are trained are refused."""
        heads = [head.in_format("fp32") for head in load_medusa(folder, target)]
        layers = {len(head.blocks) for head in heads}
        if layers != {1}:
            raise UnsupportedModel(
                f"{folder}: Medusa heads with a medusa_num_layers of {max(layers)} draft, but are not trained or "
                "measured here; those with 1 are"
            )
        shape = MedusaShape(target.hidden_size, target.vocab_size, heads=len(heads))
        weights = [weight for head in heads for block in head.blocks for weight in (*block, head.head)]
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        params = dict(zip(shape.sizes(), tensors, strict=True))
        return cls(shape, params=params, dtype=dtype, device=device)

    def losses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, aim: Aim) -> Losses:
        hidden = states.hidden.flatten(0, 1)
        total, by_step, agreement = torch.zeros((), device=hidden.device), [], []
        for index in range(self.shape.heads):
            rows = label_rows(texts, self._all, ahead=2 + index)
            labels = Labels.of(hidden[rows + 1 + index], teacher.head, aim)
            counts = torch.full((len(rows),), 1 / max(1, len(rows)), device=hidden.device)
            loss, distance, best = soft_loss(self._logits(hidden[rows], index), labels, counts)
            total = total + loss * HEAD_DECAY**index
            by_step.append(distance)
            agreement.append(((best == labels.best) * counts).sum())
        return Losses(total=total, by_step=torch.stack(by_step), agreement=torch.stack(agreement))

    @torch.no_grad()
    def guesses(self, teacher: Teacher, states: TargetStates, texts: TextBatch, steps: int) -> Tensor:
        hidden = states.hidden.flatten(0, 1)
        found = torch.full((*texts.ids.shape, steps), -1, device=hidden.device)  # -1: no head guesses this step
        for index in range(min(steps, self.shape.heads)):
            best = best_tokens(hidden, partial(self._logits, index=index))
            found[..., index] = best.view(texts.ids.shape)
        return found

    def finish(self, teacher: Teacher, batches: Iterable[TextBatch]) -> None:
        """Do nothing: the files need only the parameters."""

    def files(self) -> dict[str, bytes]:
        config = {
            "architectures": ["MedusaModel"],
            "medusa_num_heads": self.shape.heads,
            "medusa_num_layers": 1,
            "hidden_size": self.shape.hidden,
            "vocab_size": self.shape.vocab,
        }
        tensors = {name: tensor.detach().cpu() for name, tensor in self.params.items()}
        return {
            "model.safetensors": tensors_file(packed(tensors, self._packing)),
            "config.json": (json.dumps(config, indent=1) + "\n").encode(),
        }

    def _logits(self, hidden: Tensor, index: int) -> Tensor:
        weight, bias, head = (
            self.params[f"{index}.{name}"].to(self._dtype) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
        )
        return functional.linear(hidden + functional.silu(functional.linear(hidden, weight, bias)), head)
