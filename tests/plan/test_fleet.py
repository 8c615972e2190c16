"""Plans: what fits where, what is refused and what would do, and how speeds depend on what is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.errors import InvalidRequest, ModelNotFound, OutOfMemory, UnknownOption, VocabularyMismatch
from paceline.models.load import open_model
from paceline.models.shapes import LLAMA_3_1_8B, QWEN3_32B, SMOLLM2_135M
from paceline.plan.fleet import longest_draft
from paceline.plan.gpus import ESTIMATED_SOURCE, GPUS, H200, MEASURED, MEASURED_SOURCE, read_gpus
from paceline.plan.passes import Place, pass_seconds, prompt_seconds, sum_seconds
from paceline.plan.report import record, text
from paceline.plan.size import model_size, possible_degrees
from paceline.plan.speed import tokens_per_step
from tests.block_heads import LAYOUTS
from tests.cli.tiny_model import write_model
from tests.plan.plans import H200_MEMORY, plan, question

HUGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
FOUR, SPLIT = {"count": 4, "tensor_parallel": 4}, {"drafter_tensor_parallel": 4}


def test_the_h200_has_its_own_measured_constants() -> None:
    assert H200.pace == MEASURED
    half = replace(H200, name="half", bandwidth=H200.bandwidth / 2)
    assert half.pace == replace(MEASURED, bandwidth=MEASURED.bandwidth / 2)
    slow = replace(H200, name="slow", products=H200.products / 2).pace
    assert slow.products == MEASURED.products / 2
    assert slow.narrow_products == MEASURED.narrow_products / 2
    assert slow.attention == MEASURED.attention / 2


def test_memory_of_a_rank_adds_up() -> None:
    memory = plan(drafter="llama-3.2-1b").memory
    assert memory.weights + memory.drafter + memory.workspace + memory.kv == memory.total == H200.memory
    assert memory.kv_token == (32 * 8 * 128 + 16 * 8 * 64) * 2 * 2
    assert memory.weights == pytest.approx(2 * 8.03e9, rel=0.01)
    assert memory.drafter == pytest.approx(3 * 1.236e9, rel=0.01)  # 8-bit floats, and 16 bits beside them
    assert memory.kv_tokens % 16 == 0
    assert memory.sequences(2000) == memory.kv_tokens // 2000
    assert memory.sequences(2001) == memory.kv_tokens // 2016


def test_fp8_keys_and_values_give_twice_the_room() -> None:
    assert plan(kv_format="fp8").memory.kv_tokens == pytest.approx(2 * plan().memory.kv_tokens, rel=0.001)


def test_ranks_divide_weights_and_keys() -> None:
    one, four = plan(), plan(count=4, tensor_parallel=4)
    assert four.memory.weights == pytest.approx(one.memory.weights / 4, rel=0.01)
    assert four.memory.kv_token == one.memory.kv_token // 4
    assert four.replicas == 1
    sixteen = plan("llama-3.1-8b", count=8, tensor_parallel=8).machine.target
    assert sixteen.kv_token(16) == sixteen.kv_token(8)  # key/value heads are on several ranks


def test_ranks_divide_a_drafter_that_is_split_over_them() -> None:
    options = {"count": 4, "tensor_parallel": 4, "drafter": "llama-3.2-1b", "acceptance": 0.8}
    alone, split = plan(**options), plan(**options, drafter_tensor_parallel=4)
    target = plan(count=4, tensor_parallel=4)
    assert split.memory.drafter == pytest.approx(alone.memory.drafter / 4, rel=0.01)
    own = [made.memory.kv_token - target.memory.kv_token for made in (alone, split)]
    assert own[0] == 4 * own[1] == 16 * 8 * 64 * 2 * 2
    assert target.memory.workspace < split.memory.workspace < alone.memory.workspace
    drafters = [made.machine.drafter for made in (alone, split)]
    few, many = ([d.seconds(Place(H200, 4), length=4, sequences=n, context=1000) for d in drafters] for n in (1, 256))
    size = drafters[1].size
    sums = sum_seconds(size, Place(H200, 4), rows=1, outs=1)
    reading = size.few.bytes / H200.pace.bandwidth
    assert few[0] - few[1] == pytest.approx(4 * (0.75 * reading - sums), abs=4e-5)
    assert many[1] < many[0]
    assert (record(alone)["drafter_tensor_parallel"], record(split)["drafter_tensor_parallel"]) == (1, 4)
    assert "llama-3.2-1b in fp8, split over 4 ranks" in text(split)


def test_heads_of_a_drafter_that_do_not_divide(tmp_path: Path) -> None:
    path, small = tmp_path / "odd.json", {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 2}
    path.write_text(json.dumps(HUGE | small | {"num_attention_heads": 6, "num_key_value_heads": 2}))
    with pytest.raises(InvalidRequest, match=r"--drafter-tensor-parallel 4: .* has 6 .* over 1, 2 or 6 ranks only"):
        plan(**FOUR, **SPLIT, drafter=str(path))


def test_ranks_take_time_to_add() -> None:
    size = plan("qwen3-32b").machine.target
    alone, four, by_card = Place(H200), Place(H200, 4), Place(GPUS["h100-pcie"], 4)
    assert sum_seconds(size, alone, rows=1, outs=1) == 0
    assert 2 * 64 * 6.6e-6 < sum_seconds(size, four, rows=1, outs=1) < 3e-3
    assert sum_seconds(size, by_card, rows=512, outs=512) > 4 * sum_seconds(size, four, rows=512, outs=512)
    seconds = [pass_seconds(size, place, rows=1, sequences=1, context=1000) for place in (alone, four)]
    assert seconds[1] < seconds[0]
    assert prompt_seconds(size, four, 4096) < prompt_seconds(size, alone, 4096)


def test_the_fewest_ranks_that_hold_the_model_are_taken() -> None:
    small = plan("qwen3-32b", gpu="h100", count=8)
    assert (small.machine.place.ranks, small.replicas) == (1, 8)
    long = plan("qwen3-32b", gpu="h100", count=8, context=40960)
    assert (long.machine.place.ranks, long.replicas) == (2, 4)
    odd = plan("qwen3-32b", gpu="h100", count=3, context=40960)
    assert odd.replicas == 1
    assert any("1 of 3 GPUs are left over" in note for note in odd.notes)


def test_a_model_that_does_not_fit_says_how_many_gpus_would_do() -> None:
    with pytest.raises(OutOfMemory, match=r"on each of 1 h100, .*; 2 would do: --gpus h100:2 --tensor-parallel 2"):
        plan("qwen3-32b", gpu="h100", context=40960)


def test_a_model_that_fits_nowhere_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HUGE))
    with pytest.raises(OutOfMemory, match="no number up to 8 would do: take a smaller --format"):
        plan(str(path), gpu="h100", count=8)
    assert plan(str(path), gpu="b200", count=8).machine.place.ranks == 8
    with pytest.raises(OutOfMemory, match=r"; 8 would do: .* --tensor-parallel 8 --drafter-tensor-parallel 8$"):
        plan(str(path), gpu="b200", **FOUR, **SPLIT, drafter="llama-3.2-1b")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"acceptance": 1.5, "drafter": "ngram"}, InvalidRequest, r"acceptance must be in \[0, 1\], not 1.5"),
        ({"acceptance": -0.1, "drafter": "ngram"}, InvalidRequest, "acceptance must be in"),
        ({"acceptance": 0.5}, InvalidRequest, "name one with --drafter"),
        ({"tensor_parallel": 2}, InvalidRequest, "there are 1: write --gpus h200:2"),
        ({"tensor_parallel": 3, "count": 8}, InvalidRequest, "32 attention heads and 8 .* 1, 2, 4 or 8 ranks only"),
        ({"drafter_tensor_parallel": 2}, InvalidRequest, "--drafter-tensor-parallel 2: .* give --tensor-parallel, too"),
        (FOUR | {"drafter_tensor_parallel": 2}, InvalidRequest, "on all of the model's; take 1 or 4"),
        (FOUR | {"drafter_tensor_parallel": 4}, InvalidRequest, "name one with --drafter"),
        (FOUR | SPLIT | {"drafter": "eagle-shape"}, InvalidRequest, "the drafter eagle runs whole on one rank"),
        (FOUR | SPLIT | {"drafter": "ngram"}, InvalidRequest, "the drafter ngram runs whole on one rank"),
        ({"context": 200_000}, InvalidRequest, "more than the 131072 tokens"),
        ({"batches": (1, 1000)}, InvalidRequest, "--batch 1000 is more than the 256"),
        ({"kv_format": "int8"}, UnknownOption, "unknown kv_format"),
        ({"format": "fp32"}, InvalidRequest, "for a CPU"),
        ({"format": "fpp8"}, UnknownOption, "did you mean 'fp8'"),
        ({"drafter": "medusa:x"}, InvalidRequest, "knows no cost of the drafter 'medusa'"),
        ({"drafter": "qwen3-1.7b"}, VocabularyMismatch, "151936 tokens and llama-3.1-8b 128256"),
        ({"drafter": "llama-3.2-1b,max_draft=3"}, UnknownOption, "option of the model drafter"),
        ({"drafter": "self:bf16"}, InvalidRequest, "write self:fp8"),
        ({"drafter": "nobody/nothing"}, ModelNotFound, "paceline pull nobody/nothing"),
        ({"drafter": "eagle:nobody/nothing"}, ModelNotFound, "paceline pull nobody/nothing"),
        ({"model": "nobody/nothing"}, ModelNotFound, "a plan fetches nothing"),
        ({"draft": 0}, InvalidRequest, "draft must be between 1"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        plan(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["h300", "", "h200:x", "h200:0", "h200:-1"])
def test_gpus_that_nobody_knows(words: str) -> None:
    with pytest.raises(InvalidRequest, match=r"a plan knows h200, h100|number of GPUs behind the colon"):
        read_gpus(words)
    assert read_gpus("b200:16") == (GPUS["b200"], 16)


def test_heads_decide_over_how_many_ranks_a_model_can_be_split() -> None:
    assert possible_degrees(LLAMA_3_1_8B, 16) == [1, 2, 4, 8, 16]
    assert possible_degrees(QWEN3_32B, 8) == [1, 2, 4, 8]
    assert possible_degrees(SMOLLM2_135M, 8) == [1, 3]
    assert possible_degrees(replace(LLAMA_3_1_8B, num_heads=24), 8) == [1, 2, 4, 8]


def test_drafts_pay_less_in_larger_batches_and_never_lose() -> None:
    speeds = plan(drafter="llama-3.2-1b", acceptance=0.5).speeds
    ratios = [speed.speculative.tok_s / speed.plain.tok_s for speed in speeds if speed.speculative]
    assert len(ratios) == len(speeds)
    assert ratios[0] > 1.2 > ratios[-1] >= 1
    least = [speed.least_acceptance or 1 for speed in speeds]
    assert least == sorted(least)


def test_the_least_acceptance_is_where_drafts_begin_to_pay() -> None:
    machine, least = plan(drafter="llama-3.2-1b").machine, plan(drafter="llama-3.2-1b").speeds[3].least_acceptance
    assert least is not None
    for acceptance, pays in ((least + 1e-3, True), (least - 1e-3, False)):
        assert (machine.best_step(8, 1024, longest=4, acceptance=acceptance).draft > 0) is pays


def test_a_drafter_as_slow_as_its_target_never_pays() -> None:
    speed = plan(drafter="llama-3.1-8b,format=bf16", acceptance=1.0, draft=1, batches=(64,)).speeds[0]
    assert speed.least_acceptance is None
    assert speed.speculative == speed.plain


def test_drafters_by_their_costs() -> None:
    costs = {
        words: plan(drafter=words, draft=4, batches=(1,)).machine
        for words in ("ngram", "eagle-shape", "llama-3.2-1b", "self:int4", "self")
    }
    seconds = {words: machine.step_seconds(1, 1000, 4) for words, machine in costs.items()}
    assert sorted(seconds, key=lambda words: seconds[words]) == list(seconds)
    drafters = {words: machine.drafter for words, machine in costs.items()}
    assert all(drafters.values())
    assert drafters["ngram"] is not None
    assert drafters["ngram"].weight_bytes == drafters["ngram"].kv_token == 0
    assert drafters["self"] is not None
    assert drafters["self"].kv_token == 0
    assert drafters["eagle-shape"] is not None
    assert drafters["eagle-shape"].kv_token == 2 * 8 * 128 * 2


def test_a_block_takes_one_pass_for_all_tokens() -> None:
    machine = plan(drafter="block-shape").machine
    block = machine.drafter
    assert block is not None
    assert block.size is not None
    assert block.block is not None
    assert block.block.rows == 8
    one, eight = (block.seconds(machine.place, length=n, sequences=4, context=500) for n in (1, 8))
    passed = pass_seconds(block.size, machine.place, rows=32, sequences=4, context=500, outs=4)
    assert passed < one < eight < 1.5 * one
    assert block.seconds(machine.place, length=0.5, sequences=4, context=500) == pytest.approx(one / 2, rel=0.01)
    layers, hidden, vocab = 5, 4096, 128256
    assert block.kv_token == 2 * layers * 8 * 128 * 2
    inner = layers * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * 14336)
    own = 2 * (inner + 5 * hidden * hidden + 2 * 256 * vocab)  # the output layer is the target's
    assert block.weight_bytes == pytest.approx(own, rel=0.001)


@pytest.mark.parametrize("layout", ["dflash", "dspark", "dflash2"])
def test_a_block_drafter_in_a_directory_is_planned_by_its_headers(tmp_path: Path, layout: str) -> None:
    folder = write_model(tmp_path)
    head = LAYOUTS[layout].write(tmp_path / "head", vocab=open_model(str(folder)).config.vocab_size)
    block = plan(str(folder), drafter=f"block:{head}", context=128).machine.drafter
    assert block is not None
    assert block.block is not None
    assert bool(block.block.heads) == (layout != "dflash")
    assert block.weight_bytes == pytest.approx(written_bytes(head), rel=0.02)


def written_bytes(head: Path) -> int:
    """Bytes of the tensors of a head that a plan counts, in 16 bits."""
    tensors = load_file(head / "model.safetensors")
    return 2 * sum(tensor.numel() for name, tensor in tensors.items() if not name.startswith("embed_tokens"))


def test_the_first_draft_pass_reads_two_tokens_of_each_sequence() -> None:
    machine = plan(drafter="llama-3.2-1b").machine
    assert machine.drafter is not None
    assert machine.drafter.size is not None
    place, pace = machine.place, machine.place.gpu.pace
    first, other = (
        pass_seconds(machine.drafter.size, place, rows=rows, sequences=40, context=500) for rows in (80, 40)
    )
    drafted = [machine.drafter.seconds(place, length=length, sequences=40, context=500) for length in (0, 1, 3)]
    assert drafted == pytest.approx([0, first + pace.draft, first + 2 * other + 3 * pace.draft])


def test_a_step_with_drafts_verifies_all_rows_and_accepts() -> None:
    machine = plan(drafter="ngram").machine
    verify = pass_seconds(machine.target, machine.place, rows=15, sequences=5, context=500)
    assert machine.step_seconds(5, 500, 2) == pytest.approx(verify + machine.place.gpu.pace.round)


def test_no_step_drafts_more_than_the_engine_allows() -> None:
    assert [longest_draft(count, 8) for count in (1, 64, 100, 512, 513)] == [8, 8, 5, 1, 0]


def test_formats_and_what_a_gpu_makes_of_them() -> None:
    def size(format: str, memory: float = H200_MEMORY) -> tuple[float, bool, int]:
        made = model_size("llama-3.1-8b", format=format, kv_format="bf16", memory=memory)  # type: ignore[arg-type]
        return round(made.matrices / 8.03e9, 1), made.few.narrow, made.many_rows

    assert size("auto") == size("bf16") == (2.0, False, 1)
    assert size("fp8") == (2.9, True, 65)  # beside 16 bits; the embedding has none
    assert size("fp8", memory=40e9) == (1.0, True, 256)
    assert size("int4")[:2] == (1.9, False)  # expanded
    assert size("int4", memory=40e9)[0] == pytest.approx(0.7, abs=0.05)
    assert size("int8") == (1.0, True, 1)


def test_windows_are_not_read_beyond() -> None:
    size = plan().machine.target
    half = replace(size, config=replace(size.config, windows=(0, 512) * 16))
    assert size.seen(4096) == 4096
    assert half.seen(4096) == (4096 + 512) / 2


def test_tied_embeddings_are_counted_once() -> None:
    assert plan("llama-3.2-1b").machine.target.parameters == pytest.approx(1.236e9, rel=0.001)
    assert plan().machine.target.parameters == pytest.approx(8.03e9, rel=0.001)
    made = plan("smollm2").machine.target
    assert made.parameters == pytest.approx(134.5e6, rel=0.01)


def test_tokens_of_a_step() -> None:
    assert tokens_per_step(0.5, 3) == 1.875
    assert tokens_per_step(1, 4) == 5
    assert tokens_per_step(0, 4) == 1


def test_a_report_says_where_figures_come_from() -> None:
    here, there = plan(), plan(gpu="h100", count=4, tensor_parallel=4, drafter="ngram", acceptance=0.4)
    assert MEASURED_SOURCE in text(here)
    said = text(there)
    assert ESTIMATED_SOURCE in said
    assert "NVLink 4: an estimate" in said
    assert "acceptance: given, not measured" in said
    assert "splits no model over GPUs yet" in said
    found = json.loads(json.dumps(record(there)))
    assert found["sources"]["speed"] == ESTIMATED_SOURCE
    assert found["batches"][0]["speculative"]["tok_s"] > found["batches"][0]["plain"]["tok_s"]
    assert found["memory"]["kv_tokens"] == there.memory.kv_tokens


def test_without_an_acceptance_no_speed_with_drafts_is_invented() -> None:
    found = plan(drafter="ngram", count=2)
    header = next(line for line in text(found).splitlines() if line.lstrip().startswith("batch"))
    assert "with drafts" not in header
    assert header.endswith("all 2")
    assert "pays from" in header
    assert all("speculative" not in batch for batch in record(found)["batches"])
    assert any("no --acceptance" in note for note in found.notes)


def test_formats_that_were_never_measured_are_said() -> None:
    assert any("never measured" in note for note in plan(format="int8").notes)
    assert not plan().notes
    assert question().count == 1
