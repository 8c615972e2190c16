"""The GGUF reader: it reads sound files as the gguf package does, and refuses files that contradict themselves."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelError, ModelFileError, UnsupportedModel
from paceline.kernels.quant import Quantised
from paceline.kernels.reference import embed
from paceline.models.gguf import GgufFile
from paceline.models.gguf_blocks import float_rows, native_rows
from paceline.models.gguf_config import config_from_gguf
from paceline.models.gguf_values import MAX_ARRAY
from paceline.models.load import load_model, open_model
from tests.models import broken
from tests.models.broken import METADATA, build, tensors, text

KEPT = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.Q5_0: 8, Kind.Q8_0: 8}
OTHERS = [Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ2_XXS, Kind.TQ2_0]
HALVES = {  # byte offsets of the fp16 numbers of a block
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q4_K: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
    Kind.IQ2_XXS: [0],
    Kind.TQ2_0: [64],
}


def random_rows(kind: Kind, *, rows: int = 6, width: int = 512) -> np.ndarray:
    """Random blocks of a quantisation whose scales are sane."""
    block, size = GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(int(kind))
    data = noise.integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = noise.uniform(-0.01, 0.02, (rows, width // block)).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def as_float(weight: torch.Tensor | Quantised) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.float()
    return embed(torch.arange(len(weight.q)), weight, torch.float32)


@pytest.mark.parametrize("kind", KEPT)
def test_kept_quantisations_keep_their_bits(kind):
    data = random_rows(kind)
    kept = native_rows(data, kind, "test")
    assert isinstance(kept, Quantised)
    assert kept.bits == KEPT[kind]
    assert int(kept.q.max()) < 2**kept.bits
    assert kept.bits == 4 or kept.symmetric  # kernels have no minimum for 8 bits
    assert kept.scale.shape == kept.minimum.shape == (6, 16)
    assert torch.equal(kept.scale, kept.scale.half().float())  # kernels pack them as fp16
    assert torch.equal(kept.minimum, kept.minimum.half().float())
    tolerance = 2**-10 if kind.name.endswith("_K") else 2**-22  # relative to the two terms of a weight
    size = kept.scale.abs().max() * 2**kept.bits + kept.minimum.abs().max()
    error = (as_float(kept) - torch.from_numpy(dequantize(data, kind))).abs().max()
    assert error <= tolerance * size


@pytest.mark.parametrize("kind", OTHERS)
def test_other_quantisations_become_eight_bits_in_groups(kind):
    data = random_rows(kind)
    exact = torch.from_numpy(dequantize(data, kind))
    made = native_rows(data, kind, "test")
    assert isinstance(made, Quantised)
    assert made.bits == 8
    assert made.scale.shape == (6, 16)
    largest = exact.abs().view(6, 16, 32).amax(-1)
    error = (as_float(made) - exact).abs().view(6, 16, 32).amax(-1)
    assert bool((error <= largest / 127).all())


@pytest.mark.parametrize("kind", [*KEPT, *OTHERS])
def test_every_quantisation_becomes_float_exactly(kind):
    data = random_rows(kind)
    assert torch.equal(float_rows(data, kind, "test"), torch.from_numpy(dequantize(data, kind)))


def test_types_the_gguf_package_cannot_dequantise_are_refused():
    with pytest.raises(UnsupportedModel, match="Q8_K"):
        native_rows(np.zeros((1, 292), np.uint8), Kind.Q8_K, "test")


@pytest.fixture
def put(tmp_path):
    def write(data: bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return str(path)

    return write


@pytest.mark.parametrize("version", [2, 3])
def test_reads_what_the_gguf_package_reads(version, put, tmp_path):
    path = put(build(version=version))
    file, reference = GgufFile(tmp_path / "model.gguf"), GGUFReader(path)
    assert file.metadata == {k: f.contents() for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(int(side) for side in tensor.shape[::-1])
        assert info.start == tensor.data_offset
        exact = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        rows = 1 if len(info.shape) == 1 else info.shape[0]
        assert torch.equal(file.read_float(tensor.name, 0, rows).flatten(), exact.flatten())
    assert load_model(path).config.num_layers == 1


NAN = struct.unpack("<f", b"\0\0\xc0\x7f")[0]
LIES = {
    "empty": (b"", "cannot be read"),
    "another format": (build(magic=b"PK\3\4"), "does not start with"),
    "only the magic": (b"GGUF", "truncated"),
    "version 1": (build(version=1), "versions 2 and 3"),
    "big endian": (build(version=3 << 24), "versions 2 and 3"),
    "10^9 tensors": (build(tensor_count=10**9), "tensors"),
    "one tensor more than there are": (build(tensor_count=len(tensors()) + 1), "type|truncated|dimensions|tensor"),
    "2^63 keys": (build(key_count=2**63), "metadata keys"),
    "a string longer than the file": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<IQ", broken.STRING, 2**62)),
        "truncated",
    ),
    "an array longer than the file": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<IIQ", broken.ARRAY, 10, MAX_ARRAY)),
        "truncated",
    ),
    "an endless array": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<IIQ", broken.ARRAY, 0, 2**40)),
        "elements",
    ),
    "nested arrays": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 99),
        "nests",
    ),
    "an unknown value type": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<I", 77)),
        "unknown type 77",
    ),
    "a key twice": (build(key_count=len(METADATA) + 1, raw_metadata=text("general.architecture")), "twice"),
    "no UTF-8": (build(metadata={}, key_count=1, raw_metadata=struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
    "a list with no UTF-8": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<IIQQ", broken.ARRAY, 8, 1, 1) + b"\xff"),
        "'a' is not UTF-8",
    ),
    "a list longer than the file": (
        build(metadata={}, key_count=1, raw_metadata=text("a") + struct.pack("<IIQ", broken.ARRAY, 8, 4000)),
        "truncated",
    ),
    "a tensor twice": (build(infos=[*tensors(), tensors()[0]]), "twice"),
    "five dimensions": (build(infos=[("a", (1,) * 5, 0, None)]), "dimensions"),
    "no extent": (build(infos=[("a", (0, 4), 0, None)]), "shape"),
    "an unknown tensor type": (build(infos=[("a", (32,), 999, None)]), "unknown type 999"),
    "half a block": (build(infos=[("a", (33, 4), 8, None)]), "blocks of 32"),
    "a product that overflows": (build(infos=[("a", (2**32, 2**31, 4), 0, None)]), "truncated"),
    "an offset beyond the file": (build(infos=[("a", (32,), 0, 2**50)]), "truncated"),
    "an unaligned offset": (build(infos=[("a", (32,), 0, 7)]), "alignment"),
    "overlapping tensors": (build(infos=[("a", (32,), 0, 0), ("b", (32,), 0, 64)]), "overlap"),
    "an alignment of 0": (build(metadata=METADATA | {"general.alignment": 0}), "alignment"),
    "an alignment of 2^31": (build(metadata=METADATA | {"general.alignment": 2**31}), "alignment"),
    "the last byte missing": (build(cut=-1), "truncated"),
    "the data missing": (build(cut=-6000), "truncated"),
    "no architecture": (build(metadata={"general.name": "x"}), "general.architecture"),
    "an unknown architecture": (build(metadata={"general.architecture": "mamba"}), "supported: llama"),
    "experts": (build(metadata=METADATA | {"llama.expert_count": 8}), "experts"),
    "yarn": (build(metadata=METADATA | {"llama.rope.scaling.type": "yarn"}), "yarn"),
    "two ways to scale": (
        build(
            metadata=METADATA | {"llama.rope.scaling.type": "linear"},
            infos=[*tensors(), ("rope_freqs.weight", (4,), 0, None)],
        ),
        "together with rope_freqs",
    ),
    "values of another width": (
        build(metadata=METADATA | {"llama.attention.key_length": 8, "llama.attention.value_length": 4}),
        "different widths",
    ),
    "no embedding": (build(infos=tensors()[1:]), "token_embd"),
    "partial rotation": (build(metadata=METADATA | {"llama.rope.dimension_count": 4}), "rotates 4 of 8"),
    "a part of a split model": (build(metadata=METADATA | {"split.count": 3}), "merge"),
    "no heads": (build(metadata=METADATA | {"llama.attention.head_count": 0}), "head_count"),
    "heads that do not divide": (build(metadata=METADATA | {"llama.attention.head_count_kv": 3}), "multiple"),
    "a text for a number": (build(metadata=METADATA | {"llama.block_count": "2"}), "block_count"),
    "NaN": (build(metadata=METADATA | {"llama.rope.freq_base": NAN}), "freq_base"),
    "more layers than there are": (build(metadata=METADATA | {"llama.block_count": 2}), "missing: layers.1.q"),
    "another width": (build(metadata=METADATA | {"llama.feed_forward_length": 96}), "has shape"),
    "a tensor left over": (build(infos=[*tensors(), ("blk.0.attn_sinks.weight", (4,), 0, None)]), "attn_sinks"),
    "a tensor missing": (build(infos=tensors()[:-1]), "missing: norm"),
    "a canonical name in the file": (build(infos=[*tensors(), ("layers.0.q", (32, 32), 8, None)]), "layers.0.q"),
    "an end outside of the vocabulary": (build(metadata=METADATA | {"tokenizer.ggml.eos_token_id": 16}), "vocabulary"),
}


@pytest.mark.parametrize("format", ["native", "fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["token_embd", "output_norm", "blk.0.ffn_down"])
def test_nan_in_the_data_is_named(name, format, put, tmp_path):
    path = put(build())
    info = GgufFile(tmp_path / "model.gguf").tensors[f"{name}.weight"]
    with open(path, "r+b") as file:
        file.seek(info.start)
        file.write(b"\xff" * 4)
    with pytest.raises(ModelFileError, match=rf"{name}\.weight.*NaN"):
        load_model(path, format=format)


@pytest.mark.parametrize(("data", "message"), LIES.values(), ids=LIES.keys())
def test_a_lying_file_is_told_so(data, message, put):
    with pytest.raises((ModelFileError, UnsupportedModel), match=message):
        load_model(put(data))


def load_or_refuse(path: str) -> None:
    """Any error but Paceline's own fails the test."""
    with contextlib.suppress(ModelError):
        load_model(path, format="native")
        load_model(path, format="fp32")


VALID = build()
HEAD = VALID.index(b"output_norm.weight") + 60
EXTREMES = [0, 1, 2**8 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, len(VALID), len(VALID) + 1]


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, len(VALID)))
def test_any_truncation_is_refused_or_loads(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "model.gguf"
    path.write_bytes(VALID[:cut])
    load_or_refuse(str(path))


@settings(max_examples=400, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, HEAD), st.integers(0, 255)), max_size=4),
    places=st.lists(st.tuples(st.integers(0, HEAD), st.sampled_from(EXTREMES)), max_size=2),
    inserted=st.tuples(st.integers(0, HEAD), st.binary(max_size=9)),
)
def test_any_damage_is_refused_or_loads(flips, places, inserted, tmp_path_factory):
    data = bytearray(VALID)
    for at, byte in flips:
        data[at] = byte
    for at, number in places:
        data[at : at + 8] = struct.pack("<Q", number)
    data[inserted[0] : inserted[0]] = inserted[1]
    path = tmp_path_factory.mktemp("damage") / "model.gguf"
    path.write_bytes(data)
    load_or_refuse(str(path))


def test_windows_and_sampling_of_the_metadata(put):
    path = put(build(metadata=METADATA | {"llama.attention.sliding_window": 9, "general.sampling.temp": 0.5}))
    model = open_model(path)
    assert model.config.windows == (9,)
    assert model.generation.values == {"temperature": 0.5}


def test_tokens_that_are_no_texts_end_nothing(put):
    tokens = struct.pack("<IIQ", broken.ARRAY, broken.ARRAY, 1) + struct.pack("<IQI", broken.U32, 1, 7)
    types = struct.pack("<IIQI", broken.ARRAY, broken.U32, 1, 3)
    raw = text("tokenizer.ggml.tokens") + tokens + text("tokenizer.ggml.token_type") + types
    metadata = {key: item for key, item in METADATA.items() if key != "tokenizer.ggml.tokens"}
    path = put(build(metadata=metadata, key_count=len(metadata) + 2, raw_metadata=raw))
    assert open_model(path).config.eos_ids == (2,)


def test_the_config_reads_rotary_factors_off_their_tensor(put, tmp_path):
    put(build(infos=[*tensors(), ("rope_freqs.weight", (4,), 0, None)]))
    with pytest.raises(ModelFileError, match="not positive"):  # the noise has negative ones
        config_from_gguf(GgufFile(tmp_path / "model.gguf"))
