"""Drafters of every kind: begun for a job, or read back from their directory to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import InvalidRequest, UnknownOption
from paceline.models.directory import member, read_json
from paceline.models.load import LoadedModel
from paceline.text.tokenizer import Tokenizer
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import pad
from paceline.train.options import DRAFT_VOCAB, Job
from paceline.train.output.packing import unpacked
from paceline.train.output.storage import read_tensors
from paceline.train.output.tokenizer_files import tokenizer_files
from paceline.train.students.initial_weights import (
    DraftVocabulary,
    draft_vocabulary,
    eagle_shape,
    feature_layers,
    feature_scale,
    given_vocabulary,
    new_eagle,
)
from paceline.train.students.medusa import MedusaHeads, MedusaShape
from paceline.train.students.published import Origin, PublishedHead, beginning
from paceline.train.students.small import HEAD_DIM, SmallModel, SmallShape
from paceline.train.students.student import Student
from paceline.train.students.teacher import Teacher

KINDS = ("eagle", "medusa", "small")
SAMPLE = 64  # exchanges that the size of features is measured on


@dataclass(frozen=True, slots=True)
class Beginning:
    student: Student
    teacher: Teacher
    vocabulary: DraftVocabulary | None = None  # where it does not draft all tokens of the target
    origin: Origin | None = None  # whose weights it has at first


def begin(job: Job, model: LoadedModel, trained: Sequence[Exchange], *, device: torch.device) -> Beginning:
    """A drafter that has learnt nothing yet, or what another one knew, and a teacher that shows what it needs."""
    dtype = arithmetic(device)
    if job.kind == "eagle" and job.begin is not None:
        return _go_on(job, model, trained, dtype, device)
    if job.kind == "eagle":
        return _eagle(job, model, trained, dtype, device)
    teacher = Teacher(model, layers=(), dtype=dtype, device=device)
    config = model.config
    if job.kind == "medusa":
        shape = MedusaShape(hidden=config.hidden_size, vocab=config.vocab_size, heads=job.heads)
        return Beginning(MedusaHeads.new(shape, teacher, dtype=dtype, packing=job.packing), teacher)
    if job.kind != "small":
        raise UnknownOption("kind of drafter", job.kind, KINDS)
    small = small_shape(job, model)
    student = SmallModel.new(small, tokenizer=tokenizer_files(model), dtype=dtype, device=device, seed=job.seed)
    return Beginning(student, teacher)


def arithmetic(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def small_shape(job: Job, model: LoadedModel) -> SmallShape:
    hidden, dim = job.hidden, min(HEAD_DIM, job.hidden)
    if hidden % dim or hidden % 32:
        raise InvalidRequest(f"--hidden must be a multiple of 32, and of {HEAD_DIM} from there on, not {hidden}")
    config = model.config
    return SmallShape(
        hidden=hidden,
        intermediate=job.intermediate or -(-hidden * 8 // 96) * 32,
        layers=job.layers,
        heads=hidden // dim,
        head_dim=dim,
        vocab=config.vocab_size,
        max_context=config.max_context,
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
    )


def read_drafter(folder: Path, model: LoadedModel, *, device: torch.device) -> Beginning:
    """A drafter that is there, by what its config.json says it is."""
    config, dtype = read_json(member(folder, "config.json")), arithmetic(device)
    if "medusa_num_heads" in config:
        teacher = Teacher(model, layers=(), dtype=dtype, device=device)
        medusa = MedusaShape(model.config.hidden_size, model.config.vocab_size, heads=config["medusa_num_heads"])
        tensors = unpacked(read_tensors(member(folder, "model.safetensors"))[0])
        return Beginning(MedusaHeads(medusa, params=tensors, dtype=dtype, device=device), teacher)
    if config.get("architectures") == ["LlamaForCausalLM"]:
        raise InvalidRequest(f"{folder}: a model, no heads; it is measured with `paceline bench offline`")
    head = PublishedHead.read(folder, model.config, steps=1)
    teacher = Teacher(model, layers=head.shape.layers, dtype=dtype, device=device)
    whole = torch.ones(len(head.shape.layers) * head.shape.hidden, device=device)
    return Beginning(head.student(teacher, scale=whole, dtype=dtype, packing="bf16"), teacher)


def _eagle(
    job: Job, model: LoadedModel, trained: Sequence[Exchange], dtype: torch.dtype, device: torch.device
) -> Beginning:
    config = model.config
    layers = feature_layers(config.num_layers)
    teacher = Teacher(model, layers=layers, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_gguf(model.metadata) if model.kind == "gguf" else Tokenizer.from_directory(model.path)
    ends = {*config.eos_ids, *tokenizer.eos_ids}
    size = job.draft_vocab or DRAFT_VOCAB
    vocabulary = draft_vocabulary(trained, size=size, vocab=config.vocab_size, always=ends)
    sample = pad(trained[:SAMPLE]).to(device)
    shape = eagle_shape(
        config,
        layers=layers,
        draft_vocab=len(vocabulary.ids),
        intermediate=job.intermediate or config.intermediate_size,
        steps=job.unroll,
    )
    head = new_eagle(
        shape,
        teacher,
        draft_ids=vocabulary.ids,
        scale=feature_scale(teacher(sample.ids), sample),
        dtype=dtype,
        seed=job.seed,
        packing=job.packing,
    )
    return Beginning(head, teacher, vocabulary)


def _go_on(
    job: Job, model: LoadedModel, trained: Sequence[Exchange], dtype: torch.dtype, device: torch.device
) -> Beginning:
    head, origin = beginning(job, model.config)
    teacher = Teacher(model, layers=head.shape.layers, dtype=dtype, device=device)
    sample = pad(trained[:SAMPLE]).to(device)
    scale = feature_scale(teacher(sample.ids), sample)
    student = head.student(teacher, scale=scale, dtype=dtype, packing=job.packing)
    vocabulary = given_vocabulary(trained, head.draft_ids, vocab=model.config.vocab_size)
    return Beginning(student, teacher, vocabulary, origin)
