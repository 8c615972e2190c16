"""Weights of a decoder as the CUDA kernels take them: packed matrices, by layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cuda.expand import expanded
from paceline.kernels.cuda.formats import CudaMatrix, pack
from paceline.kernels.cuda.tiles import parts_of
from paceline.kernels.quant import Weight
from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """Packed weights and settings of one layer, on the device."""

    attn_norm: Tensor
    qkv: CudaMatrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: CudaMatrix
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: CudaMatrix
    down: CudaMatrix
    post_mlp_norm: Tensor | None
    window: int  # positions; 0: none
    cos: Tensor  # float32 [positions, head_dim / 2]
    sin: Tensor  # float32 [positions, head_dim / 2]

    @property
    def kind(self) -> Hashable:
        """Equal for layers that need the same kernels."""
        matrices = (self.qkv, self.o, self.gate_up, self.down)
        shapes = tuple((*matrix.q.shape, matrix.format, matrix.parts, matrix.bias is None) for matrix in matrices)
        return shapes, self.window > 0, self.q_norm is None, self.post_attn_norm is None


class Packer:
    """Packs weights for a device. They are removed from `weights` one by one, so that only one matrix at a time is on
    the device twice."""

    def __init__(
        self,
        weights: MutableMapping[str, Weight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        expand: bool,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        """`parts`: of the products of some matrices, by name within a layer; None: those that are fastest here."""
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._expand = expand  # see CudaDecoder
        self._parts = dict(parts or {})

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def put(self, name: str, weight: Weight) -> None:
        self._weights[name] = weight

    def layer(self, config: ModelConfig, index: int, cos: Tensor, sin: Tensor) -> CudaLayer:
        prefix = f"layers.{index}."

        def vector(name: str, present: bool) -> Tensor | None:
            return self.vector(prefix + name) if present else None

        return CudaLayer(
            attn_norm=self.vector(prefix + "attn_norm"),
            qkv=self.matrix(prefix + "q", prefix + "k", prefix + "v"),
            q_norm=vector("q_norm", config.qk_norm),
            k_norm=vector("k_norm", config.qk_norm),
            o=self.matrix(prefix + "o"),
            post_attn_norm=vector("post_attn_norm", config.post_norms),
            mlp_norm=self.vector(prefix + "mlp_norm"),
            gate_up=self.matrix(prefix + "gate", prefix + "up", gated=True),
            down=self.matrix(prefix + "down"),
            post_mlp_norm=vector("post_mlp_norm", config.post_norms),
            window=config.windows[index] if config.windows else 0,
            cos=cos,
            sin=sin,
        )

    def matrix(self, *names: str, gated: bool = False) -> CudaMatrix:
        """Pack the named matrices with their biases into one."""
        biases = [self.vector(f"{name}.bias") for name in names if f"{name}.bias" in self._weights]
        assert len(biases) in (0, len(names)), f"some of {names} have a bias and some have none"
        taken = [self._weights.pop(name) for name in names]
        shapes = [weight.shape if isinstance(weight, Tensor) else weight.q.shape for weight in taken]
        floats = any(isinstance(weight, Tensor) for weight in taken)
        fastest = parts_of(sum(shape[0] for shape in shapes), shapes[0][1], gated=gated, floats=floats)
        parts = self._parts.get(names[0].rpartition(".")[2], fastest)
        matrix = pack(taken, parts=parts, gated=gated, biases=biases, dtype=self._dtype, device=self._device)
        return expanded(matrix, dtype=self._dtype) if self._expand else matrix

    def vector(self, name: str) -> Tensor:
        vector = self._weights.pop(name)
        assert isinstance(vector, Tensor), f"{name} is quantised"
        return vector.to(device=self._device, dtype=torch.float32)
