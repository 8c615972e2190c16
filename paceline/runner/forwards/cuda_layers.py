"""Weights of a decoder as the CUDA kernels take them: packed matrices, by layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.kernels.cuda.expand import expanded
from paceline.kernels.cuda.formats import CudaMatrix, pack
from paceline.kernels.cuda.tiles import parts_of
from paceline.kernels.quant import Weight, columns_of
from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cut:
    """How the matrices of a model that is split over ranks are packed for one of them."""

    inputs: Mapping[str, Sequence[int]] = field(default_factory=dict)  # "o" or "down" → inputs of each shard it has
    outputs: Mapping[str, int] = field(default_factory=dict)  # matrix → outputs of all ranks, which choose its parts


UNCUT = Cut()


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """Packed weights and settings of one layer, on the device.

    o and down are cut by inputs, if sums are to have the same bits however many ranks a model is split over."""

    attn_norm: Tensor
    qkv: CudaMatrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: tuple[CudaMatrix, ...]  # of each shard; the first has the bias
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: CudaMatrix
    down: tuple[CudaMatrix, ...]  # likewise
    post_mlp_norm: Tensor | None
    window: int  # positions; 0: none
    cos: Tensor  # float32 [positions, head_dim / 2]
    sin: Tensor  # float32 [positions, head_dim / 2]

    @property
    def matrices(self) -> tuple[CudaMatrix, ...]:
        return self.qkv, *self.o, self.gate_up, *self.down

    @property
    def kind(self) -> Hashable:
        """Equal for layers that need the same kernels."""
        shapes = tuple((*matrix.q.shape, matrix.format, matrix.parts, matrix.bias is None) for matrix in self.matrices)
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
        cut: Cut = UNCUT,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._expand = expand  # see CudaDecoder
        self._cut = cut

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
            o=self.shards(prefix + "o"),
            post_attn_norm=vector("post_attn_norm", config.post_norms),
            mlp_norm=self.vector(prefix + "mlp_norm"),
            gate_up=self.matrix(prefix + "gate", prefix + "up", gated=True),
            down=self.shards(prefix + "down"),
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
        outputs = self._cut.outputs.get(names[0].rpartition(".")[2]) or sum(shape[0] for shape in shapes)
        parts = parts_of(outputs, shapes[0][1], gated=gated, floats=floats)
        matrix = pack(taken, parts=parts, gated=gated, biases=biases, dtype=self._dtype, device=self._device)
        return expanded(matrix, dtype=self._dtype) if self._expand else matrix

    def shards(self, name: str) -> tuple[CudaMatrix, ...]:
        """Pack a matrix in pieces of its inputs, one for each shard."""
        sizes = self._cut.inputs.get(name.rpartition(".")[2], ())
        if len(sizes) < 2:
            return (self.matrix(name),)
        whole, bias = self._weights.pop(name), self._weights.pop(f"{name}.bias", None)
        return tuple(self._pieces(name, whole, bias, sizes))

    def _pieces(self, name: str, whole: Weight, bias: Weight | None, sizes: Sequence[int]) -> Iterator[CudaMatrix]:
        start = 0
        for size in sizes:
            self._weights[name] = columns_of(whole, start, start + size)
            if bias is not None and not start:
                self._weights[f"{name}.bias"] = bias
            yield self.matrix(name)
            start += size

    def vector(self, name: str) -> Tensor:
        vector = self._weights.pop(name)
        assert isinstance(vector, Tensor), f"{name} is quantised"
        return vector.to(device=self._device, dtype=torch.float32)
