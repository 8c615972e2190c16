"""What is counted and timed in a run of the engine, and what the report makes of runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench import engine as bench
from paceline.bench import engine_prompts, engine_record, machine
from paceline.bench.engine import BatchRun, Measured, MemoryTraffic, Setup
from paceline.bench.mix import mixes
from paceline.config import EngineConfig
from paceline.drafters.registry import Recipe
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead, InvalidRequest
from paceline.kernels.base import PAGE_SIZE
from paceline.types import Finish, TokenEvent

SETUP = Setup(target="tiny", drafter="ngram", batches=(2,), prompt_tokens=10, output_tokens=4)
PROMPTS = [(1, 2), (3, 4), (5, 6)]
PLAIN = BatchRun(
    mode="plain",
    batch=2,
    round=0,
    tokens=100,
    seconds=2.0,
    to_the_end_tok_s=40.0,
    total_tok_s=22.0,
    steps=50,
    sequence_steps=100,
    drafted=0,
    accepted=0,
    preemptions=0,
    draft_seconds=0.0,
    verify_seconds=1.5,
    accept_seconds=0.25,
    host_seconds=0.125,
    wait_seconds=0.5,
    outputs=((1, 2), (3, 4)),
)
FAST = replace(
    PLAIN, mode="speculative", seconds=1.0, steps=20, sequence_steps=40, drafted=160, accepted=60, draft_seconds=0.5
)


class ScriptedEngine:
    """Says what it is told to, a list of (request, tokens) a step; every step takes a second of verification."""

    def __init__(self, *steps: list[tuple[str, int]], length: int = 4, error: str | None = None) -> None:
        self.stats = EngineStats()
        self.submitted: list[str] = []
        self._steps = list(steps)
        self._left = dict.fromkeys("01", length)
        self._error = error

    def submit(self, request: Any) -> None:
        self.submitted.append(request.id)

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    def step(self) -> list[TokenEvent]:
        self.stats.steps += 1
        self.stats.time_verify += 1.0
        return [self._event(request_id, count) for request_id, count in self._steps.pop(0)]

    def _event(self, request_id: str, count: int) -> TokenEvent:
        self._left[request_id] -= count
        if self._left[request_id]:
            return TokenEvent(request_id=request_id, sample=0, tokens=(7,) * count)
        finish = Finish.ERROR if self._error else Finish.LENGTH
        return TokenEvent(request_id=request_id, sample=0, tokens=(7,) * count, finish=finish, error=self._error)


def run(engine: Any, monkeypatch: pytest.MonkeyPatch) -> BatchRun:
    clock = itertools.count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)) ** 2)  # 0, 1, 4
    asked = bench.requests(SETUP, 2, mode="plain", round=0, prompts=PROMPTS)
    return bench.run_batch(engine, asked, mode="plain", round=0)


def test_speed_counts_from_the_moment_all_have_their_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = [[("0", 1)], [("0", 1), ("1", 1)]], [[("0", 1), ("1", 1)], [("0", 1), ("1", 1)], [("1", 1)], []]
    engine = ScriptedEngine(*first, *later)
    found = run(engine, monkeypatch)  # the clock: 0 at the beginning, 1 when both have a token, then 4, 9, 16
    assert engine.submitted == ["0", "1"]
    assert (found.tokens, found.seconds, found.sequence_steps) == (2, 3.0, 2)  # one step: the second ends request 0
    assert (found.steps, found.verify_seconds) == (1, 1.0)
    assert found.to_the_end_tok_s == 5 / 15
    assert found.total_tok_s == 8 / 16
    assert found.outputs == ((7,) * 4,) * 2


def test_a_batch_that_is_never_full(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(ScriptedEngine([("0", 3), ("1", 3)], [("0", 1)], [("1", 1)]), monkeypatch)
    assert (found.tokens, found.seconds) == (2, 8.0)
    assert found.tok_s == found.to_the_end_tok_s


def test_a_run_that_breaks_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineDead, match="it broke"):
        run(ScriptedEngine([("0", 4), ("1", 4)], error="it broke"), monkeypatch)
    with pytest.raises(EngineDead, match="request 1 was told 3 tokens of 4"):
        run(ScriptedEngine([("0", 4), ("1", 3)]), monkeypatch)


def test_every_mode_and_round_gets_the_same_prompts() -> None:
    plain, again = (bench.requests(SETUP, 3, mode="plain", round=round, prompts=PROMPTS) for round in range(2))
    drafting = bench.requests(SETUP, 3, mode="speculative", round=0, prompts=PROMPTS)
    assert len({one.sampling.seed for one in [*plain, *again]}) == 6
    assert [one.prompt for one in plain] == [one.prompt for one in again] == [one.prompt for one in drafting]
    assert len({one.prompt for one in plain}) == 3
    assert not any(one.speculation.enabled for one in plain)
    assert all(one.speculation.enabled and one.sampling.greedy and one.sampling.ignore_eos for one in drafting)


def test_a_run_finds_no_answers_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that remembers answers by salt would know those of the round before."""
    salts: list[set[str]] = []

    def watched(engine: Any, asked: Any, *, mode: Any, round: int) -> BatchRun:
        salts.append({one.cache_salt for one in asked})
        return replace(PLAIN, mode=mode, round=round)

    monkeypatch.setattr(bench, "run_batch", watched)
    monkeypatch.setattr(bench, "prompts_of", lambda setup, parts: PROMPTS)
    engines: Any = {mode: SimpleNamespace(engine=None) for mode in ("plain", "speculative")}
    setup = replace(SETUP, rounds=2, mixes=mixes("logprobs:1"))
    assert len(list(bench.run_rounds(setup, engines, lambda *said: None))) == 8
    assert len(salts) == len(set.union(*salts)) == 12
    assert "" not in set.union(*salts)


def test_the_drafter_prediction_gets_a_prediction_to_draft_from() -> None:
    setup = replace(SETUP, drafter="prediction", acceptance=None)
    for mode, predicts in (("plain", False), ("speculative", True)):
        asked = bench.requests(setup, 3, mode=mode, round=0, prompts=PROMPTS)
        assert [one.prediction for one in asked] == [one.prompt if predicts else () for one in asked]


def parts(**tokenizer: Any) -> Any:
    target = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=50)))
    return SimpleNamespace(target=target, tokenizer=SimpleNamespace(**tokenizer))


def test_random_prompts() -> None:
    found = bench.prompts_of(replace(SETUP, batches=(1, 3)), parts())
    assert [len(prompt) for prompt in found] == [10] * 3
    assert len({*found}) == 3
    assert max(token for prompt in found for token in prompt) < 50
    assert found == bench.prompts_of(replace(SETUP, batches=(3,)), parts())


def test_real_prompts_that_are_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """And drafts as the engine chooses: on real text their lengths matter."""
    monkeypatch.setattr(
        engine_prompts,
        "ChatTemplate",
        lambda tokenizer: SimpleNamespace(encode=lambda said: [*range(len(said[-1]["content"]))]),
    )
    setup = replace(SETUP, prompts=("mt_bench",), prompt_tokens=120)
    found = bench.prompts_of(setup, parts())
    assert found
    assert all(0 < len(prompt) <= 120 for prompt in found)
    config = bench.config_of(setup, drafting=True)
    assert (config.fixed_draft, config.measure_cost) == (False, True)
    with pytest.raises(InvalidRequest, match="no prompt has 1 tokens or fewer: raise --prompt-tokens"):
        bench.prompts_of(replace(setup, prompt_tokens=1), parts())
    with pytest.raises(InvalidRequest, match="--acceptance is for random prompts"):
        replace(setup, acceptance=0.5)


def test_drafts_are_as_long_as_asked_for_whatever_they_cost() -> None:
    setup = replace(SETUP, batches=(1, 64), draft=5, acceptance=0.8, prompt_tokens=100, output_tokens=28)
    config = bench.config_of(setup, drafting=True)
    assert (config.fixed_draft, config.measure_cost, config.synthetic_acceptance) == (True, False, 0.8)
    assert (config.max_draft, config.max_draft_tokens, config.max_draft_batch) == (5, 320, None)
    assert (config.max_sequences, config.max_context, config.max_step_tokens) == (64, 128, 6400)
    assert not config.prefix_cache
    assert bench.config_of(setup, drafting=False).synthetic_acceptance == 0


def test_drafts_as_the_engine_chooses_with_synthetic_acceptance() -> None:
    setup = replace(SETUP, draft=5, acceptance=0.8, governed=True)
    config, usual = bench.config_of(setup, drafting=True), EngineConfig()
    assert (config.fixed_draft, config.measure_cost) == (False, True)
    assert (config.min_acceptance, config.synthetic_acceptance, config.max_draft) == (usual.min_acceptance, 0.8, 5)


@pytest.mark.parametrize(
    ("drafter", "format", "words"),
    [
        ("ngram", None, "ngram"),
        ("ngram:min_ngram=1", None, "ngram:min_ngram=1"),
        ("llama-3.2-1b", None, "model:shape:llama-3.2-1b,max_draft=4,min_confidence=0"),
        ("a/config.json", None, "model:shape:a/config.json,max_draft=4,min_confidence=0"),
        ("smollm2", "fp8", "model:smollm2,max_draft=4,min_confidence=0,format=fp8"),
        ("model:smollm2,format=int8", None, "model:smollm2,format=int8"),
    ],
)
def test_how_a_drafter_is_named(drafter: str, format: Any, words: str) -> None:
    assert bench.drafter_words(replace(SETUP, drafter=drafter, drafter_format=format)) == words


def test_a_portfolio_has_a_lookup_beside_the_drafter() -> None:
    setup = replace(SETUP, drafter="eagle:smollm2", portfolio=True)
    assert bench.drafters_of(setup) == ["eagle:smollm2", "ngram", "portfolio"]
    assert bench.drafters_of(replace(setup, portfolio=False)) == ["eagle:smollm2"]


def test_a_format_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="drafter-format is for a model"):
        bench.drafter_words(replace(SETUP, drafter="ngram", drafter_format="int4"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": 1}, "at least 2"),
        ({"acceptance": 1.5}, "acceptance must be above 0 and at most 1"),
        ({"acceptance": 0.0}, "acceptance must be above 0"),
        ({"drafter": None, "off": True}, "name one with --drafter"),
        ({"drafter": None, "acceptance": 0.5}, "name one with --drafter"),
        ({"drafter": None, "governed": True}, "name one with --drafter"),
        ({"drafter": None, "portfolio": True}, "name one with --drafter"),
        ({"drafter": "ngram", "portfolio": True}, "ngram is a lookup"),
    ],
)
def test_what_cannot_be_measured(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(SETUP, **changes)


def test_the_bytes_of_a_step() -> None:
    bytes = MemoryTraffic(target_weights=1000, target_kv=10, drafter_weights=100, drafter_kv=1)
    assert bytes.per_step(sequences=2, context=5, drafted=0) == 1100
    assert bytes.per_step(sequences=2, context=5, drafted=4) == 1100 + 4 * 110
    assert replace(bytes, one_pass=True).per_step(sequences=2, context=5, drafted=4) == 1100 + 110


@pytest.mark.parametrize(
    ("drafter", "weights", "kv"),
    [
        ({"page_bytes": 5 * PAGE_SIZE, "pass_bytes": 100}, 100, 5),
        ({"pass_bytes": 100}, 100, 10),  # on the target's KV memory, which it reads
        ({}, 0, 0),  # a lookup
    ],
)
def test_what_a_drafter_reads(drafter: Any, weights: int, kv: int) -> None:
    target = SimpleNamespace(pass_bytes=1000, page_bytes=10 * PAGE_SIZE)
    made = Recipe(name="it", build=lambda setting: None, **drafter)
    parts: Any = SimpleNamespace(target=target, drafters={"it": made})
    expected = MemoryTraffic(target_weights=1000, target_kv=10, drafter_weights=weights, drafter_kv=kv)
    assert bench.traffic_of(parts) == expected


def measured(*runs: BatchRun, **changes: Any) -> Measured:
    device = changes.pop("device", "cpu")
    cost = MemoryTraffic(target_weights=760, target_kv=10, drafter_weights=240, drafter_kv=0)
    return Measured(
        setup=replace(SETUP, **changes),
        runs=runs,
        traffic=dict.fromkeys(("plain", "speculative", "off"), cost),
        engines={"plain": {"bitwise": True}},
        bandwidth=1e5,
        interleaved=True,
        machine={"device": device, "cpu": "a CPU", "torch": "2", "paceline": "0", "commit": "c"},
    )


def test_the_ratio_is_that_of_runs_of_one_round() -> None:
    slow = [replace(run, round=1, seconds=run.seconds * 10) for run in (PLAIN, replace(FAST, seconds=0.5))]
    odd = [replace(PLAIN, round=2), replace(FAST, round=2, seconds=0.1)]
    found = measured(PLAIN, FAST, *slow, *odd)
    assert engine_record.ratio(found, 2, "speculative") == 4.0  # of 2, 4 and 20


def test_the_numbers_of_a_batch() -> None:
    [batch] = engine_record.record(measured(PLAIN, FAST), command="paceline bench engine")["batches"]
    plain, fast = batch["plain"], batch["speculative"]
    assert (plain["tok_s"], plain["total_tok_s"], batch["ratio"]) == (50.0, 22.0, 2.0)
    assert (plain["tokens_per_step"], fast["tokens_per_step"]) == (1.0, 2.5)
    assert (plain["accepted_share"], fast["accepted_share"]) == (None, 0.375)
    assert fast["parts_ms"] == {"draft": 25.0, "verify": 75.0, "accept": 12.5, "host": 6.25, "wait": 25.0}
    assert (plain["host_share"], fast["host_share"]) == (0.0625, 0.125)
    assert plain["step_ms"] == 40.0
    assert plain["limit_ms"] == pytest.approx(1e3 * (760 + 2 * 12 * 10) / 1e5)  # 10 tokens in, 4 out: 12 in the mean
    assert plain["bandwidth_fraction"] == pytest.approx(0.01 / 0.04)
    assert fast["limit_ms"] == pytest.approx(1e3 * (1000 + 4 * 240) / 1e5)
    assert plain["gpu_idle"] is None
    assert batch["same_tokens"] == "2/2"


def test_a_gpu_is_idle_while_no_part_of_a_round_runs() -> None:
    [batch] = engine_record.record(measured(PLAIN, device="cuda"), command="")["batches"]
    assert batch["plain"]["gpu_idle"] == pytest.approx(1 - 1.75 / 2.0)
    assert "speculative" not in batch
    unknown = replace(PLAIN, verify_seconds=0.0, accept_seconds=0.0)
    [batch] = engine_record.record(measured(unknown, device="cuda"), command="")["batches"]
    assert batch["plain"]["gpu_idle"] is None


def test_synthetic_numbers_are_called_so_everywhere() -> None:
    off = replace(PLAIN, mode="off", seconds=2.5)
    record = engine_record.record(measured(PLAIN, FAST, off, acceptance=0.8), command="")
    [batch] = record["batches"]
    assert record["acceptance"] == "synthetic 0.8"
    assert set(batch) == {"batch", "plain", "synthetic_speculative", "synthetic_ratio", "off", "off_ratio"}
    assert batch["off_ratio"] == 0.8
    text = engine_record.text(record)
    assert "SYNTHETIC acceptance of 0.8" in text
    assert [line.split()[1] for line in text.splitlines() if line.split()[:1] == ["2"]] == ["plain", "synthetic", "off"]
    assert "SYNTHETIC" not in engine_record.text(engine_record.record(measured(PLAIN, FAST), command=""))


def test_a_portfolio_is_told() -> None:
    record = engine_record.record(measured(PLAIN, FAST, drafter="small", portfolio=True), command="")
    assert "tiny + small and ngram, as a portfolio, 4 drafted" in engine_record.text(record)


@pytest.mark.parametrize(("changes", "told"), [({}, "ngram, 4"), ({"governed": True}, "ngram, at most 4")])
def test_who_chooses_the_lengths_of_drafts_is_told(changes: dict[str, Any], told: str) -> None:
    record = engine_record.record(measured(PLAIN, FAST, **changes), command="")
    assert f"{told} drafted" in engine_record.text(record)
    assert record["setup"]["governed"] is bool(changes)


def test_other_tokens_than_plain_are_counted() -> None:
    found = measured(PLAIN, replace(FAST, outputs=((1, 2), (3, 5))))
    assert engine_record.same_tokens(found, 2) == "1/2"


def test_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 20)
    device = torch.device("cpu")
    assert machine.copy_bandwidth(device) > 1e7
    monkeypatch.setenv("PACELINE_COMMIT", "abc")
    facts = machine.describe(device)
    assert facts["commit"] == "abc"
    assert facts["device"] == "cpu"
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["torch"] == torch.__version__
