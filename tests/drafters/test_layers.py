"""The target's first layers as its drafter: which words are allowed, and what `layers:auto` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.drafters import layers, registry
from paceline.drafters.layers import choice, drafter
from paceline.drafters.layers.choice import DRAFTS, Choice, Texts, best, candidates, choose
from paceline.drafters.model import ModelDrafter
from paceline.errors import InvalidRequest, UnknownOption
from paceline.kernels.quant import quantise
from paceline.models.load import LoadedModel
from paceline.runner.forwards.compiled import CompiledForward
from paceline.tune.candidates import memory_of
from paceline.types import OffKind, Speculation
from tests.laws import under_law
from tests.rig import build
from tests.rig_drafters import RIGS, Made
from tests.runs import run, tokens_of
from tests.tiny_models import TARGET, tiny_tokenizer

PROMPTS = [torch.tensor([5, 7, 9, 11], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)]


def a_target(**fields: Any) -> Any:
    weights = {name: quantise(each) if each.dim() == 2 else each for name, each in TARGET.weights.items()}
    model = LoadedModel(kind="hf", path=Path("here"), config=TARGET.config, weights=weights, metadata={})
    given = {"name": "target", "tokenizer": tiny_tokenizer(), "compiled": True, "device": "cpu", "model": model}
    return SimpleNamespace(**given | {"decoder": None, "split": None, "stored": None, "pass_bytes": 1234} | fields)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return


@pytest.fixture
def a_decoder() -> Any:
    pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")
    from paceline.runner.forwards.cuda import CudaDecoder

    weights = dict(TARGET.weights)
    return CudaDecoder(TARGET.config, weights, max_context=64, dtype=torch.float32, device="cpu", pdl=False)


# ── words ──


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("layers", InvalidRequest, "layers: is no part of target, which has 2 layers: take layers:1 to layers:1, or"),
        ("layers:0", InvalidRequest, "layers:0 is no part of target"),
        ("layers:2", InvalidRequest, "layers:2 is no part of target, which has 2 layers"),
        ("layers:-1", InvalidRequest, "layers:-1 is no part"),
        ("layers:1.5", InvalidRequest, "layers:1.5 is no part"),
        ("layers:¹", InvalidRequest, "layers:¹ is no part"),
        ("layers:most", InvalidRequest, "or layers:auto for as many as pay on this machine"),
        ("layers:1,max_draf=2", UnknownOption, "unknown option of the layers drafter 'max_draf'; did you mean"),
        ("layers:auto,max_draft=x", InvalidRequest, "layers:max_draft must be a whole number, not 'x'"),
    ],
)
def test_bad_words(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, a_target())


def test_a_part_costs_what_it_reads() -> None:
    target = a_target()
    recipe = registry.recipe("layers:1,max_draft=3", target)
    assert (recipe.name, recipe.page_bytes) == ("layers", 0)
    assert recipe.how == "the target's first 1 of 2 layers, on its KV memory"
    whole = drafter.pass_bytes(target.model, packed=True)
    assert whole / 2 < recipe.pass_bytes < whole
    auto = registry.recipe("layers:auto", target)
    assert auto.pass_bytes == 1234
    assert recipe.own_bytes == auto.own_bytes == 0, "nothing is copied"
    assert memory_of(recipe) == {"weight_bytes": 0, "kv_bytes_per_token": 0}


def test_a_part_is_built_with_its_options() -> None:
    made: list[Any] = []

    def make(context: Any, backend: str) -> Any:
        made.append(registry.recipe("layers:1,max_draft=3", a_target()).build(context))
        return made[0]

    rig = build("compiled", {"layers": make})
    assert isinstance(made[0], ModelDrafter)
    assert (made[0].name, made[0].max_draft, made[0].shares_kv, made[0].unfit) == ("layers", 3, True, None)
    assert made[0].forward.kv is rig.forward.kv


@pytest.mark.parametrize(
    ("fields", "why"), [({"compiled": False}, "runs in torch"), ({"tokenizer": None}, "has no to")]
)
def test_auto_needs_compiled_passes_and_text(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"layers:auto measures compiled passes over text, and target {why}"):
        registry.recipe("layers:auto", a_target(**fields))


def test_a_gpu_drafts_with_a_number_of_layers(a_decoder: Any) -> None:
    registry.check_device("layers:1", "cuda")
    target = a_target(decoder=a_decoder, compiled=False, device="cuda")
    recipe = registry.recipe("layers:1", target)
    assert recipe.how == "the target's first 1 of 2 layers, on its KV memory"
    assert recipe.pass_bytes == sum(each.bytes for each in [*a_decoder.matrices()[:4], a_decoder.head])
    assert recipe.own_bytes == 0
    from paceline.runner.forwards.cuda import CudaForward, new_kv

    to = CudaForward(a_decoder, new_kv(TARGET.config, num_pages=1, dtype=torch.float32, device="cpu"))
    assert recipe.on_device is not None
    by: Any = recipe.on_device(None, to)
    assert by.reader is None, "no prompt is read"
    assert by.forward.kv is to.kv
    assert by.forward.decoder.layers == a_decoder.layers[:1]
    assert by.forward.decoder._buffers is not a_decoder._buffers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layers:auto", "target runs on a GPU: take a number of layers"),
        ("layers:1,max_draft=2", "is for a CPU; on a GPU"),
    ],
)
def test_what_a_gpu_cannot_do(words: str, message: str, a_decoder: Any) -> None:
    with pytest.raises(InvalidRequest, match=message):
        registry.recipe(words, a_target(decoder=a_decoder, compiled=False, device="cuda"))


# ── the choice ──


def test_parts_that_are_tried() -> None:
    assert candidates(30) == [4, 8, 11, 15, 19, 22]
    assert candidates(2) == [1]
    assert candidates(1) == []


def numbers(*, one: float = 1.0, four: float = 1.2, part: float = 0.2, accepted: float = 0.5) -> dict[str, float]:
    found = {"1 rows": one, "2 rows": 1.05, "3 rows": 1.1, "5 rows": four}
    for n in (4, 8):
        found[f"{n} layers"] = part * n / 4
        found |= {f"accepted of {k} by {n} layers": accepted * n / 4 * k**0.5 for k in DRAFTS}
    return found


def test_the_best_of_all_choices() -> None:
    found = numbers()
    assert best(found, [4]) == Choice(4, 1, pytest.approx(1.5 / (0.2 + 1.05)))
    assert best(found, [4, 8]).layers == 8
    assert best(found, [4, 8]).speedup == pytest.approx(2 / (0.4 + 1.05))
    assert best(found, [4, 8]).pays
    assert not best(numbers(accepted=0.05), [4, 8]).pays
    assert not best({}, []).pays


def quiet_second_layer() -> CompiledForward:
    """A target whose second layer changes nothing."""
    silent = ("layers.1.o", "layers.1.down")
    weights = {name: torch.zeros_like(w) if name in silent else w for name, w in TARGET.weights.items()}
    quantised = {name: quantise(w) if w.dim() == 2 else w for name, w in weights.items()}
    return CompiledForward(TARGET.config, quantised, num_pages=8, threads=1)


def test_accepted_tokens_are_counted_in_the_target_s_own_text() -> None:
    texts = Texts(quiet_second_layer(), PROMPTS, new=10)
    assert [texts.accepted(texts.forward.leading(1), draft) for draft in DRAFTS] == [1, 2, 4]
    usual = Texts(TARGET.forward("compiled", num_pages=8), PROMPTS, new=10)  # type: ignore[arg-type]
    assert texts.forward is not usual.forward
    assert [usual.accepted(usual.forward, draft) for draft in DRAFTS] == [1, 2, 4], "it continues as it would"
    one, two, four = (usual.accepted(usual.forward.leading(1), draft) for draft in DRAFTS)
    assert 0 < one < 1
    assert one <= two <= four < 4


def test_a_measurement_leaves_the_target_s_memory_alone() -> None:
    target = quiet_second_layer()
    slots = torch.arange(8 * 16)
    before = [each.clone() for each in target.kv.read(slots)]
    Texts(target, PROMPTS, new=4)
    assert all(map(torch.equal, before, target.kv.read(slots)))


def made_up(part: float) -> Any:
    """Seconds of passes, by name."""
    return lambda runs: {name: part if name.endswith("layers") else 1.0 for name in [*runs] if runs[name]() is None}


@pytest.mark.usefixtures("own_cache")
def test_a_choice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_second_layer()
    monkeypatch.setattr(choice, "measure", lambda runs: None)
    assert choose(target, PROMPTS, question="busy") is None
    monkeypatch.setattr(choice, "measure", made_up(0.25))
    assert choose(target, PROMPTS, question="one") == Choice(1, 4, pytest.approx(5 / 2))
    monkeypatch.setattr(choice, "measure", lambda runs: pytest.fail("measured again"))
    assert choose(target, PROMPTS, question="one") == Choice(1, 4, pytest.approx(5 / 2))
    monkeypatch.setattr(choice, "measure", made_up(2.0))
    found = choose(target, PROMPTS, question="another")
    assert found == Choice(1, 1, pytest.approx(2 / 3))
    assert found is not None
    assert not found.pays


# ── auto ──


def auto(found: Choice | None, monkeypatch: pytest.MonkeyPatch, options: str = "") -> Made:
    monkeypatch.setattr(drafter, "choose", lambda *_, **__: found)
    return lambda context, backend: registry.recipe(f"layers:auto{options}", a_target()).build(context)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            Choice(1, 2, 1.04),
            "drafts of 2 by 1 layers, has a measured speed-up of 1.04 over plain decoding, and 1.05 is",
        ),
        (None, "the machine is too busy to measure; start again when it is quiet, or take a number of layers"),
    ],
)
def test_auto_drafts_nothing_where_it_loses_and_says_so(
    found: Choice | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = build("compiled", {"layers": auto(found, monkeypatch)})
    assert [record.levelname for record in caplog.records if why in record.getMessage()] == ["WARNING"]
    asked = [replace(r, speculation=Speculation()) for r in under_law.requests("greedy", under_law.LOSSLESS)]
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(under_law.plain_answers("compiled", "greedy"))
    assert rig.engine.stats.drafted == 0
    assert why in (rig.engine.drafters["layers"].out or "")
    offs = {each.stats.off for each in told.values()}
    assert {off.kind for off in offs if off is not None} == {OffKind.DRAFTER_OUT}
    assert drafter.UnfitLayers("so").propose([None, None]) == [layers.drafter.EMPTY] * 2  # type: ignore[list-item]


def test_auto_drafts_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build("compiled", {"layers": auto(Choice(1, 2, 1.5), monkeypatch)})
    guard = rig.engine.drafters["layers"]
    assert (guard.max_draft, guard.out) == (2, None)
    told = run(rig, under_law.requests("greedy", (under_law.LOSSLESS[0],)))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("compiled", "greedy"))
    assert rig.engine.stats.accepted > 0
    again = build("compiled", {"layers": auto(Choice(1, 2, 1.5), monkeypatch, ",max_draft=5")})
    assert again.engine.drafters["layers"].max_draft == 5


def test_other_files_and_formats_are_other_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "files_digest", lambda files: f"digest of {files}")
    stored = SimpleNamespace(source=SimpleNamespace(files=lambda: ["a"]), format="int8")
    assert drafter._identity(a_target(stored=stored))[:2] == ("digest of ['a']", "int8")
    assert drafter._identity(a_target())[0] == "target"


def test_in_one_round_a_draft_begins_behind_the_last_committed_token() -> None:
    """Nothing is read but that token: keys and values of all before it are the target's."""
    rows: list[int] = []

    def make(context: Any, backend: str) -> Any:
        made = RIGS["layers"]["layers"](context, backend)
        assert isinstance(made, ModelDrafter)
        compute = made.compute
        made._trees = None
        made.compute = lambda shares: rows.extend(share.count for share in shares) or compute(shares)  # type: ignore[method-assign]
        return made

    run(build("toy", {"layers": make}), under_law.requests("greedy", (under_law.LOSSLESS[0],)))
    assert set(rows) == {1}


def test_a_draft_is_right_up_to_its_first_wrong_token() -> None:
    texts = Texts(quiet_second_layer(), PROMPTS[:1], new=6)
    said = texts.lanes.tokens_np[0, texts.starts[0] + 1 : texts.starts[0] + 7].copy()
    said[[0, 2, 4]] += 1  # wrong, right, wrong, right …

    def every_second(batch: Any) -> Any:
        return SimpleNamespace(argmax=torch.from_numpy(said))

    assert texts.accepted(every_second, 1) == pytest.approx(3 / 6)  # type: ignore[arg-type]
    assert texts.accepted(every_second, 2) == pytest.approx(2 / 5)  # type: ignore[arg-type]
