"""Load a model by its name, and choose the Forward that runs it, with the reason.

On a CPU integer weights run as one compiled program. Without a compiler, or if the kernels do not support the shape,
they are dequantised and run in torch. Float weights (fp32, bf16, fp8) run in torch on a CPU, fp8 as float32. On a CUDA
device every format has its kernels; activations are bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, NoCompiler, OutOfMemory, UnknownOption, UnsupportedModel
from paceline.kernels.base import Forward
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack
from paceline.kernels.kv_tensors import page_bytes
from paceline.kernels.quant import Float8, Quantised, dequantise
from paceline.models.config import ModelConfig
from paceline.models.load import LoadedModel, load_model, open_model
from paceline.models.shapes import random_weights, shape_config
from paceline.models.weights import (
    Format,
    Progress,
    TensorSource,
    Weight,
    describe_weights,
    in_format,
    load_weights,
    resolve_format,
)
from paceline.runner.forwards.compiled import CompiledForward, check_supported, kv_bytes_per_page, thread_question
from paceline.runner.forwards.decoder_pack import decoder_layout, read_decoder
from paceline.runner.forwards.thread_choice import ThreadChoice, known_choice
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.sketch import UP
from paceline.runner.loading.memory import WeightPart, memory_for, pass_bytes, weight_parts
from paceline.runner.loading.pack_cache import Origin, cached
from paceline.runner.loading.rank_threads import threads_of_a_rank
from paceline.runner.loading.shortlist import fill_shortlist
from paceline.runner.loading.stages import stage
from paceline.runner.parallel.forward import split_forward
from paceline.runner.parallel.rank_memory import Need, bytes_of_ranks
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.parallel.split import Split
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.runner.forwards.cuda import CudaDecoder

logger = logging.getLogger(__name__)
DEVICES = ("auto", "cpu", "cuda")
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights that are still in their files; a Forward reads them when it is built."""

    source: TensorSource
    format: Format  # resolved
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that can be built. Its weights are on a device, or in memory, or in files that `forward` reads; then
    `model.weights` describes them without data. The number of KV pages is fixed by `forward`."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer | None  # None: a shape with random weights
    compiled: bool  # True: runs as a compiled program on a CPU
    why: str  # reason for this Forward, shown to users
    decoder: CudaDecoder | None = None  # has the weights on a CUDA device; None: a CPU
    kv_format: str = "bf16"  # format of keys and values on a CUDA device; the kernels of a CPU have one of their own
    parts: Sequence[WeightPart] = ()  # weights by format, the most bytes first; counted before a Forward takes them
    stored: StoredWeights | None = None  # None: `model.weights` have data
    split: Split | None = None  # over several ranks; None: this process has all of it
    rank_timeout: float = 8.0  # seconds that a rank may keep the others waiting
    splits_drafters: bool = False  # models that draft for it are split over the same ranks
    shortlist: bool = False  # compiled from files: drafts compute a shortlist of outputs (docs/adr/0013)
    pass_bytes: int = field(init=False)  # bytes of weights that a pass reads; counted before a Forward takes them

    def __post_init__(self) -> None:
        bytes = self.decoder.weight_bytes if self.decoder else pass_bytes(self.model, packed=self.compiled)
        object.__setattr__(self, "pass_bytes", bytes)

    @property
    def bitwise(self) -> bool | None:
        """Whether its Forward is bitwise; None: only a built Forward on this device can tell."""
        return self.compiled if self.decoder is None else None

    @property
    def has_whole_program(self) -> bool:
        """Whether this process has all of it as one compiled program, on which heads and copies can build."""
        return self.compiled and self.split is None

    @property
    def unread_bytes(self) -> int:
        """Bytes of memory that the weights will take when they are read."""
        if self.shortlist and self.compiled and self.stored:
            return self._layout().size
        return sum(part.bytes for part in self.parts) if self.stored else 0

    def rank_bytes(self, num_pages: int) -> list[int]:
        """Count the bytes of weights and KV memory that it will take on each rank of its split."""
        assert self.split is not None, f"{self.name} is not split"
        kv_bytes = num_pages * self.page_bytes
        return bytes_of_ranks(self.model.weights, self.model.config, self.split, kv_bytes=kv_bytes)

    @property
    def device(self) -> str:
        return str(self.decoder.device) if self.decoder else "cpu"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of KV memory."""
        config = self.model.config if self.decoder is None else self.decoder.config  # of the part on this device
        if self.split is not None:
            return self.split.page_bytes(config, torch.bfloat16 if self.compiled else _dtype(self.model))
        if self.compiled:
            return kv_bytes_per_page(config)
        dtype = KV_DTYPES[self.kv_format] if self.decoder else _dtype(self.model)
        return page_bytes(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    def profile(self, rows: int, outs: int) -> None:
        """Run the largest pass that can occur, so that the memory left free afterwards can be used for KV."""
        if self.decoder is not None:
            with memory_for(f"a pass of {rows} tokens of {self.name}", "lower max_step_tokens or max_sequences"):
                self.decoder.profile(rows, outs)

    def forward(
        self,
        *,
        num_pages: int,
        threads: int | None,
        max_context: int,
        taps: Sequence[int] = (),
        beside: Sequence[int] = (),
        ranks: Ranks | None = None,
    ) -> Forward:
        """Build the Forward. It takes ownership of the weights, and may empty the mapping.

        `beside`: bytes of drafters on each rank of a split target, which needs room for them. `ranks`: those of the
        target, over which a drafter is split."""
        config = self.model.config
        if self.decoder is not None:
            from paceline.runner.forwards.cuda import CudaForward, new_kv

            dtype, device = KV_DTYPES[self.kv_format], self.decoder.device
            kv = new_kv(self.decoder.config, num_pages=num_pages, dtype=dtype, device=device)
            return CudaForward(self.decoder, kv, taps=taps)
        if self.split is not None:
            return self._split_forward(
                num_pages=num_pages, threads=threads, max_context=max_context, taps=taps, beside=beside, ranks=ranks
            )
        try:
            if self.compiled:
                # Torch does little between passes, and its idle threads would spin on the kernels' cores.
                torch.set_num_threads(1)
                weights = self.packed(threads) if self.stored else self.model.weights
                return CompiledForward(
                    config, weights, num_pages=num_pages, threads=threads, max_context=max_context, taps=taps
                )
            torch.set_num_threads(threads or torch.get_num_threads())
            dtype, weights = _dtype(self.model), self._read()
            for name, weight in weights.items():
                weights[name] = weight if isinstance(weight, Tensor) else dequantise(weight)
            return TorchForward(config, weights, num_pages=num_pages, dtype=dtype, taps=taps)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            size = num_pages * self.page_bytes / 2**20
            raise OutOfMemory(
                f"no memory for {self.name} with a KV cache of {size:.0f} MiB: lower kv_memory or max_context, or "
                "choose a smaller format such as int4"
            ) from error

    def _split_forward(
        self,
        *,
        num_pages: int,
        threads: int | None,
        max_context: int,
        taps: Sequence[int],
        beside: Sequence[int],
        ranks: Ranks | None,
    ) -> Forward:
        """Have each rank read its shards, and start the ranks before if there are none."""
        assert self.split is not None, f"{self.name} is not split"
        assert self.stored is not None, "ranks read weights from files"
        own = self.rank_bytes(num_pages)
        needs = [Need(*each) for each in zip(own, beside or [0] * len(own), strict=True)]
        return split_forward(
            str(self.model.path),
            split=self.split,
            format=self.stored.format,
            dtype=_dtype(self.model),
            needs=needs,
            num_pages=num_pages,
            threads=self.known_threads(threads).threads,
            timeout=self.rank_timeout,
            taps=taps,
            max_context=max_context,
            progress=self.stored.progress,
            ranks=ranks,
        )

    def known_threads(self, threads: int | None) -> ThreadChoice:
        """Return the number of threads of a Forward on a CPU, as far as it is known before one is built."""
        if self.split is not None:
            return threads_of_a_rank(self.split, threads)
        if not self.compiled:
            return ThreadChoice(threads or torch.get_num_threads(), "of torch" if threads is None else "as asked for")
        return known_choice(threads, thread_question(self.model.config, decoder_layout(self.model.weights)))

    def packed(self, threads: int | None) -> Pack:
        """Return the weights as the kernels read them, from the cache if they are there."""
        assert self.stored is not None, "there is nothing to read"
        config, stored = self.model.config, self.stored
        origin = Origin(self.name, tuple(stored.source.files()), stored.format, config)

        def fill(pack: Pack) -> None:
            read_decoder(pack, stored.source, config, format=stored.format, progress=stored.progress)
            if UP in pack:
                assert self.tokenizer is not None, "a model from files has a tokenizer"
                fill_shortlist(pack, config, self.tokenizer, threads=threads)

        pack = cached(self._layout(), origin, fill, threads=threads)
        if stored.progress:
            stored.progress(pack.layout.size, pack.layout.size)
        return pack

    def _layout(self) -> Layout:
        """Lay out the weights of a compiled model."""
        return decoder_layout(self.model.weights, shortlist=self.shortlist)

    def _read(self) -> dict[str, Weight]:
        if self.stored is None:
            return self.model.weights
        stored = self.stored
        with stage(f"read {self.name}"):
            return load_weights(stored.source, self.model.config, format=stored.format, progress=stored.progress)


def choose_device(name: str) -> str:
    """Return "cpu" or "cuda" for a user's choice of device; "auto" is cuda if there is one."""
    there = torch.cuda.is_available()
    if name not in DEVICES:
        raise UnknownOption("device", name, DEVICES)
    if name == "cuda" and not there:
        raise InvalidRequest("torch finds no CUDA device; use device cpu")
    return name if name != "auto" else "cuda" if there else "cpu"


def read_model(
    name: str,
    *,
    format: Format = "auto",
    device: str = "cpu",
    kv_format: str = "bf16",
    progress: Progress | None = None,
    beside: ReadyModel | None = None,
    shortlist: bool = False,
) -> ReadyModel:
    """Load a model and its tokenizer by name. A drafter shares the tokenizer of the target `beside` it if their
    files say the same. `shortlist`: compiled, its drafts compute a shortlist of outputs."""
    check_format(format, device)
    if torch.device(device).type == "cpu":
        return replace(_ready_from_files(name, format, kv_format, progress, beside), shortlist=shortlist)
    with memory_for(f"the weights of {name}", "choose a smaller format such as fp8 or int4, or a smaller model"):
        model = load_model(name, format=format, device=device, progress=progress)
        return _ready(name, model, tokenizer_of(model, beside), device, kv_format, beside)


def _ready_from_files(
    name: str, format: Format, kv_format: str, progress: Progress | None, beside: ReadyModel | None
) -> ReadyModel:
    """Make a model for a CPU from the headers of its files."""
    with stage(f"read the headers of {name}"):
        opened = open_model(name, progress=progress)
        format = resolve_format(format, quantised=opened.source.quantised)
        model = opened.loaded(describe_weights(opened.source, opened.config, format=format))
    with stage(f"make the tokenizer of {name}"):
        tokenizer = tokenizer_of(model, beside)
    ready = _ready(name, model, tokenizer, "cpu", kv_format)
    return replace(ready, stored=StoredWeights(opened.source, format, progress))


def tokenizer_of(model: LoadedModel, beside: ReadyModel | None = None) -> Tokenizer:
    """Make the tokenizer of a model, or take that of the model `beside` it if it is the same."""
    if beside is not None and beside.tokenizer is not None and _same_tokenizer(model, beside.model):
        return beside.tokenizer
    return Tokenizer.from_gguf(model.metadata) if model.kind == "gguf" else Tokenizer.from_directory(model.path)


def _same_tokenizer(one: LoadedModel, other: LoadedModel) -> bool:
    """Whether two GGUF files have the same tokenizer, entry by entry, but for chat templates. Making one takes longer
    than comparing two."""
    entries = [
        {key: value for key, value in model.metadata.items() if key.startswith("tokenizer.ggml.")}
        for model in (one, other)
    ]
    return bool(entries[0]) and entries[0] == entries[1]


def ready_shape(
    name: str,
    *,
    format: Format = "auto",
    device: str = "cpu",
    kv_format: str = "bf16",
    seed: int = 0,
    beside: ReadyModel | None = None,
) -> ReadyModel:
    """Make a model of a known shape with random weights, for measurements; it has no tokenizer. `beside`: the target
    that it drafts for."""
    check_format(format, device)
    config = shape_config(name)
    format = resolve_format(format, quantised=False, device=device)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    with memory_for(f"random weights of {name}", "choose a smaller format such as fp8 or int4"):
        drawn = random_weights(config, device=device, dtype=dtype, seed=seed)
        weights = {canonical: in_format(weight, canonical, format=format) for canonical, weight in drawn}
        model = LoadedModel(kind="hf", path=Path(name), config=config, weights=weights, metadata={})
        return _ready(name, model, None, device, kv_format, beside)


def check_format(format: Format, device: str) -> None:
    """Refuse fp32 on a GPU: activations are bfloat16 there, and weights would be rounded to it."""
    if format == "fp32" and torch.device(device).type == "cuda":
        allowed = [known for known in get_args(Format) if known != "fp32"]
        raise InvalidRequest(f"weights of format fp32 are for a CPU; on a GPU there are {', '.join(allowed)}")


def _ready(
    name: str,
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    device: str,
    kv_format: str,
    beside: ReadyModel | None = None,
) -> ReadyModel:
    if torch.device(device).type == "cuda":
        kinds, parts = kinds_of(model), weight_parts(model, packed=True)
        decoder = _cuda_decoder(model, device, positions=positions_beside(model.config, beside))
        why = f"cuda: {torch.cuda.get_device_name(decoder.device)}, {kinds} weights"
        return ReadyModel(
            name, model, tokenizer, compiled=False, why=why, decoder=decoder, kv_format=kv_format, parts=parts
        )
    if kv_format != "bf16":
        raise InvalidRequest(
            f"kv_format {kv_format!r} is for a GPU; on a CPU keys and values are as its kernels want them"
        )
    compiled, why = _choose(model)
    parts = weight_parts(model, packed=compiled)
    return ReadyModel(name=name, model=model, tokenizer=tokenizer, compiled=compiled, why=why, parts=parts)


def positions_beside(config: ModelConfig, beside: ReadyModel | None) -> int:
    """Count the positions of rotary tables: in rounds a drafter reads all of a text, even if its own context is
    shorter."""
    return max(config.max_context, 0 if beside is None else beside.model.config.max_context)


def _cuda_decoder(model: LoadedModel, device: str, *, positions: int) -> CudaDecoder:
    """Pack the weights for a GPU, with rotary tables for so many `positions`."""
    try:
        from paceline.runner.forwards.cuda import CudaDecoder
    except ModuleNotFoundError as error:
        raise UnsupportedModel("a CUDA device needs Triton: pip install triton, or use device cpu") from error
    return CudaDecoder(model.config, model.weights, max_context=positions, device=device)


def kinds_of(model: LoadedModel) -> str:
    """Say for users in which formats the matrices of a model are on a GPU."""
    return " and ".join(sorted({_kind(weight) for weight in model.weights.values() if not _is_vector(weight)}))


def _kind(weight: Weight) -> str:
    if isinstance(weight, Tensor):
        return "bf16"
    return "fp8" if isinstance(weight, Float8) else f"{weight.bits}-bit"


def _is_vector(weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 1


def _choose(model: LoadedModel) -> tuple[bool, str]:
    """Decide whether a model runs compiled on a CPU, and say why."""
    if not any(isinstance(weight, Quantised) for weight in model.weights.values()):
        kind = "fp8" if isinstance(model.weights["embed"], Float8) else str(_dtype(model))
        return False, f"torch: {kind} weights have no compiled kernel; int8 or int4 would be faster on a CPU"
    try:
        check_supported(model.config)
        variant = load_library().variant
    except (NoCompiler, UnsupportedModel) as error:
        logger.warning("running in torch with float32 weights, which is slower: %s", error)
        return False, f"torch, float32: {error}"
    return True, f"compiled: quantised weights, {variant} kernels"


def _dtype(model: LoadedModel) -> torch.dtype:
    """Return the type of activations in torch: that of float weights, or float32."""
    embed = model.weights["embed"]
    return embed.dtype if isinstance(embed, Tensor) else torch.float32
