"""Drafters for tests, made for tiny models: all that the laws hold, on a host and on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.drafters.base import Drafter
from paceline.drafters.block import BlockDrafter
from paceline.drafters.block.on_device import BlockOnDevice
from paceline.drafters.bridge import BridgedDrafter
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.drafters.eagle.on_device import drafter_of_head
from paceline.drafters.guard import Guard
from paceline.drafters.layers.drafter import drafter_of as first_layers
from paceline.drafters.layers.drafter import drafter_on as layers_of
from paceline.drafters.lookahead import LookaheadDrafter
from paceline.drafters.medusa import MedusaDrafter, MedusaOnDevice
from paceline.drafters.model import ModelOnDevice, make_drafter
from paceline.drafters.ngram import LookupOnDevice, NgramDrafter
from paceline.drafters.portfolio import PortfolioDrafter
from paceline.drafters.portfolio.on_device import PortfolioOnDevice
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.recipe import BuildContext
from paceline.drafters.recycling import RecyclingDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.kernels.base import Forward
from paceline.kernels.cpu.build import load_library
from paceline.kernels.quant import GROUP, quantise
from paceline.models.block_config import Convolutions, Markov, Selector
from paceline.models.block_heads import BlockHead
from paceline.models.heads import EagleHead
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.decoder_pack import pack_decoder
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.block import TorchBlock
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.compiled_block import CompiledBlock
from paceline.runner.heads.medusa import CompiledMedusa, TorchMedusa
from paceline.runner.heads.protocol import BlockForward, HeadForward, MedusaForward
from paceline.runner.heads.torch import TorchHead
from paceline.runner.rounds.protocol import DeviceDrafter
from paceline.text.bridge import VocabularyBridge
from paceline.text.tokenizer import Tokenizer
from tests.block_heads import random_block
from tests.heads import random_eagle, random_medusa
from tests.other_vocabularies import Other, bridge_to, one_in_common, permuted, removed, sentencepiece_like
from tests.tiny_models import (
    BAD,
    CONTEXT,
    NOISY,
    ON_GPU,
    TARGET,
    VOCAB,
    Model,
    cuda_block,
    cuda_forward,
    cuda_head,
    cuda_leading,
)
from tests.toy import ToyForward

Made = Callable[[BuildContext, str], Drafter]  # how a drafter is made, in a context and on a backend


def model_drafter(model: Model, *, min_confidence: float = 0.0, mask: int | None = None) -> Made:
    """Without a `min_confidence`: random models believe in nothing. With a `mask`: a PARD model."""

    def make(context: BuildContext, backend: str) -> Drafter:
        forward = model.forward(backend, num_pages=context.pool.num_pages)
        return make_drafter(forward, context, min_confidence=min_confidence, mask=mask)

    return make


@dataclass(frozen=True)
class MedusaMade:
    """A drafter with random Medusa heads."""

    min_confidence: float = 0.0
    taps: tuple[int] = (2,)

    def __call__(self, context: BuildContext, backend: str) -> Drafter:
        heads = random_medusa(TARGET.config)
        made: MedusaForward = TorchMedusa(heads)
        if backend == "compiled":
            made = CompiledMedusa([head.in_format("int8") for head in heads], threads=1)
        return MedusaDrafter(made, tap=self.taps[0], min_confidence=self.min_confidence)

    def on_device(self, target: Forward, backend: str) -> DeviceDrafter:
        heads = TorchMedusa(random_medusa(TARGET.config), device="cuda" if backend == "cuda" and ON_GPU else "cpu")
        return MedusaOnDevice(heads, tap=self.taps[0], min_confidence=self.min_confidence)


def bridged_drafter(model: Other, bridge: VocabularyBridge, *, pages: int = 2) -> Made:
    """A model with another vocabulary; `pages` of its own for one of the target."""

    def make(context: BuildContext, backend: str) -> Drafter:
        return BridgedDrafter(
            model.forward(backend, num_pages=pages * context.pool.num_pages),
            bridge,
            sequences=len(context.lanes.lengths),
            max_context=2 * context.max_context,
            vocab_size=context.vocab_size,
            chunk=context.max_step_tokens,
            min_confidence=0.0,
        )

    return make


def renamed(vocabulary: tuple[Tokenizer, tuple[int, ...]], *, noise: float = 0.0) -> Made:
    """The target itself, with another vocabulary."""
    return bridged_drafter(Other(noise=noise, order=vocabulary[1]), bridge_to(vocabulary[0]))


FLAGS = {"norm_first": True, "norm_output": True, "qk_norm": True, "qkv_bias": True, "window": 7, "layers": 2}
NETWORKS: Mapping[str, Mapping[str, Any]] = {  # with seeds whose drafts are right now and then
    "EAGLE-3": {},
    "EAGLE-3 with flags": {**FLAGS, "feature_norms": 2, "seed": 1},
    "P-EAGLE": {"kind": "P-EAGLE", "mask_token": 5, "layers": 2, "seed": 1},
    "EAGLE-1": {"kind": "EAGLE-1", "without": ("head",)},
    "MTP": {"kind": "MTP", "norm_output": True, "qkv_bias": True, "without": ("head",), "seed": 7},
}


@dataclass(frozen=True)
class EagleMade:
    """A drafter with a random head, which on the compiled backend is compiled."""

    draft_vocab: int = VOCAB
    min_confidence: float | None = 0.0
    taps: tuple[int, ...] = (0, 1, 1)
    vocab_size: int = VOCAB
    branches: int | None = 1  # on a device; None: by the number of sequences
    network: str = "EAGLE-3"  # a key of NETWORKS
    name: str = "eagle"

    def __call__(self, context: BuildContext, backend: str) -> Drafter:
        return EagleDrafter(
            self.forward(context.target, backend, context.pool.num_pages, context.max_context),
            name=self.name,
            taps=self.taps,
            width=self.head.config.width,
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            pick=context.target.pick,
            min_confidence=self.min_confidence,
        )

    def on_device(self, target: Forward, backend: str) -> DeviceDrafter:
        pages = target.kv.num_pages
        head = cuda_head(self.head, target) if backend == "cuda" else self.forward(target, backend, pages, CONTEXT)
        options = {} if self.branches is None else {"branches": self.branches}
        return drafter_of_head(head, self.taps, options | {"min_confidence": self.min_confidence})

    @property
    def head(self) -> EagleHead:
        config = replace(TARGET.config, vocab_size=self.vocab_size)
        return random_eagle(config, taps=self.taps, draft_vocab=self.draft_vocab, **NETWORKS[self.network])

    def forward(self, target: Forward, backend: str, pages: int, max_context: int) -> HeadForward:
        if backend == "compiled":
            assert isinstance(target, CompiledForward)
            return CompiledHead(self.head.in_format("int8"), target, num_pages=pages, max_context=max_context)
        return TorchHead(self.head, target, num_pages=pages, device="cuda" if backend == "cuda" and ON_GPU else "cpu")


BLOCKS: Mapping[str, Mapping[str, Any]] = {  # with seeds whose drafts are right now and then
    "DFlash": {"seed": 4},
    "DSpark": {
        "markov": Markov("rnn", 8),
        "anchor_first": True,
        "confidence": "states and tokens",
        "window": 7,
        "seed": 2,
    },
    "DFlash2": {"convolutions": Convolutions(2, 16), "selector": Selector(8, 6), "seed": 2},
}


@dataclass(frozen=True)
class BlockMade:
    """A random block drafter."""

    network: str = "DFlash"  # a key of BLOCKS
    min_confidence: float | None = 0.0
    taps: tuple[int, ...] = (0, 1, 3)
    name: str = "block"

    @property
    def head(self) -> BlockHead:
        return random_block(TARGET.config, taps=self.taps, **BLOCKS[self.network])

    def on_device(self, target: Forward, backend: str) -> DeviceDrafter:
        made = self.head
        sizes = {"taps": self.taps, "max_draft": made.config.longest, "min_confidence": self.min_confidence}
        if backend == "cuda":
            return BlockOnDevice(cuda_block(made, target), **sizes)
        return BlockOnDevice(self.forward(target, backend, target.kv.num_pages, CONTEXT), **sizes)

    def forward(self, target: Forward, backend: str, pages: int, max_context: int) -> BlockForward:
        if backend == "compiled":
            assert isinstance(target, CompiledForward)
            return CompiledBlock(self.head.quantised(), target, num_pages=pages, max_context=max_context)
        return TorchBlock(self.head, target, num_pages=pages)

    def __call__(self, context: BuildContext, backend: str) -> Drafter:
        config = self.head.config
        return BlockDrafter(
            self.forward(context.target, backend, context.pool.num_pages, context.max_context),
            taps=self.taps,
            width=config.width,
            max_draft=config.longest,
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            pick=context.target.pick,
            min_confidence=self.min_confidence,
        )


@dataclass(frozen=True)
class PortfolioMade:
    """A portfolio of drafters, the cheapest first."""

    members: tuple[Made, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(tap for made in self.members for tap in getattr(made, "taps", ()))

    def __call__(self, context: BuildContext, backend: str) -> Drafter:
        made = [make(context, backend) for make in self.members]
        return PortfolioDrafter([Guard(each, vocab_size=context.vocab_size, timeout=60.0) for each in made])


def early_layers(context: BuildContext, backend: str) -> Drafter:
    """The first of the target's two layers; the toy has none, and drafts with a noisy copy on its KV memory."""
    if isinstance(context.target, ToyForward):
        return layers_of(Itself().forward(context.target), context)
    return first_layers(context, 1)


def itself(context: BuildContext, backend: str) -> Drafter:
    """The target in fewer bits, or with some noise, on its KV memory."""
    target = context.target
    if isinstance(target, CompiledForward):
        matrices = {name: w for name, w in TARGET.weights.items() if name.startswith("layers.") and w.dim() == 2}
        pack = pack_decoder({name: quantise(w, bits=4, group=GROUP) for name, w in matrices.items()}, threads=1)
        pack.complete(target.pack)
        copy: Forward = target.with_kv(target.config, pack)
    else:
        copy = Itself().forward(target)
    return make_drafter(copy, context, shares_kv=True, name="self", min_confidence=0.0)


def always(drafter: Drafter) -> Made:
    return lambda context, backend: drafter


# At least one drafter of every kind in drafters.registry.REGISTRY: that is what puts a kind under the laws.
RIGS: Mapping[str, Mapping[str, Made]] = {
    "ngram": {
        "ngram": lambda context, backend: NgramDrafter(),
        "ngram-1": lambda context, backend: NgramDrafter(min_ngram=1, max_ngram=2),
    },
    "suffix": {
        "suffix": lambda context, backend: SuffixDrafter(load_library()),
        "suffix-chain": lambda context, backend: SuffixDrafter(load_library(), branches=1),
    },
    "model": {
        "good": model_drafter(TARGET),
        "noisy": model_drafter(NOISY),
        "bad": model_drafter(BAD),
        "hesitant": model_drafter(NOISY, min_confidence=0.2),
        "parallel": model_drafter(NOISY, mask=3),
        "narrow": model_drafter(Model(seed=5, vocab_size=80)),
        "wide": model_drafter(Model(seed=5, vocab_size=128)),
        "bridged": renamed(permuted(removed()), noise=0.05),
        "bridged-spm": renamed(sentencepiece_like()),
        "bridged-one": renamed(one_in_common()),
    },
    "eagle": {
        "eagle": EagleMade(),
        "eagle-narrow": EagleMade(draft_vocab=40),
        "eagle-hesitant": EagleMade(min_confidence=0.05),
        "eagle-flags": EagleMade(draft_vocab=40, taps=(1, 3), network="EAGLE-3 with flags"),
        "eagle-parallel": EagleMade(network="P-EAGLE"),
        "eagle-1": EagleMade(taps=(2,), network="EAGLE-1"),
    },
    "block": {
        "block": BlockMade(),
        "block-markov": BlockMade("DSpark", min_confidence=0.02),
        "block-dflash2": BlockMade("DFlash2"),
    },
    "mtp": {"mtp": EagleMade(taps=(2,), network="MTP", name="mtp")},
    "prediction": {"prediction": lambda context, backend: PredictionDrafter()},
    "medusa": {"medusa": MedusaMade(), "medusa-hesitant": MedusaMade(min_confidence=0.02)},
    "self": {"self-on-host": itself},  # and on a device: see SELF
    "layers": {"layers": early_layers},
    "lookahead": {"lookahead": lambda context, backend: LookaheadDrafter()},
    "recycling": {"recycling": lambda context, backend: RecyclingDrafter(vocab_size=context.vocab_size)},
    "portfolio": {
        "portfolio": PortfolioMade((lambda context, backend: SuffixDrafter(load_library()), EagleMade())),
        "portfolio-model": PortfolioMade((lambda context, backend: NgramDrafter(), model_drafter(NOISY))),
    },
}


@dataclass(frozen=True)
class Itself:
    """The target with some noise, on the target's own KV memory. Not every backend can share it."""

    noise: float = 0.05

    def forward(self, target: Forward) -> Forward:
        if not isinstance(target, (ToyForward, TorchForward)):
            return cuda_forward(replace(TARGET, noise=self.noise), num_pages=1, kv=target.kv)
        copy = replace(TARGET, noise=self.noise).forward(
            "toy" if isinstance(target, ToyForward) else "eager", num_pages=1
        )
        copy.kv = target.kv
        if isinstance(copy, ToyForward) and isinstance(target, ToyForward):
            copy._kv = target._kv
        elif isinstance(copy, TorchForward) and isinstance(target, TorchForward):
            copy.backend = target.backend
        else:
            raise AssertionError(f"{type(target).__name__} does not share its KV memory")
        return copy


@dataclass(frozen=True)
class FirstLayers:
    """The first of the target's two layers, on the target's own KV memory; for the toy, which has none, some noise."""

    def forward(self, target: Forward) -> Forward:
        if isinstance(target, ToyForward):
            return Itself().forward(target)
        if isinstance(target, TorchForward):
            return target.leading(1)
        return cuda_leading(target, 1)


@dataclass(frozen=True)
class Parallel:
    """A model that drafts over masks."""

    model: Model = NOISY
    mask: int = 3


@dataclass(frozen=True)
class PortfolioRig:
    """A portfolio of a network and a lookup, run by a device."""

    made: Model | Parallel | Itself | EagleMade | BlockMade | MedusaMade
    of: str = "network"  # name of the network, which is shared if the device has it as well

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(getattr(self.made, "taps", ()))


DeviceRig = Model | Parallel | Itself | FirstLayers | EagleMade | BlockMade | MedusaMade | PortfolioRig | DeviceDrafter

# Drafters on the target's own KV memory, run by a device where the backend can share it.
SELF: Mapping[str, Itself | FirstLayers] = {"self": Itself(), "layers": FirstLayers()}
# Drafters with memory of their own, or none, run by a device.
DEVICE_RIGS: Mapping[str, Model | Parallel | LookupOnDevice | EagleMade | BlockMade | MedusaMade | PortfolioRig] = {
    "ngram": LookupOnDevice(),
    "ngram-1": LookupOnDevice(min_ngram=1, max_ngram=2),
    "good": TARGET,
    "noisy": NOISY,
    "bad": BAD,
    "narrow": Model(seed=5, vocab_size=80),
    "wide": Model(seed=5, vocab_size=128),
    "parallel": Parallel(),
    "eagle": EagleMade(),
    "eagle-narrow": EagleMade(draft_vocab=40),
    "eagle-hesitant": EagleMade(min_confidence=0.05),
    "eagle-tree": EagleMade(draft_vocab=40, branches=3),
    "eagle-by-seats": EagleMade(branches=None),
    "eagle-thin-tree": EagleMade(min_confidence=0.02, branches=2),
    "eagle-flags": EagleMade(draft_vocab=40, taps=(1, 3), branches=3, network="EAGLE-3 with flags"),
    "eagle-parallel": EagleMade(network="P-EAGLE"),
    "eagle-1": EagleMade(taps=(2,), branches=2, network="EAGLE-1"),
    "mtp": EagleMade(taps=(2,), branches=2, network="MTP"),
    "block": BlockMade(),
    "block-markov": BlockMade("DSpark", min_confidence=0.02),
    "block-dflash2": BlockMade("DFlash2"),
    "medusa": MedusaMade(),
    "portfolio": PortfolioRig(EagleMade()),
    "portfolio-by-seats": PortfolioRig(EagleMade(branches=None)),
    "portfolio-model": PortfolioRig(NOISY),
    "portfolio-parallel": PortfolioRig(Parallel()),
    "portfolio-block": PortfolioRig(BlockMade("DSpark", min_confidence=0.02)),
}


def device_drafters(rigs: Mapping[str, DeviceRig], backend: str, target: Forward) -> dict[str, DeviceDrafter]:
    """Make the drafters that a device runs beside this target. A portfolio shares the network that it names."""
    made: dict[str, DeviceDrafter] = {}
    for name, by in rigs.items():
        if not isinstance(by, PortfolioRig):
            made[name] = device_drafter(by, backend, target)
    for name, by in rigs.items():
        if isinstance(by, PortfolioRig):
            network = made.get(by.of) or device_drafter(by.made, backend, target)
            made[name] = PortfolioOnDevice(network, name=by.of)
    return {name: made[name] for name in rigs}


def device_drafter(by: DeviceRig, backend: str, target: Forward) -> DeviceDrafter:
    """Make the drafter that a device runs beside this target."""
    if isinstance(by, (Itself, FirstLayers)):
        return ModelOnDevice(by.forward(target), shares_kv=True)
    if isinstance(by, (EagleMade, BlockMade, MedusaMade)):
        return by.on_device(target, backend)
    if isinstance(by, Parallel):
        return ModelOnDevice(by.model.forward(backend, num_pages=target.kv.num_pages), mask=by.mask)
    if isinstance(by, Model):
        return ModelOnDevice(by.forward(backend, num_pages=target.kv.num_pages))
    if isinstance(by, PortfolioRig):
        return device_drafters({"portfolio": by}, backend, target)["portfolio"]
    return by
