"""Directories of safetensors: single, sharded, damaged, and with names or links that lead outside."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.errors import ModelError, ModelFileError, UnknownOption, UnsupportedModel
from paceline.kernels.quant import Float8, Quantised, dequantise
from paceline.models import weights as weights_module
from paceline.models.load import load_model
from paceline.models.safetensors import INDEX, SINGLE, SafetensorsFolder
from paceline.models.weights import load_weights, resolve_format, weight_bytes
from paceline.runner.forwards.torch import TorchForward
from tests.models.tiny import PAGES, load_eager, run

TOKENS = list(range(5, 29))


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of a tiny model's directory that a test may spoil."""
    return shutil.copytree(tiny("llama2")[1], tmp_path / "model")


@pytest.fixture
def sharded(tiny, tmp_path):
    tiny("llama2")[0].save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert not (tmp_path / "sharded" / SINGLE).exists()
    return tmp_path / "sharded"


def rewrite(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def reindex(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_are_one_model(tiny, sharded):
    _, single = tiny("llama2")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(run(load_eager(single), TOKENS, (24,)), run(load_eager(sharded), TOKENS, (24,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(dtype, tiny, folder):
    _, single = tiny("llama2")
    rewrite(folder, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    exact, rounded = run(load_eager(single), TOKENS, (24,)), run(load_eager(folder), TOKENS, (24,))
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.std()
    assert load_model(str(folder), format="native").weights["layers.0.q"].dtype == dtype
    assert load_model(str(folder)).weights["layers.0.q"].dtype == torch.float32


def test_a_safetensors_file_stands_for_its_directory(folder):
    assert load_model(str(folder / SINGLE)).path == folder


def test_formats(folder):
    model = load_model(str(folder), format="int8")
    source = SafetensorsFolder(folder)
    for format, groups, bits, head in (("int8", 1, 8, 8), ("int4", 2, 4, 8)):
        weights = load_weights(source, model.config, format=format)
        q, embed = weights["layers.1.q"], weights["embed"]
        assert isinstance(q, Quantised)
        assert isinstance(embed, Quantised)
        assert (q.scale.shape[1], q.bits, embed.bits) == (groups, bits, head)
        assert weights["layers.1.attn_norm"].dtype == torch.float32
    assert load_weights(source, model.config, format="bf16")["layers.1.q"].dtype == torch.bfloat16
    with pytest.raises(UnknownOption, match="did you mean 'int8'"):
        load_weights(source, model.config, format="int88")


def test_8_bit_floats_survive_being_read_in_pieces(folder, monkeypatch):
    config, source = load_model(str(folder)).config, SafetensorsFolder(folder)
    floats, whole = load_weights(source, config), load_weights(source, config, format="fp8")
    monkeypatch.setattr(weights_module, "CHUNK", 5 * config.hidden_size)
    pieces = load_weights(source, config, format="fp8")
    for name in ("embed", "layers.1.q", "layers.2.down"):
        assert isinstance(pieces[name], Float8)
        assert torch.equal(dequantise(pieces[name]), dequantise(whole[name]))
        torch.testing.assert_close(dequantise(pieces[name]), floats[name], rtol=0.07, atol=1e-3)
    assert weight_bytes(pieces["layers.1.q"]) == floats["layers.1.q"].numel() + 4 * len(floats["layers.1.q"])
    assert pieces["layers.1.attn_norm"].dtype == torch.float32
    ours = TorchForward(config, pieces, num_pages=PAGES)
    exact = run(load_eager(folder), TOKENS, (24,))
    assert (run(ours, TOKENS, (24,)) - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize(
    ("format", "quantised", "device", "wanted"),
    [
        ("auto", False, "cpu", "fp32"),
        ("auto", False, "cuda", "bf16"),
        ("auto", True, "cuda", "native"),
        ("int4", False, "cuda", "int4"),
    ],
)
def test_what_auto_means(format, quantised, device, wanted):
    assert resolve_format(format, quantised=quantised, device=device) == wanted


def test_every_piece_goes_to_the_device(folder, monkeypatch):
    monkeypatch.setattr(weights_module, "_finite", lambda weight: True)  # a device without values
    for format in ("bf16", "fp8", "int8", "int4"):
        for weight in load_model(str(folder), format=format, device="meta").weights.values():
            parts = [weight] if isinstance(weight, torch.Tensor) else [weight.q, weight.scale]
            assert all(part.device.type == "meta" for part in parts)


def test_int4_needs_whole_groups(tiny, tmp_path):
    model, _ = tiny("llama2")
    config = type(model.config)(**{**model.config.to_dict(), "intermediate_size": 40})
    type(model)(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="multiple of 32"):
        load_model(str(tmp_path), format="int4")
    assert load_model(str(tmp_path), format="int8").config.intermediate_size == 40


def test_progress_ends_at_the_total(folder):
    seen: list[tuple[int, int]] = []
    load_model(str(folder), progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3 * 9 + 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for value in load_file(folder / SINGLE).values())


def test_a_head_beside_a_tied_embedding_is_ignored(tiny, tmp_path):
    folder = shutil.copytree(tiny("smollm2")[1], tmp_path / "model")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 64)}))
    assert "head" not in load_model(str(folder)).weights


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


SPOILT = {
    "missing": (drop("model.layers.2.mlp.up_proj.weight"), "missing: layers.2.up"),
    "left over": (put("model.layers.3.mlp.up_proj.weight", torch.zeros(2)), "no place for: model.layers.3.mlp.up"),
    "a canonical name": (put("layers.0.q", torch.zeros(64, 64)), "no place for: layers.0.q"),
    "a bias": (put("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)), "q_proj.bias"),
    "another shape": (put("model.norm.weight", torch.zeros(63)), r"\(63,\).*\(64,\)"),
    "integers": (put("model.norm.weight", torch.zeros(64, dtype=torch.int32)), "I32"),
    "float64": (put("model.norm.weight", torch.zeros(64, dtype=torch.float64)), "F64"),
    "NaN": (put("model.norm.weight", torch.full((64,), float("nan"))), "NaN"),
    "infinity": (put("lm_head.weight", torch.full((96, 64), float("inf"))), "NaN or infinite"),
    "a scalar": (put("model.norm.weight", torch.tensor(1.0)), "shape"),
}


@pytest.mark.parametrize(("change", "message"), SPOILT.values(), ids=SPOILT.keys())
def test_spoilt_tensors_are_named(change, message, folder):
    rewrite(folder, change)
    with pytest.raises((ModelFileError, UnsupportedModel), match=message):
        load_model(str(folder))


def test_rotary_buffers_are_harmless(folder):
    rewrite(folder, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8)))
    load_model(str(folder))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd.safetensors", "a/../../b.safetensors", "x.bin"])
def test_an_index_that_leads_out_is_refused(name, sharded):
    reindex(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    with pytest.raises(ModelFileError, match=r"leads out|not a \.safetensors"):
        load_model(str(sharded))


def test_a_symlink_that_leads_out_is_refused(folder, tmp_path):
    (folder / SINGLE).rename(tmp_path / "elsewhere.safetensors")
    (folder / SINGLE).symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelFileError, match="symlink"):
        load_model(str(folder))


def test_the_links_of_a_hub_cache_are_followed(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert load_model(str(snapshot)).config.vocab_size == 96


def test_an_index_that_lies_is_refused(sharded):
    reindex(sharded, lambda weight_map: weight_map.update({"no.such.tensor": next(iter(weight_map.values()))}))
    with pytest.raises(ModelFileError, match=r"no\.such\.tensor"):
        load_model(str(sharded))


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=shard.name):
        load_model(str(sharded))


def test_pickled_weights_are_refused_with_the_way_out(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="convert them to safetensors"):
        load_model(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFileError, match="neither"):
        load_model(str(folder))


def read_or_refuse(folder):
    """Any error but Paceline's own fails the test."""
    with contextlib.suppress(ModelError):
        source = SafetensorsFolder(folder)
        for name, shape in source.shapes().items():
            assert source.read_float(name, 0, shape[0]).shape == shape


SMALL = {"a": torch.zeros(4, 8), "b": torch.zeros(6, dtype=torch.float16)}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / SINGLE
    save_file(SMALL, path)
    return path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused_or_reads(data, small, tmp_path_factory):
    bytes_ = bytearray(small)
    for _ in range(data.draw(st.integers(0, 3))):
        bytes_[data.draw(st.integers(0, len(bytes_) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        bytes_[:8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 2**20, 2**40, 2**63, len(bytes_)])))
    folder = tmp_path_factory.mktemp("damage")
    (folder / SINGLE).write_bytes(bytes_[: data.draw(st.integers(0, len(bytes_)))])
    read_or_refuse(folder)


@settings(max_examples=200, deadline=None)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["F32", "BF16", "I64"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_header_is_refused_or_reads(header, tmp_path_factory):
    text = json.dumps(header).encode()
    folder = tmp_path_factory.mktemp("header")
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    read_or_refuse(folder)
