"""From names to an engine: memory is shared out, and what does not fit says what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.drafters import model as model_drafter
from paceline.drafters import registry
from paceline.engine import assemble as module
from paceline.engine import building, memory_share
from paceline.engine.assemble import assemble
from paceline.engine.building import inside_rounds
from paceline.engine.memory_share import share_memory
from paceline.errors import InvalidRequest, OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.quant import quantise
from paceline.models import shapes
from paceline.models.load import LoadedModel
from paceline.runner.loading.models import ReadyModel, ready_shape
from paceline.types import OFF, Request, SamplingParams
from tests.odd_drafters import AgainOnDevice, Silent
from tests.runs import prompt
from tests.tiny_models import NOISY, TARGET, Model, tiny_tokenizer

MODELS = {"target": TARGET, "small": NOISY}


def ready(name: str, *, model: Model | None = None, **_: Any) -> ReadyModel:
    model = model or MODELS[name]
    weights = {key: quantise(w) if w.dim() == 2 else w for key, w in model.weights.items()}
    loaded = LoadedModel("gguf", Path(name), model.config, dict(weights), {}, {})
    return ReadyModel(name=name, model=loaded, tokenizer=tiny_tokenizer(), compiled=True, why="a test")


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_model", ready)
    monkeypatch.setattr(model_drafter, "read_model", ready)


def config(**options: Any) -> EngineConfig:
    return EngineConfig.of(**{"max_sequences": 4, "max_context": 100, "max_draft": 7, **options})


def test_a_prediction_is_drafted_inside_rounds_only_alone() -> None:
    """Beside another drafter it would take turns with it; the host's offers do not."""
    for words, inside in ((["prediction"], "prediction"), (["ngram", "prediction"], "ngram"), (["ngram"], "ngram")):
        recipes = {name: registry.recipe(name, ready("target")) for name in words}
        built = {name: made.build(None) for name, made in recipes.items()}  # type: ignore[arg-type]
        assert [*inside_rounds(recipes, built)] == [inside]


def test_an_engine_with_both_drafters() -> None:
    parts = assemble("target", drafters=["ngram", "small"], threads=1, config=config(measure_cost=False))
    assert parts.bitwise
    assert [*parts.engine.drafters] == ["ngram", "model", "prediction"]
    assert parts.memory.num_pages == 4 * -(-(100 + 7 + 1) // PAGE_SIZE)
    assert parts.memory.max_context == 100
    assert parts.memory.page_bytes == parts.target.page_bytes * 2
    told: dict[str, list[int]] = {"off": [], "ngram": [], "model": []}
    for name in told:
        speculation = OFF if name == "off" else type(OFF)(drafter=name)
        sampling = SamplingParams(temperature=0, max_tokens=20)
        request = Request(id=name, prompt=prompt(20, seed=1), sampling=sampling, speculation=speculation)
        parts.engine.submit(request)
    while parts.engine.has_work:
        for event in parts.engine.step():
            told[event.request_id] += event.tokens
            assert event.finish is None or event.stats is not None
    assert told["off"] == told["ngram"] == told["model"]
    assert parts.engine.stats.accepted > 0
    parts.engine.check()


def test_the_tokenizer_s_end_of_sequence_ends_a_text() -> None:
    parts = assemble("target", threads=1, config=config())
    sampling = SamplingParams(max_tokens=50, logit_bias={0: 100.0})
    parts.engine.submit(Request(id="a", prompt=(1,), sampling=sampling))
    (event,) = parts.engine.step()
    assert event.stop == 0


def test_an_engine_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that have been read already, or never were: random weights, drafted for by others."""
    monkeypatch.setitem(shapes.SHAPES, "small", TARGET.config)
    target = ready_shape("small", format="int8")
    parts = assemble(target, drafters=["model:shape:small,min_confidence=0"], threads=1, config=config())
    assert parts.target is target
    assert parts.drafters["model"].model is not None
    sampling = SamplingParams(temperature=0, max_tokens=10)
    parts.engine.submit(Request(id="a", prompt=(1, 2, 3), sampling=sampling))
    said = [
        token for _ in range(20) if parts.engine.has_work for event in parts.engine.step() for token in event.tokens
    ]
    assert len(said) == 10
    assert parts.engine.stats.drafted > 0
    with pytest.raises(InvalidRequest, match="small has random weights and no tokenizer: give prompts as token ids"):
        _ = parts.tokenizer


def test_kv_formats_are_for_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="kv_format 'fp8' is for a GPU; on a CPU leave it at 'auto'"):
        assemble("target", config=config(kv_format="fp8"))


def test_what_the_device_cannot_run_is_an_error() -> None:
    assert building._checked("again", AgainOnDevice())
    with pytest.raises(InvalidRequest, match=r"'odd' gave the device 'Silent', which is no paceline.drafters.DeviceDr"):
        building._checked("odd", Silent())
    with pytest.raises(InvalidRequest, match="it lacks reader, finds_fewer, draft"):
        building._checked("odd", None)


def test_a_drafter_that_cannot_run_on_the_device_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    monkeypatch.setattr(module, "read_model", lambda *_, **__: pytest.fail("weights were read"))
    registry.register("mine", lambda options, target, progress: pytest.fail("a recipe was made"))
    with pytest.raises(InvalidRequest, match="'mine' runs on a CPU only"):
        assemble("target", drafters=["ngram", "mine:x"], device="cuda", config=config())


def test_a_drafter_must_derive_from_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    made = registry.Recipe(name="mine", build=lambda context: object())  # type: ignore[arg-type, return-value]
    registry.register("mine", lambda options, target, progress: made)
    with pytest.raises(InvalidRequest, match=r"'mine' was built as 'object', which is no paceline.drafters.Drafter"):
        assemble("target", drafters=["mine"], threads=1, config=config())


def test_two_of_a_kind() -> None:
    with pytest.raises(InvalidRequest, match="two drafters of the kind 'ngram'"):
        assemble("target", drafters=["ngram", "ngram:max_ngram=3"], config=config())


def test_memory_for_all_that_could_run_and_no_more() -> None:
    target = ready("target")
    memory = share_memory(target, [], config(max_context=None, kv_memory=1 << 40))
    assert memory.max_context == TARGET.config.max_context
    assert memory.num_pages == 4 * -(-(1024 + 7 + 1) // PAGE_SIZE)


def test_less_memory_means_a_shorter_context() -> None:
    target = ready("target")
    memory = share_memory(target, [], config(max_context=None, kv_memory=10 * target.page_bytes + 5))
    assert memory.num_pages == 10
    assert memory.max_context == 10 * PAGE_SIZE - 7 - 1


def test_drafters_take_their_share() -> None:
    target = ready("target")
    small = registry.recipe("small", target)
    memory = share_memory(target, [small], config(max_context=None, kv_memory=10 * target.page_bytes))
    assert memory.num_pages == 5


@pytest.mark.parametrize("options", [{"kv_memory": 1}, {"max_context": None, "kv_memory": 100}])
def test_no_memory_for_the_cache(options: dict[str, Any]) -> None:
    with pytest.raises(OutOfMemory, match=r"MiB are needed: raise kv_memory or lower max_context"):
        share_memory(ready("target"), [], config(**options))


def test_a_context_that_was_asked_for_must_fit() -> None:
    target = ready("target")
    need = -(-(100 + 7 + 1) // PAGE_SIZE)
    assert share_memory(target, [], config(kv_memory=need * target.page_bytes)).max_context == 100
    with pytest.raises(OutOfMemory, match="holds 88 tokens of one sequence"):
        share_memory(target, [], config(kv_memory=(need - 1) * target.page_bytes))


def test_a_context_beyond_the_model_s() -> None:
    with pytest.raises(InvalidRequest, match="max_context 2000 is more than the 1024 tokens that target knows"):
        share_memory(ready("target"), [], config(max_context=2000))


def test_memory_is_measured_where_none_is_given() -> None:
    assert memory_share.available_memory() > 1 << 20
    assert share_memory(ready("target"), [], config()).max_context == 100


def test_the_drafter_of_requests_that_name_none() -> None:
    words = ["ngram", "small", "portfolio"]
    for chosen, found in ((None, "portfolio"), ("model", "model")):
        parts = assemble("target", drafters=words, threads=1, config=config(default_drafter=chosen))
        assert parts.engine.default_drafter == found
    with pytest.raises(InvalidRequest, match=r"unknown default_drafter 'eagle'; known: model, ngram, portfolio"):
        assemble("target", drafters=words, threads=1, config=config(default_drafter="eagle"))
