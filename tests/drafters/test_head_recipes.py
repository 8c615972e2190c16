"""Heads by what a user calls them: from directories to engines that draft with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from paceline.cli.main import build_parsers
from paceline.cli.options import drafters_of
from paceline.drafters import registry, shipped
from paceline.errors import InvalidRequest, ModelFileError, ModelNotFound, UnknownOption, UnsupportedModel
from paceline.llm import LLM
from paceline.models.load import open_model
from paceline.models.resolve import KNOWN
from paceline.models.weights import Format
from paceline.runner.lanes import Lanes
from paceline.runner.loading.models import ReadyModel, read_model
from paceline.runner.rounds.protocol import Seat
from paceline.runner.rounds.traits import LONGEST_COPY, SPARE_STATES
from paceline.types import OFF, SamplingParams, Speculation
from tests.block_heads import LAYOUTS
from tests.cli.tiny_model import write_model
from tests.heads import eagle_tensors, eagle_values, medusa_tensors, random_eagle, random_medusa, write_head
from tests.mtp_checkpoints import LAYOUTS as MTP

OPTIONS = {"max_context": 128, "max_sequences": 2, "kv_memory": 1 << 22, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BLOCKS = {  # names of directories → layouts of tests/block_heads.py
    "block": "dspark",
    "block-2": "dflash2",
    "block-windows": "dflash, windows both ways",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, and heads for it."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "target").mkdir()
    target = write_model(folder / "target")
    config = open_model(str(target)).config
    eagle, medusa = random_eagle(config, draft_vocab=60), random_medusa(config)
    write_head(folder / "eagle", eagle_values(eagle), eagle_tensors(eagle))
    for name, layout in BLOCKS.items():
        LAYOUTS[layout].write(folder / name, vocab=config.vocab_size)
    write_head(folder / "medusa", {"medusa_num_heads": 3}, medusa_tensors(medusa))
    return {name: str(folder / name) for name in ("target", "eagle", "medusa", *BLOCKS)}


@pytest.mark.parametrize("format", ["int8", "fp32"])
def test_two_kinds_of_heads_on_one_target(folders: dict[str, str], format: str) -> None:
    """Each gets the hidden states that it reads, out of those that both do."""
    words = [f"{kind}:{folders[kind]},min_confidence=0" for kind in ("eagle", "medusa")]
    llm = LLM(folders["target"], drafter=words, format=format, **OPTIONS)
    wanted = llm.generate("abc def", PARAMS, speculation=OFF)[0].tokens
    for kind in ("eagle", "medusa"):
        answer = llm.generate("abc def", PARAMS, speculation=Speculation(drafter=kind))[0]
        assert answer.tokens == wanted
        assert answer.stats.drafted > 0
        assert llm.engine.drafters[kind].out is None
    assert len(llm.engine.probes.forward.taps) == 3
    how = {kind: made.how for kind, made in llm.parts.drafters.items()}
    assert ("compiled" in how["eagle"]) == ("compiled" in how["medusa"]) == (format == "int8")
    assert "60 tokens" in how["eagle"]


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_heads_of_random_weights(folders: dict[str, str], kind: str, format: Format) -> None:
    """They fit any target: one of two layers has fewer taps than a block drafter would like."""
    llm = LLM(folders["target"], drafter=f"{kind}:shape,max_draft=4,min_confidence=0", format=format, **OPTIONS)
    [answer] = llm.generate("abc def", PARAMS)
    assert answer.tokens == llm.generate("abc def", PARAMS, speculation=OFF)[0].tokens
    assert answer.stats.drafted > 0
    assert "torch" in llm.parts.drafters[kind].how or kind == "block"


@pytest.mark.parametrize(("format", "option", "most"), [("int8", "", 7), ("int4", "", 7), ("int4", ",max_draft=3", 3)])
def test_the_longest_draft_has_seven_tokens_unless_another_number_is_given(
    folders: dict[str, str], format: Format, option: str, most: int
) -> None:
    llm = LLM(folders["target"], drafter=f"eagle:{folders['eagle']}{option}", format=format, **OPTIONS)
    assert llm.engine.drafters["eagle"].max_draft == most


def test_kv_memory_is_shared_with_a_head(folders: dict[str, str]) -> None:
    pages = [
        LLM(folders["target"], drafter=words, **OPTIONS).parts.memory.page_bytes
        for words in ([], [f"eagle:{folders['eagle']}"], [f"medusa:{folders['medusa']}"])
    ]
    assert pages[0] < pages[1]
    assert pages[0] == pages[2]


def test_a_target_that_comes_with_a_head(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts where nobody says otherwise."""
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    monkeypatch.setitem(KNOWN, "some", lambda: Path(folders["target"]))
    args = build_parsers()[0].parse_args(["generate", "some", "p", "--device", "cpu"])
    assert registry.shipped_drafters("some") == []
    assert drafters_of(args) == ["suffix"]
    assert [*LLM("some", **OPTIONS).parts.drafters] == ["suffix"]
    shutil.copytree(folders["eagle"], tmp_path / "some")
    assert registry.shipped_drafters("some") == ["eagle:some"]
    assert registry.shipped_drafters(folders["target"]) == []
    assert drafters_of(args) == ["eagle:some", "suffix", "portfolio"]
    assert [*LLM("some", **OPTIONS).parts.drafters] == ["eagle", "suffix", "portfolio"]
    assert not LLM("some", drafter=[], **OPTIONS).parts.drafters


def test_the_head_that_is_shipped() -> None:
    folder = shipped.SHIPPED / "smollm2"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16_100_000
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.get_slice("lm_head.sketch").get_shape()[1] == shape["hidden_size"]
        assert file.get_slice("d2t").get_shape() == [shape["draft_vocab_size"]]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("eagle:/no/such/place", ModelNotFound, "no model '/no/such/place'"),
        ("eagle:{target}", UnsupportedModel, "is no EAGLE head"),
        ("eagle:{eagle},format=fp8", UnknownOption, "format of the eagle drafter 'fp8'"),
        ("eagle:{eagle},copy=0", InvalidRequest, "no option copy any more, leave it out: a lookup is loaded beside it"),
        ("eagle:{eagle},depth=3", UnknownOption, "option of the eagle drafter 'depth'"),
        ("eagle:{eagle},branches=3", InvalidRequest, "branches 3: beside .* the head runs in torch, .* 1 for chains"),
        ("medusa:{eagle}", ModelFileError, "medusa_num_heads is missing"),
    ],
)
def test_what_is_no_head(folders: dict[str, str], words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(folders["target"], drafter=words.format(**folders), **OPTIONS)


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa", "mtp"])
@pytest.mark.parametrize("words", ["{path}", "model:{path}", "model:{path},format=int8"])
def test_a_head_that_is_given_as_a_model_says_its_kind(
    kind: str, words: str, folders: dict[str, str], tmp_path: Path
) -> None:
    path = folders.get(kind) or str(MTP["alone for Llama"].write(tmp_path)[1])
    with pytest.raises(InvalidRequest, match=f"{path} holds a head, not a model: give it as {kind}:{path}$"):
        registry.recipe(words.format(path=path), read_model(folders["target"], format="fp32"))


def test_a_broken_model_is_no_head(folders: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(folders["target"], tmp_path / "broken")
    config = tmp_path / "broken" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": "x"}))
    with pytest.raises(ModelFileError, match="hidden_size is 'x'"):
        registry.recipe(f"model:{config.parent}", read_model(folders["target"], format="fp32"))


def test_memory_of_a_head_is_that_of_its_own_weights(folders: dict[str, str]) -> None:
    """Weights that a pass does not read count; the target's own, which it reads, do not."""
    ready = read_model(folders["target"], format="fp32")
    eagle = registry.recipe(f"eagle:{folders['eagle']}", ready)
    stored = open_model(folders["target"]).config
    tensors = [shape for name, shape in _shapes(folders["eagle"]).items() if name not in ("d2t", "t2d")]
    assert eagle.own_bytes == 4 * sum(map(prod, tensors)) > eagle.pass_bytes
    block = registry.recipe(f"block:{folders['block']}", ready)
    assert block.own_bytes == 4 * sum(map(prod, _shapes(folders["block"]).values()))
    assert block.pass_bytes > 4 * stored.vocab_size * stored.hidden_size, "the target's output layer is read"


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping


@pytest.fixture
def beside(folders: dict[str, str]) -> ReadyModel:
    """The target as a GPU has it, by Triton's interpreter."""
    pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")
    from paceline.runner.forwards.cuda import CudaDecoder

    ready = read_model(folders["target"], format="fp32")
    weights = {name: weight.float() for name, weight in ready._read().items() if isinstance(weight, Tensor)}
    made = CudaDecoder(ready.model.config, weights, max_context=128, dtype=torch.float32, device="cpu", pdl=False)
    return replace(ready, decoder=made, stored=None)


def test_heads_beside_a_target_on_a_gpu(folders: dict[str, str], beside: ReadyModel) -> None:
    """Only rounds run them: the host builds nothing, and the head's keys and values lie under the target's pages."""
    from paceline.runner.forwards.cuda import CudaForward, new_kv

    target = CudaForward(beside.decoder, new_kv(beside.model.config, num_pages=6, dtype=torch.float32, device="cpu"))
    made = {
        words: registry.recipe(words, beside)
        for words in (f"eagle:{folders['eagle']},max_draft=3", "eagle:shape", f"medusa:{folders['medusa']}")
    }
    drafters = []
    for one in made.values():
        assert one.build(None) is None
        assert one.taps == ()
        drafters.append(one.on_device(None, target))
    layers = beside.model.config.num_layers
    assert [by.max_draft for by in drafters] == [3, 8, 16], "by default trees of 8 for few sequences"
    assert drafters[0].head.kv.num_pages == drafters[1].head.kv.num_pages == 6
    assert (len(drafters[0].head.ids), drafters[2].taps) == (60, (layers,))
    assert max(drafters[1].taps) < layers
    assert [one.page_bytes > 0 for one in made.values()] == [True, True, False]
    held = 1 + LONGEST_COPY + SPARE_STATES  # a portfolio may share them
    assert next(iter(made.values())).lane_bytes == held * 3 * beside.model.config.hidden_size * 4


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_format_that_is_not_used_is_said(
    kind: str, folders: dict[str, str], beside: ReadyModel, caplog: pytest.LogCaptureFixture
) -> None:
    said = "format int8 is not used: it is one of heads that run compiled on a CPU"
    for target in (read_model(folders["target"], format="fp32"), beside):
        assert said not in registry.recipe(f"{kind}:{folders[kind]}", target).how
        assert said in registry.recipe(f"{kind}:{folders[kind]},format=int8", target).how
    assert sum(said in record.getMessage() for record in caplog.records) == 2
    compiled = read_model(folders["target"], format="int8")
    assert registry.recipe(f"{kind}:{folders[kind]},format=int8", compiled).how.endswith(": compiled")


@pytest.mark.parametrize("option", ["max_draft=0", "min_confidence=2"])
def test_options_of_medusa_beside_a_gpu(option: str, folders: dict[str, str], beside: ReadyModel) -> None:
    with pytest.raises(InvalidRequest, match=r"max_draft \d+ must be at least 1, min_confidence .* in \[0, 1\]"):
        registry.recipe(f"medusa:{folders['medusa']},{option}", beside)


def test_a_head_for_another_target_is_refused_beside_a_gpu(
    folders: dict[str, str], beside: ReadyModel, tmp_path: Path
) -> None:
    wide = random_eagle(replace(beside.model.config, hidden_size=96), draft_vocab=60)
    path = write_head(tmp_path / "wide", eagle_values(wide), eagle_tensors(wide))
    with pytest.raises(InvalidRequest, match="a head for hidden states of size 96, the target's have"):
        registry.recipe(f"eagle:{path}", beside)


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_a_block_drafter_beside_a_target_on_a_gpu(kind: str, folders: dict[str, str], beside: ReadyModel) -> None:
    """Each sequence has a page for its block, behind the pages of the target, and the states that are not read yet."""
    made = registry.recipe(f"{kind}:{folders['block']},max_draft=3,min_confidence=0.1", beside)
    lanes = Lanes(count=5, max_context=32, max_draft=3)
    context: Any = SimpleNamespace(pool=SimpleNamespace(num_pages=6), lanes=lanes)
    assert made.build(context) is None
    assert made.on_device is not None
    drafter: Any = made.on_device(None, SimpleNamespace())
    layers = beside.model.config
    assert (made.name, made.taps, made.vocabulary) == ("block", (), layers.vocab_size)
    assert (drafter.max_draft, drafter.threshold(Seat(0, 3))) == (3, 0.1)
    assert drafter.head.kv.num_pages == 6 + 1 + 5
    assert made.page_bytes == 16 * 2 * 2 * layers.num_kv_heads * layers.head_dim * 2
    held = 1 + LONGEST_COPY + SPARE_STATES  # a portfolio may share them
    assert made.lane_bytes == held * 3 * layers.hidden_size * 4 + made.page_bytes
    assert "a DSpark block drafter" in made.how
    assert "bfloat16" in made.how


@pytest.mark.parametrize(
    ("name", "option", "error", "message"),
    [
        ("block", ",max_draft=6", InvalidRequest, "max_draft 6 must be 1 to 5, the tokens of one block"),
        ("block", ",min_confidence=2", InvalidRequest, "min_confidence 2.0 must be in"),
        ("block-windows", "", UnsupportedModel, "layers with a window whose rows see later ones, which run on a CPU"),
    ],
)
def test_block_drafters_that_are_refused_beside_a_gpu(
    name: str, option: str, error: type[Exception], message: str, folders: dict[str, str], beside: ReadyModel
) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(f"block:{folders[name]}{option}", beside)
