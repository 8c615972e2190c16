"""The MTP head in training against drafting with it, and what comes of a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from paceline.errors import UnsupportedModel
from paceline.llm import LLM
from paceline.models.load import load_model
from paceline.models.mtp import load_mtp
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import Teacher
from paceline.train.measure import measure
from paceline.train.options import EvalOptions
from paceline.train.run import train
from paceline.train.students.initial_weights import eagle_shape, new_mtp
from paceline.train.students.kinds import read_student
from paceline.train.students.mtp import MtpStudent, sizes
from paceline.train.students.packing import PACKINGS, Packing, unpacked
from paceline.train.students.student import label_rows
from paceline.types import OFF, SamplingParams, Speculation
from tests.heads import write_head
from tests.mtp_checkpoints import LAYOUTS, Names, PlainMtp
from tests.plain_eagle import PlainTarget
from tests.train.conftest import MakeOptions
from tests.train.toy_training import teacher_for, texts_of, write_prompts

CPU, STEPS = torch.device("cpu"), 3


def student(teacher: Teacher, *, packing: Packing = "bf16") -> MtpStudent:
    config = teacher.config
    shape = eagle_shape(
        config, layers=(config.num_layers,), draft_vocab=config.vocab_size, intermediate=96, steps=STEPS
    )
    return new_mtp(shape, teacher, dtype=torch.float32, seed=0, packing=packing)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return teacher_for(layers=())


@pytest.fixture(scope="module")
def texts() -> TextBatch:
    return texts_of(lengths=(20, 32), starts=(5, 9))


def far_from_new(made: MtpStudent) -> MtpStudent:
    """Change all weights, so that every part of the head matters."""
    with torch.no_grad():
        for index, param in enumerate(made.params.values()):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
            param.copy_(param * noise.exp() if param.dim() == 1 else param + 0.1 * noise)
    return made


@pytest.fixture
def head(teacher: Teacher) -> MtpStudent:
    return far_from_new(student(teacher))


def test_a_new_head_says_what_the_target_does(teacher: Teacher, texts: TextBatch) -> None:
    states = teacher(texts.ids)
    made = student(teacher)
    with torch.no_grad():
        made.params["mtp_layers.0.input_proj.weight"][:, :64] = 0
    best = (states.hidden @ teacher.head.T).argmax(-1)
    assert (made.guesses(teacher, states, texts, 1)[..., 0] == best).float().mean() > 0.8


def test_guesses_are_the_drafts_of_the_formulas(target: Path, tmp_path: Path) -> None:
    """Of a text that the head itself continues, so that drafted and true tokens are the same."""
    model = load_model(str(target))
    teacher = Teacher(model, layers=(), dtype=torch.float32, device=CPU)
    folder = tmp_path / "head"
    folder.mkdir()
    for name, data in far_from_new(student(teacher)).files().items():
        (folder / name).write_bytes(data)
    plain = PlainMtp(folder, PlainTarget(target), Names.inside("mtp_layers.0."))
    again, _ = read_student(folder, model, device=CPU)
    ids, drafts = torch.zeros((8, 16), dtype=torch.int64), []
    for row in range(8):
        before = [100 + (row + 3) * i % 16 for i in range(12)]
        drafts.append(plain.draft(before, STEPS))
        ids[row, : 12 + STEPS] = torch.tensor([*before, *drafts[-1]])
    texts = TextBatch(ids=ids, starts=torch.full((8,), 4), ends=torch.full((8,), 15))
    assert len({tuple(draft) for draft in drafts}) > 4
    assert again.guesses(teacher, teacher(ids), texts, STEPS)[:, 10].tolist() == drafts


def test_the_loss_is_the_distance_from_the_target(head: MtpStudent, teacher: Teacher, texts: TextBatch) -> None:
    states = teacher(texts.ids)
    found = head.losses(teacher, states, texts, "likelihood")
    rows, length = label_rows(texts, head._all), texts.ids.shape[1]
    wanted = (states.hidden.flatten(0, 1)[rows + 1] @ teacher.head.T).log_softmax(-1)
    for step, z in enumerate(head._unroll(teacher, states, texts, STEPS)):
        deep = rows % length - step >= (texts.starts - 1)[rows // length]
        logits = (z.flatten(0, 1)[rows] @ teacher.head.T).log_softmax(-1)
        distance = (wanted.exp() * (wanted - logits)).sum(-1)[deep].mean()
        assert found.by_step[step] == pytest.approx(distance.item(), abs=1e-4)
    found.total.backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in head.params.values())


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_file_is_the_layout_of_speculators(teacher: Teacher, packing: Packing, tmp_path: Path) -> None:
    made = student(teacher, packing=packing)
    files = made.files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    raw = load_tensors(files["model.safetensors"])
    assert raw["mtp_layers.0.input_proj.weight"].dtype == torch.bfloat16
    assert {name: tuple(tensor.shape) for name, tensor in unpacked(raw).items()} == sizes(made.shape)
    config = json.loads(files["config.json"])
    assert (config["speculators_model_type"], config["num_nextn_predict_layers"]) == ("mtp", 1)
    assert config["transformer_layer_config"]["num_hidden_layers"] == teacher.config.num_layers
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == STEPS
    assert load_mtp(tmp_path, teacher.config).config.taps == (teacher.config.num_layers,)


def test_a_trained_head_is_accepted_in_the_engine(answered: MakeOptions, target: Path, tmp_path: Path) -> None:
    """Well above chance, which is 1.07 tokens per round of sixteen letters, and with the text unchanged."""
    options = answered(tmp_path / "mtp", kind="mtp", max_steps=25, evaluations=1)
    scores = train(options, lambda text: None)
    assert scores["held-out"].tokens_per_round > 1.3
    always = {"max_draft": 4, "fixed_draft": True, "max_draft_batch": 64}
    words = f"mtp:{options.out},min_confidence=0"
    llm = LLM(str(target), drafter=words, format="fp32", max_context=128, threads=1, **always)
    prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in ("the cat", "a big red tree")]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = llm.generate(prompts, params, speculation=Speculation(drafter="mtp"))
    assert [one.tokens for one in answers] == [one.tokens for one in llm.generate(prompts, params, speculation=OFF)]
    assert 1 + sum(one.stats.accepted for one in answers) / sum(one.stats.rounds for one in answers) > 1.25
    assert "--drafter mtp:PATH" in (options.out / "README.md").read_text()
    few = write_prompts(tmp_path / "few.jsonl", count=6, seed=4)
    again = measure(EvalOptions(options.target, options.out, evals={"few": few}), lambda text: None)
    assert again["few"].tokens_per_round > 1.25


def test_a_head_that_is_not_trained_here_is_not_measured(tmp_path: Path) -> None:
    target, folder = LAYOUTS["alone for Qwen3"].write(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"an MTP head with a difference in layers.0.k_norm drafts, but is not"):
        read_student(folder, load_model(str(target)), device=CPU)
    target, folder = LAYOUTS["alone for Llama"].write(tmp_path / "llama")
    values = json.loads((folder / "config.json").read_text())
    values["transformer_layer_config"] |= {"model_type": "mistral", "sliding_window": 8}
    write_head(folder, values, load_file(folder / "model.safetensors"))
    with pytest.raises(UnsupportedModel, match="an MTP head with a window of 8 drafts"):
        read_student(folder, load_model(str(target)), device=CPU)
