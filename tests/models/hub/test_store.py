"""The models that are here: Paceline's own, and those in the cache of huggingface_hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ModelNotFound
from paceline.models.hub.names import HubName
from paceline.models.hub.store import find, place_of, remove, stored

COMMIT = "c0ffee" * 6 + "c0ff"


def put(path: Path, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


@pytest.fixture
def theirs(home: Path) -> Path:
    """A model in the cache of huggingface_hub: its file is a link to a blob."""
    folder = home / "huggingface" / "hub" / "models--org--theirs"
    put(folder / "refs" / "main").write_text(COMMIT)
    blob, link = put(folder / "blobs" / "abc", 30), folder / "snapshots" / COMMIT / "theirs-Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    return link


def test_listing_and_finding(home: Path, theirs: Path) -> None:
    put(place_of("org/two") / "two-Q4_0.gguf", 10)
    put(place_of("org/two") / "sub" / "two-q8_0.gguf", 20)
    put(place_of("org/whole") / "config.json")
    put(place_of("org/whole") / "model.safetensors", 40)
    put(place_of("org/begun") / "model.safetensors.abc.part", 5)
    assert [(model.name, model.bytes, model.format, model.owner) for model in stored()] == [
        ("org/begun", 5, "unfinished: pull it again", "paceline"),
        ("org/two:Q8_0", 20, "GGUF Q8_0", "paceline"),
        ("org/two:Q4_0", 10, "GGUF Q4_0", "paceline"),
        ("org/whole", 40, "safetensors", "paceline"),
        ("org/theirs:Q8_0", 30, "GGUF Q8_0", "huggingface_hub"),
    ]
    assert find(HubName("org/two")) == place_of("org/two") / "two-Q4_0.gguf"
    assert find(HubName("org/two", "q8_0")) == place_of("org/two") / "sub" / "two-q8_0.gguf"
    assert find(HubName("org/whole")) == place_of("org/whole")
    assert find(HubName("org/theirs", "Q8_0")) == theirs
    for nowhere in (
        HubName("org/two", "Q2_K"),
        HubName("org/begun"),
        HubName("org/none"),
        HubName("org/whole", "Q8_0"),
    ):
        assert find(nowhere) is None


def test_removing(home: Path, theirs: Path) -> None:
    put(place_of("org/two") / "two-Q4_0.gguf", 10)
    put(place_of("org/two") / "two-Q8_0.gguf", 20)
    assert remove("org/two:q4_0") == 10
    assert [model.name for model in stored() if model.owner == "paceline"] == ["org/two:Q8_0"]
    put(place_of("org/two") / "two-Q6_K.gguf.abc.part", 5)
    assert remove("org/two") == 25
    assert not place_of("org/two").parent.exists()
    for name in ("org/two", "org/theirs", "smollm2", "../two", "org/two:Q8_0"):
        with pytest.raises(ModelNotFound, match="was not fetched by `paceline pull`"):
            remove(name)
    assert theirs.exists()


@pytest.mark.parametrize("commit", ["../../..", "", "gone"])
def test_a_cache_of_the_hub_that_lies(home: Path, theirs: Path, commit: str) -> None:
    (theirs.parent.parent.parent / "refs" / "main").write_text(commit)
    assert find(HubName("org/theirs")) is None
    assert stored() == []
