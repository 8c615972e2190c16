"""Block drafters, read from the files in which they are published.

`models.block_config` says what a block drafter computes, and reads its config.json. Here are its weights, by names that
do not depend on the layout of the file. One that does not fit the target raises an error here; it is not left to draft
badly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from paceline.errors import ModelFileError
from paceline.kernels.quant import GROUP, Quantised, Weight, values_of
from paceline.models.block_config import BlockConfig, block_config
from paceline.models.config import ModelConfig
from paceline.models.directory import member, read_json
from paceline.models.head_layers import draft_ids, ends_of_network, in_format, layer_weights, matrix
from paceline.models.head_tensors import PICKLES, HeadTensors

CODEBOOKS = ("predecessor", "successor")
# Prefixes of published names, see HeadTensors. Factors over the vocabulary may be named as embeddings are.
NAMES = {
    "model.": "",
    "midlayer.": "layers.0.",
    **{f"candidate_selector.{name}_codebook.weight": f"candidate_selector.{name}_codebook" for name in CODEBOOKS},
}
FLOATS = ("fc", "markov.gate", "markov.joint", "confidence")  # small matrices, and `fc`
FACTORS = ("markov.before", "markov.after")  # matrices with a row for each token
MASK_FILE = "mask_embedding"  # stem of a file that replaces the mask token's embedding


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block drafter.

    weights: fc, context_norm, norm, layers.i.{attn_norm, q, k, v, o, q_norm, k_norm, mlp_norm, gate, up, down}, biases
    as NAME.bias; embed and head unless it uses those of the target; where the network has them markov.{before, after,
    gate, joint}, confidence, layers.i.{attn_conv, mlp_conv}.{base, kernel} and selector.{before, after, states}.
    """

    config: BlockConfig
    weights: dict[str, Weight]
    ids: Tensor  # int32 [draft vocabulary]: the target's token for each output
    files: tuple[Path, ...] = ()  # files of the tensors

    def in_floats(self) -> BlockHead:
        """Convert quantised matrices to float32."""
        return replace(self, weights={name: in_format(weight, "fp32") for name, weight in self.weights.items()})

    def quantised(self) -> BlockHead:
        """Convert matrices to 8 bits in groups of 32; those of 4 bits stay. `fc` reads hidden states and is float32, as
        are small matrices and those of which few rows are read (`is_float`). Factors over the vocabulary get columns of
        zeros up to whole groups."""
        whole = {name: _in_groups(w) if name in FACTORS else w for name, w in self.weights.items()}
        return replace(self, weights={name: in_format(w, _bits(name, w)) for name, w in whole.items()})

    @property
    def parameters(self) -> int:
        return sum(values_of(weight).numel() for weight in self.weights.values())


def _in_groups(weight: Weight) -> Weight:
    """Append columns of zeros up to a multiple of GROUP. Quantised weights are made of whole groups."""
    return functional.pad(weight, (0, -weight.shape[1] % GROUP)) if isinstance(weight, Tensor) else weight


def is_float(name: str) -> bool:
    """Tell whether a matrix is never quantised to run."""
    return name in FLOATS or name.startswith("selector.") or name.endswith(".base")


def _bits(name: str, weight: Weight) -> str:
    """Return the format in which a weight runs if it is quantised."""
    if is_float(name):
        return "fp32"
    return "int4" if isinstance(weight, Quantised) and weight.bits == 4 else "int8"


def load_block(directory: Path, target: ModelConfig, *, blank: bool = False) -> BlockHead:
    """Load a block drafter. `blank`: its tensors are without data, on the device "meta"; only headers are read."""
    path = member(directory, "config.json")
    config = block_config(read_json(path), target, source=str(path))
    _refuse_mask_file(directory)
    file = HeadTensors(directory, prefixes=NAMES, blank=blank)
    weights = {**matrix(file, "fc", "fc", config.decoder.hidden_size, config.width)}
    weights |= _norms(file, config)
    for index in range(config.decoder.num_layers):
        weights |= layer_weights(file, config.decoder, index) | _convolutions(file, config, index)
    weights |= _markov(file, config) | _selector(file, config)
    weights |= ends_of_network(file, config.decoder, config.draft_vocab_size, target)
    ids = draft_ids(file, size=config.draft_vocab_size, vocab=config.decoder.vocab_size)
    file.leave(*(name for name in file.names() if name.endswith("rotary_emb.inv_freq")))  # computed, not read
    file.finish(_asking(config))
    return BlockHead(config=config, weights=weights, ids=ids, files=tuple(file.files()))


def _asking(config: BlockConfig) -> dict[str, str]:
    """Map parts of the names of tensors that a drafter does not have to the values in config.json that ask for them."""
    keys = {f"layers.{config.decoder.num_layers}.": "a larger num_hidden_layers"}
    if config.kind != "DFlash2":
        keys |= dict.fromkeys(("candidate_selector.", "_conv."), "architectures of DFlash2DraftModel")
        if config.markov is None:
            keys["markov_head."] = "a markov_rank"
        if config.confidence is None:
            keys["confidence_head."] = "enable_confidence_head true"
    if config.markov is not None:
        kinds = {"gate_proj": "gated", "joint_proj": "rnn"}
        keys |= {f"markov_head.{part}": f"markov_head_type {kind}" for part, kind in kinds.items()}
    return keys


def _refuse_mask_file(directory: Path) -> None:
    """Refuse an embedding of the mask in a file of its own: those that are published are pickles."""
    found = sorted(path.name for path in directory.glob(f"{MASK_FILE}.*"))
    if found:
        pickle = "a pickle, which can run code when it is read" if found[0].endswith(PICKLES) else "not read"
        raise ModelFileError(
            f"{directory}: {found[0]} is {pickle}; without it the drafter would read another mask than it was trained "
            "with; take a drafter whose mask is a token (mask_token_id)"
        )


def _norms(file: HeadTensors, config: BlockConfig) -> dict[str, Weight]:
    hidden = config.decoder.hidden_size
    return {"context_norm": file.vector("hidden_norm.weight", hidden), "norm": file.vector("norm.weight", hidden)}


def _convolutions(file: HeadTensors, config: BlockConfig, index: int) -> dict[str, Weight]:
    if config.convolutions is None:
        return {}
    hidden, taps = config.decoder.hidden_size, config.convolutions.taps
    weights: dict[str, Weight] = {}
    for name, published in {"attn_conv": "attention_conv", "mlp_conv": "mlp_conv"}.items():
        of, place = f"layers.{index}.{name}", f"layers.{index}.{published}"
        base = file.flat(f"{place}.base_kernel", (2, taps, hidden))
        weights[f"{of}.base"] = base.view(2 * taps, hidden)
        kernels = 2 * taps * (hidden // config.convolutions.group)
        weights[f"{of}.kernel"] = file.matrix(f"{place}.kernel_projection", kernels, hidden)
    return weights


def _markov(file: HeadTensors, config: BlockConfig) -> dict[str, Weight]:
    """Take the heads of DSpark."""
    hidden, weights = config.decoder.hidden_size, dict[str, Weight]()
    rank = 0 if config.markov is None else config.markov.rank
    if config.markov is not None:
        of = "markov_head."
        weights["markov.before"] = file.matrix(f"{of}markov_w1", config.decoder.vocab_size, rank)
        weights["markov.after"] = file.matrix(f"{of}markov_w2", config.draft_vocab_size, rank)
        if config.markov.kind == "gated":
            weights |= matrix(file, "markov.gate", f"{of}gate_proj", rank, hidden + rank)
        if config.markov.kind == "rnn":
            weights |= matrix(file, "markov.joint", f"{of}joint_proj", 3 * rank, 2 * rank + hidden)
    if config.confidence is not None:
        inputs = hidden + (rank if config.confidence == "states and tokens" else 0)
        weights |= matrix(file, "confidence", "confidence_head.proj", 1, inputs)
    return weights


def _selector(file: HeadTensors, config: BlockConfig) -> dict[str, Weight]:
    """Take the choice of DFlash2."""
    if config.selector is None:
        return {}
    vocab, rank = config.decoder.vocab_size, config.selector.rank
    return {
        "selector.before": file.flat("candidate_selector.predecessor_codebook", (vocab, rank)).view(vocab, rank),
        "selector.after": file.flat("candidate_selector.successor_codebook", (vocab, rank)).view(vocab, rank),
        "selector.states": file.matrix("candidate_selector.hidden_projection", rank, config.decoder.hidden_size),
    }
