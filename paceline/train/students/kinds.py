"""Students of every kind: created for a training, or read back from a drafter's directory to be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import InvalidRequest, UnknownOption
from paceline.models.block_config import is_block
from paceline.models.directory import member, read_json
from paceline.models.load import LoadedModel
from paceline.text.tokenizer import Tokenizer
from paceline.train.data.answers import Exchange
from paceline.train.data.batches import TextBatch, in_order
from paceline.train.data.teacher import Teacher
from paceline.train.options import DRAFT_VOCAB, TrainOptions
from paceline.train.students.block_start import block_shape, new_block, read_block_student
from paceline.train.students.initial_weights import (
    DraftVocabulary,
    draft_vocabulary,
    eagle_shape,
    feature_layers,
    feature_scale,
    new_eagle,
    new_mtp,
    vocabulary_of,
)
from paceline.train.students.medusa import MedusaShape, MedusaStudent
from paceline.train.students.mtp import MtpStudent
from paceline.train.students.published import HeadOrigin, PublishedHead, read_initial_head
from paceline.train.students.small import HEAD_DIM, SmallShape, SmallStudent
from paceline.train.students.student import Student
from paceline.train.students.tokenizer_files import tokenizer_files

KINDS = ("eagle", "block", "mtp", "medusa", "small")
SCALE_EXCHANGES = 64  # exchanges that the magnitudes of features are measured on


@dataclass(frozen=True, slots=True)
class Start:
    """The student and the teacher at the start of a training."""

    student: Student
    teacher: Teacher
    vocabulary: DraftVocabulary | None = None  # None: the student drafts every token of the target
    origin: HeadOrigin | None = None  # None: the weights are new


def new_student(
    options: TrainOptions, model: LoadedModel, trained: Sequence[Exchange], *, device: torch.device
) -> Start:
    """Create a student, new or with the weights of the initial head, and a teacher for it."""
    dtype = arithmetic(device)
    if options.kind == "eagle" and options.initial_head is not None:
        return _eagle_from_head(options, model, trained, dtype, device)
    if options.kind == "eagle":
        return _new_eagle(options, model, trained, dtype, device)
    if options.kind == "block":
        return _new_block(options, model, trained, dtype, device)
    teacher = Teacher(model, layers=(), dtype=dtype, device=device)
    config = model.config
    if options.kind == "mtp":
        head = eagle_shape(
            config,
            layers=(config.num_layers,),
            draft_vocab=config.vocab_size,
            intermediate=options.intermediate or config.intermediate_size,
            steps=options.unroll,
        )
        return Start(new_mtp(head, teacher, dtype=dtype, seed=options.seed, packing=options.packing), teacher)
    if options.kind == "medusa":
        shape = MedusaShape(hidden=config.hidden_size, vocab=config.vocab_size, heads=options.heads)
        return Start(MedusaStudent.new(shape, teacher, dtype=dtype, packing=options.packing), teacher)
    if options.kind != "small":
        raise UnknownOption("kind of drafter", options.kind, KINDS)
    small = small_shape(options, model)
    files = tokenizer_files(model)
    return Start(SmallStudent.new(small, tokenizer=files, dtype=dtype, device=device, seed=options.seed), teacher)


def read_student(folder: Path, model: LoadedModel, *, device: torch.device) -> tuple[Student, Teacher]:
    """Read a trained drafter, of the kind that its config.json states, and a teacher for it."""
    config, dtype = read_json(member(folder, "config.json")), arithmetic(device)
    if "medusa_num_heads" in config:
        medusa = MedusaStudent.read(folder, model.config, dtype=dtype, device=device)
        return medusa, Teacher(model, layers=(), dtype=dtype, device=device)
    if config.get("speculators_model_type") == "mtp":
        student = MtpStudent.read(folder, model.config, dtype=dtype, device=device)
        return student, Teacher(model, layers=(), dtype=dtype, device=device)
    if config.get("architectures") == ["LlamaForCausalLM"]:
        raise InvalidRequest(f"{folder}: a model, no heads; it is measured with `paceline bench offline`")
    if is_block(config):
        block = read_block_student(folder, model.config, dtype=dtype, device=device)
        return block, Teacher(model, layers=block.shape.taps, dtype=dtype, device=device)
    head = PublishedHead.read(folder, model.config, steps=1)
    teacher = Teacher(model, layers=head.shape.layers, dtype=dtype, device=device)
    unscaled = torch.ones(len(head.shape.layers) * head.shape.hidden, device=device)
    return head.student(teacher, scale=unscaled, dtype=dtype, packing="bf16"), teacher


def arithmetic(device: torch.device) -> torch.dtype:
    """Return the dtype that students and teachers compute in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def small_shape(options: TrainOptions, model: LoadedModel) -> SmallShape:
    hidden, dim = options.hidden, min(HEAD_DIM, options.hidden)
    if hidden % dim or hidden % 32:
        raise InvalidRequest(f"--hidden must be a multiple of 32, and of {HEAD_DIM} from there on, not {hidden}")
    config = model.config
    return SmallShape(
        hidden=hidden,
        intermediate=options.intermediate or -(-hidden * 8 // 96) * 32,
        layers=options.layers,
        heads=hidden // dim,
        head_dim=dim,
        vocab=config.vocab_size,
        max_context=config.max_context,
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
    )


def _new_eagle(
    options: TrainOptions, model: LoadedModel, trained: Sequence[Exchange], dtype: torch.dtype, device: torch.device
) -> Start:
    config = model.config
    layers = feature_layers(config.num_layers)
    teacher = Teacher(model, layers=layers, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_gguf(model.metadata) if model.kind == "gguf" else Tokenizer.from_directory(model.path)
    ends = {*config.eos_ids, *tokenizer.eos_ids}
    size = options.draft_vocab or DRAFT_VOCAB
    vocabulary = draft_vocabulary(trained, size=size, vocab=config.vocab_size, always=ends)
    shape = eagle_shape(
        config,
        layers=layers,
        draft_vocab=len(vocabulary.ids),
        intermediate=options.intermediate or config.intermediate_size,
        steps=options.unroll,
    )
    student = new_eagle(
        shape,
        teacher,
        draft_ids=vocabulary.ids,
        scale=feature_scale(teacher, _sample(options, trained, device)),
        dtype=dtype,
        seed=options.seed,
        packing=options.packing,
    )
    return Start(student, teacher, vocabulary)


def _new_block(
    options: TrainOptions, model: LoadedModel, trained: Sequence[Exchange], dtype: torch.dtype, device: torch.device
) -> Start:
    shape = block_shape(options, model.config, trained)
    teacher = Teacher(model, layers=shape.taps, dtype=dtype, device=device)
    scale = feature_scale(teacher, _sample(options, trained, device))
    student = new_block(shape, teacher, scale=scale, dtype=dtype, seed=options.seed, packing=options.packing)
    return Start(student, teacher)


def _eagle_from_head(
    options: TrainOptions, model: LoadedModel, trained: Sequence[Exchange], dtype: torch.dtype, device: torch.device
) -> Start:
    head, origin = read_initial_head(options, model.config)
    teacher = Teacher(model, layers=head.shape.layers, dtype=dtype, device=device)
    scale = feature_scale(teacher, _sample(options, trained, device))
    student = head.student(teacher, scale=scale, dtype=dtype, packing=options.packing)
    vocabulary = vocabulary_of(trained, head.draft_ids, vocab=model.config.vocab_size)
    return Start(student, teacher, vocabulary, origin)


def _sample(options: TrainOptions, trained: Sequence[Exchange], device: torch.device) -> Iterator[TextBatch]:
    """Yield batches of the first exchanges, no larger than those of the training."""
    return (texts.to(device) for texts in in_order(trained[:SCALE_EXCHANGES], tokens=options.batch_tokens))
