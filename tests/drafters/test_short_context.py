"""A draft model that knows less context than the target drafts up to its end, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.drafters.base import Drafter
from paceline.drafters.model import make_drafter
from paceline.drafters.registry import BuildContext
from paceline.kernels.base import Batch, Output
from paceline.llm import LLM
from paceline.types import OFF, Request, SamplingParams, Speculation
from tests.cli.tiny_model import write_model
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS, PortfolioRig
from tests.runs import prompt, run
from tests.tiny_models import TARGET
from tests.toy import ToyForward

OPTIONS = {"max_context": 200, "max_sequences": 2, "kv_memory": 1 << 23, "measure_cost": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = 40  # tokens of context


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and itself with less context: its drafts are right as far as they go."""
    folder = tmp_path_factory.mktemp("short")
    made = {}
    for name, context in {"target": 256, "short": SHORT}.items():
        (folder / name).mkdir()
        made[name] = write_model(folder / name, context=context)
    return made


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("length", [10, 60])
def test_it_stops_drafting_and_says_so(
    format: str, length: int, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    words = f"model:{folders['short']},format={format},min_confidence=0"
    llm = LLM(str(folders["target"]), drafter=words, format=format, **OPTIONS)
    note = f"drafts within its {SHORT} tokens of context, the target has 256"
    assert note in llm.parts.drafters["model"].how
    assert f"knows {SHORT} tokens of context, and sequences may have 200" in caplog.text
    text = "a" * length
    [answer] = llm.generate(text, PARAMS, speculation=Speculation(drafter="model"))
    assert answer.tokens == llm.generate(text, PARAMS, speculation=OFF)[0].tokens
    assert answer.stats.off_reason is not None
    assert f"tokens of context, and drafter model knows {SHORT}" in answer.stats.off_reason
    assert answer.stats.drafted <= 2 * SHORT
    assert (answer.stats.accepted > 10) == (length < SHORT)
    assert llm.engine.drafters["model"].fault is None


def test_others_go_on_behind_it(folders: dict[str, Path]) -> None:
    """In a portfolio the lookup drafts where the model may not."""
    words = [f"model:{folders['short']},format=int8", "suffix"]
    llm = LLM(str(folders["target"]), drafter=words, format="int8", **OPTIONS)
    text = "abcabcabc" * 10
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias={70: 90.0})
    [answer] = llm.generate(text, params)
    assert answer.tokens == llm.generate(text, params, speculation=OFF)[0].tokens
    assert answer.stats.accepted > 10
    assert all(guard.fault is None for guard in llm.engine.drafters.values())


def short_drafter(context: BuildContext, forward: ToyForward) -> Drafter:
    return make_drafter(forward, context, min_confidence=0, max_context=SHORT)


def asked(tokens: int) -> list[Request]:
    params = [SamplingParams(max_tokens=50, seed=i) for i in range(3)]
    return [Request(id=str(i), prompt=prompt(tokens + i, seed=i), sampling=each) for i, each in enumerate(params)]


@pytest.mark.parametrize("name", ["model", "portfolio"])
def test_a_device_stops_there_too(name: str) -> None:
    """The drafter of the rounds has the limit of the one on the host, from which it was made; a portfolio that of its
    network."""

    def make(context: BuildContext, backend: str) -> Drafter:
        return short_drafter(context, ToyForward(num_pages=context.pool.num_pages))

    portfolio = {"portfolio": PortfolioRig(TARGET, of="model")} if name == "portfolio" else {}
    told = run(build("toy", {"model": make}, on_device={**portfolio, "model": DEVICE_RIGS["good"]}), asked(10))
    plain = run(build("toy"), asked(10))
    assert {key: each.tokens for key, each in told.items()} == {key: each.tokens for key, each in plain.items()}
    assert all(0 < each.stats.drafted <= 2 * SHORT for each in told.values())
    assert all(f"drafter {name} knows 40" in str(each.stats.off_reason) for each in told.values())


@pytest.mark.parametrize("tokens", [5, 20, 34])
def test_no_position_behind_its_context_is_computed(tokens: int) -> None:
    positions: list[int] = []

    class Watched(ToyForward):
        def __call__(self, batch: Batch) -> Output:
            positions.extend(batch.positions.tolist())
            return super().__call__(batch)

    def make(context: BuildContext, backend: str) -> Drafter:
        return short_drafter(context, Watched(num_pages=context.pool.num_pages))

    told = run(build("toy", {"model": make}), asked(tokens))
    assert max(positions) < SHORT
    assert max(positions) >= SHORT - 3, "it drafts up to there"
    assert all("drafter model knows 40" in str(each.stats.off_reason) for each in told.values())
