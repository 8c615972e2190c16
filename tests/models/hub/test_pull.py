"""Downloads from a stand-in of the hub: whole, checked and continued, whatever the connection does."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from paceline.errors import ModelError, ModelFileError, ModelNotFound, StorageError, UnsupportedModel
from paceline.models.hub import client
from paceline.models.hub.names import HubName
from paceline.models.hub.pull import pull
from paceline.models.hub.store import place_of
from paceline.models.resolve import resolve
from tests.models.hub.conftest import Serve
from tests.models.hub.stand_in import COMMIT, StandIn, running

WEIGHTS = bytes(range(256)) * 40
NAME = HubName("org/tiny-GGUF")
FILE = "tiny-q4_k_m.gguf"
GGUFS = {NAME.id: {"README.md": b"read me", FILE: WEIGHTS, "tiny-q8_0.gguf": WEIGHTS[::-1]}}
DIRECTORY = {
    "org/tiny": {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": WEIGHTS,
        "model-00002-of-00002.safetensors": WEIGHTS[:100],
        "model.safetensors.index.json": b"{}",
        "tokenizer.json": b"{...}",
        "pytorch_model.bin": b"pickle",
        "original/params.json": b"{}",
        "consolidated.safetensors": WEIGHTS,
    }
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CHUNK", 1000)


def downloads(hub: StandIn) -> list[str | None]:
    """The Range of every download, None for one of the whole file."""
    return [headers.get("Range") for path, headers in hub.asked if "/resolve/" in path]


def fetched() -> bytes:
    return (place_of(NAME.id) / FILE).read_bytes()


def leftovers() -> list[str]:
    return [path.name for path in place_of(NAME.id).rglob("*.part")]


def test_one_file_of_the_preferred_quantisation(hub: Serve) -> None:
    served, seen = hub(GGUFS), []
    [file] = pull(NAME, lambda done, total: seen.append((done, total)))
    assert (file.path, file.size) == (FILE, len(WEIGHTS))
    assert fetched() == WEIGHTS
    assert [path.name for path in place_of(NAME.id).iterdir()] == [FILE]
    assert seen[-1] == (len(WEIGHTS), len(WEIGHTS))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [path for path, _ in served.asked] == [f"/api/models/{NAME.id}", f"/{NAME.id}/resolve/{COMMIT}/{FILE}"]


def test_what_is_here_is_not_fetched_again_unless_it_differs(hub: Serve) -> None:
    served = hub(GGUFS)
    pull(NAME)
    pull(NAME)
    assert downloads(served) == [None]
    (place_of(NAME.id) / FILE).write_bytes(WEIGHTS[::-1])
    pull(NAME)
    assert downloads(served) == [None, None]
    assert fetched() == WEIGHTS


def test_a_broken_connection_goes_on_where_it_ended(hub: Serve) -> None:
    served = hub(GGUFS, breaks_at=[3000, 0, 2500])
    pull(NAME)
    assert fetched() == WEIGHTS
    assert downloads(served) == [None, "bytes=3000-", "bytes=3000-", "bytes=5500-"]


def test_a_later_run_goes_on_where_the_first_ended(hub: Serve) -> None:
    served = hub(GGUFS, breaks_at=[3000], statuses=[])
    served.breaks_at += [0] * client.MAX_ATTEMPTS
    with pytest.raises(ModelNotFound, match=r"the connection ended at byte 3000 of 10240.*try again to go on"):
        pull(NAME)
    assert len(leftovers()) == 1
    served.breaks_at.clear()
    served.asked.clear()
    pull(NAME)
    assert downloads(served) == ["bytes=3000-"]
    assert fetched() == WEIGHTS
    assert not leftovers()


def test_a_server_without_ranges_sends_everything_again(hub: Serve) -> None:
    served = hub(GGUFS, breaks_at=[3000], ranges=False)
    pull(NAME)
    assert downloads(served) == [None, "bytes=3000-"]
    assert fetched() == WEIGHTS


def test_errors_of_the_server_pass(hub: Serve) -> None:
    served = hub(GGUFS, statuses=[500, 503, 429])
    pull(NAME)
    assert fetched() == WEIGHTS
    served.statuses += [502] * client.MAX_ATTEMPTS
    (place_of(NAME.id) / FILE).unlink()
    with pytest.raises(ModelNotFound, match="Bad Gateway"):
        pull(NAME)


def test_a_wrong_byte_is_noticed(hub: Serve) -> None:
    hub(GGUFS, spoils=1)
    with pytest.raises(ModelFileError, match="another digest than the hub states"):
        pull(NAME)
    assert not (place_of(NAME.id) / FILE).exists()
    assert not leftovers()
    pull(NAME)
    assert fetched() == WEIGHTS


def test_a_bad_beginning_is_fetched_again(hub: Serve) -> None:
    served = hub(GGUFS, breaks_at=[3000, *[0] * client.MAX_ATTEMPTS])
    with pytest.raises(ModelNotFound):
        pull(NAME)
    [part] = place_of(NAME.id).rglob("*.part")
    part.write_bytes(b"x" * 3000)
    served.breaks_at.clear()
    served.asked.clear()
    pull(NAME)
    assert downloads(served) == ["bytes=3000-", None]
    assert fetched() == WEIGHTS


def test_small_files_are_checked_by_their_blob(hub: Serve) -> None:
    served = hub(DIRECTORY, spoils=1)
    with pytest.raises(ModelFileError):
        pull(HubName("org/tiny"))
    served.spoils = 0
    files = [file.path for file in pull(HubName("org/tiny"))]
    assert files[-1] == "config.json", "it is last, so that an incomplete directory is not taken for a model"
    assert sorted(files) == sorted(path.name for path in place_of("org/tiny").iterdir())
    assert not {"pytorch_model.bin", "original/params.json", "consolidated.safetensors"} & set(files)


def test_the_token_goes_to_the_hub_alone(hub: Serve, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(StandIn(GGUFS)) as storage:
        served = hub(GGUFS, token="secret", redirects_to=storage.url)
        with pytest.raises(ModelNotFound, match=r"private or gated \(401\).*set HF_TOKEN"):
            pull(NAME)
        monkeypatch.setenv("HF_TOKEN", "wrong")
        with pytest.raises(ModelNotFound, match="HF_TOKEN is not allowed to read it"):
            pull(NAME)
        monkeypatch.delenv("HF_TOKEN")
        (home / "huggingface").mkdir()
        (home / "huggingface" / "token").write_text("secret\n")
        pull(NAME)
        assert fetched() == WEIGHTS
        assert served.asked[-1][1]["Authorization"] == "Bearer secret"
        assert all("Authorization" not in headers for _, headers in storage.asked)


def test_a_repository_that_does_not_exist(hub: Serve) -> None:
    hub(GGUFS)
    with pytest.raises(ModelNotFound, match=r"org/none: not found on http.*; check the name"):
        pull(HubName("org/none"))


def test_nobody_answers(hub: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelNotFound, match=r"could not be fetched from http://127.0.0.1:1"):
        pull(NAME)


@pytest.mark.parametrize(
    "lies",
    [
        {"siblings": None},
        {"siblings": [{"rfilename": "a.gguf"}]},
        {"siblings": [7]},
        {"siblings": [{"rfilename": "a.gguf", "size": -1, "blobId": "0" * 40}]},
        {"siblings": [{"rfilename": "a.gguf", "size": 5, "blobId": "short"}]},
        {"siblings": [{"rfilename": "../../a.gguf", "size": 5, "blobId": "0" * 40}]},
        {"siblings": [{"rfilename": "/etc/a.gguf", "size": 5, "blobId": "0" * 40}]},
        {"siblings": [{"rfilename": "a\\..\\b.gguf", "size": 5, "blobId": "0" * 40}]},
        {"sha": None},
    ],
    ids=str,
)
def test_a_listing_that_lies_is_refused(hub: Serve, home: Path, lies: dict[str, object]) -> None:
    hub(GGUFS, lies=lies)
    with pytest.raises(ModelError):
        pull(NAME)
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_offline_is_respected(hub: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = hub(GGUFS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        pull(NAME)
    assert not served.asked


def test_two_processes_do_not_write_one_file(hub: Serve) -> None:
    hub(GGUFS, breaks_at=[3000, *[0] * client.MAX_ATTEMPTS])
    with pytest.raises(ModelNotFound):
        pull(NAME)
    [part] = place_of(NAME.id).rglob("*.part")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelFileError, match="another process is fetching it"):
            pull(NAME)


def test_a_full_disk_and_a_closed_place(hub: Serve, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = hub(GGUFS, lies={"siblings": [{"rfilename": FILE, "size": 1 << 60, "blobId": "0" * 40}]})
    with pytest.raises(StorageError, match=r"do not fit on the disk.*paceline rm"):
        pull(NAME)
    served.lies = {}
    (home / "cache").write_text("a file where a directory should be")
    with pytest.raises(StorageError, match="cannot write"):
        pull(NAME)
    assert downloads(served) == []


def test_a_name_is_fetched_once_and_then_found_without_the_hub(hub: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(GGUFS | DIRECTORY)
    paths = [resolve(name) for name in ("org/tiny", "org/tiny-GGUF", "org/tiny-GGUF:q8_0", f"org/tiny-GGUF:{FILE}")]
    folder = place_of(NAME.id)
    assert paths == [place_of("org/tiny"), folder / FILE, folder / "tiny-q8_0.gguf", folder / FILE]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert resolve("org/tiny-GGUF:Q8_0") == folder / "tiny-q8_0.gguf"
    with pytest.raises(ModelNotFound, match="'org/tiny-GGUF:Q2_K' is no path here, and on the hub: "):
        resolve("org/tiny-GGUF:Q2_K")


def test_a_repository_without_a_model(hub: Serve) -> None:
    adapter = {"org/lora": {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}}
    hub(adapter | {"org/old": {"config.json": b"{}", "pytorch_model.bin": WEIGHTS}, "org/empty": {"README.md": b""}})
    for name, error, message in (
        ("org/lora", UnsupportedModel, "is a LoRA adapter"),
        ("org/old", UnsupportedModel, "as pickles only"),
        ("org/empty", ModelNotFound, "neither a GGUF file nor config.json"),
    ):
        with pytest.raises(error, match=message):
            resolve(name)
