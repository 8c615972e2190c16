"""A plan: a model on some GPUs of one kind, how it is split, what it needs, and how fast it decodes by batch.

The model is split over the fewest ranks whose memory holds it, unless the user says how many. The other GPUs hold
further copies: replicas, which share no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.checks import check_integer, check_number
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest, OutOfMemory, UnknownOption
from paceline.models.weights import Format
from paceline.plan.drafting import PaperDrafter, paper_drafter, split_drafter
from paceline.plan.gpus import Gpu
from paceline.plan.memory import RankMemory, rank_memory
from paceline.plan.passes import Place
from paceline.plan.size import KV_BYTES, ModelSize, model_size, possible_degrees
from paceline.plan.speed import Machine, Step
from paceline.sizes import format_size

MAX_COUNT = 1 << 20  # GPUs, sequences or tokens of a plan
LINKED = 8  # ranks of a model at most: GPUs that one link joins


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned."""

    model: str
    gpu: Gpu
    count: int = 1  # GPUs
    tensor_parallel: int | None = None  # None: the fewest ranks that hold the model
    drafter_tensor_parallel: int = 1  # ranks of the drafter: 1 or as many as the model's
    drafter: str = "none"
    draft: int = 4  # tokens of the longest draft
    acceptance: float | None = None  # None: not known
    context: int = 2048  # tokens of a sequence at its end, prompt and answer
    max_sequences: int = 256
    batches: tuple[int, ...] = ()  # (): powers of two up to the largest
    format: Format = "auto"
    kv_format: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("count", "draft", "max_sequences"):
            check_integer(name, getattr(self, name), 1, MAX_COUNT)
        check_integer("context", self.context, 2, MAX_COUNT)
        if self.tensor_parallel is not None and self.tensor_parallel > self.count:
            raise InvalidRequest(
                f"--tensor-parallel {self.tensor_parallel} needs as many GPUs, and there are {self.count}: write "
                f"--gpus {self.gpu.name}:{self.tensor_parallel}"
            )
        if self.drafter_tensor_parallel not in (1, self.tensor_parallel):
            ranks = self.tensor_parallel
            take = "give --tensor-parallel, too" if ranks is None else f"take {'1 or ' * (ranks > 1)}{ranks}"
            raise InvalidRequest(
                f"--drafter-tensor-parallel {self.drafter_tensor_parallel}: a drafter is on one GPU or on all of the "
                f"model's; {take}"
            )
        if self.drafter_tensor_parallel > 1 and self.drafter == "none":
            raise InvalidRequest("--drafter-tensor-parallel speaks of a drafter: name one with --drafter")
        if self.acceptance is not None:
            check_number("acceptance", self.acceptance, 0, 1)
            if self.drafter == "none":
                raise InvalidRequest("--acceptance speaks of a drafter: name one with --drafter")
        if self.kv_format not in KV_BYTES:
            raise UnknownOption("kv_format", self.kv_format, KV_BYTES)


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """Speeds of one replica with a full batch."""

    plain: Step
    speculative: Step | None  # the fastest, plain where no draft pays; None: no drafter, or its acceptance is not known
    least_acceptance: float | None  # from which drafts pay; None: no drafter, or none pays


@dataclass(frozen=True, slots=True)
class Plan:
    question: Question
    machine: Machine
    memory: RankMemory
    largest_batch: int
    speeds: tuple[BatchSpeed, ...]
    notes: tuple[str, ...] = field(default=())  # what is left out, and what is not known

    @property
    def replicas(self) -> int:
        return self.question.count // self.machine.place.ranks


def make_plan(question: Question) -> Plan:
    """Plan, or raise InvalidRequest or OutOfMemory with what would do."""
    machine, memory = _placed(question)
    largest = min(question.max_sequences, memory.sequences(question.context))
    batches = question.batches or _powers(largest)
    beyond = [batch for batch in batches if batch > largest]
    if beyond:
        raise InvalidRequest(
            f"--batch {beyond[0]} is more than the {largest} sequences of {question.context} tokens that have room; "
            "the limits are --max-sequences, --context and the memory"
        )
    speeds = tuple(_speed(machine, question, batch) for batch in batches)
    return Plan(question, machine, memory, largest, speeds, _notes(question, machine))


def longest_draft(sequences: int, draft: int) -> int:
    """Return the longest draft that every sequence of a batch may have, by the engine's limit of a step."""
    return min(draft, EngineConfig.of(device="cuda").max_draft_tokens // sequences)


def _speed(machine: Machine, question: Question, batch: int) -> BatchSpeed:
    context, longest = question.context / 2, longest_draft(batch, question.draft)
    plain = machine.step(batch, context)
    if machine.drafter is None:
        return BatchSpeed(plain, None, None)
    least = machine.least_acceptance(batch, context, longest=longest)
    if question.acceptance is None:
        return BatchSpeed(plain, None, least)
    best = machine.best_step(batch, context, longest=longest, acceptance=question.acceptance)
    return BatchSpeed(plain, best, least)


def _placed(question: Question) -> tuple[Machine, RankMemory]:
    """Choose the ranks, and check that the model fits."""
    first = _at(question, question.tensor_parallel or 1)[0]
    model, drafter = first.target, first.drafter
    if question.context > model.config.max_context:
        raise InvalidRequest(
            f"--context {question.context} is more than the {model.config.max_context} tokens that {model.name} knows"
        )
    degrees = possible_degrees(model.config, LINKED)
    asked = question.tensor_parallel
    if asked is not None:
        model.check_degree(asked, option="--tensor-parallel", most=LINKED)
    if drafter is not None and drafter.size is not None and drafter.ranks > 1:
        drafter.size.check_degree(drafter.ranks, option="--drafter-tensor-parallel", most=LINKED)
        degrees = [degree for degree in degrees if degree in possible_degrees(drafter.size.config, LINKED)]
    tried = [asked] if asked is not None else [degree for degree in degrees if degree <= question.count]
    for degree in tried:
        machine, memory = _at(question, degree)
        if memory.sequences(question.context):
            return machine, memory
    raise _too_small(question, degrees, tried[-1])


def _at(question: Question, ranks: int) -> tuple[Machine, RankMemory]:
    place = Place(question.gpu, ranks)
    target = _target(question, place)
    drafter = _drafter(question, target, place)
    memory = rank_memory(target, place, drafter, max_sequences=question.max_sequences, longest=question.draft)
    return Machine(target, place, drafter), memory


def _target(question: Question, place: Place) -> ModelSize:
    return model_size(
        question.model,
        format=question.format,
        kv_format=question.kv_format,
        memory=place.gpu.memory * place.ranks,
    )


def _drafter(question: Question, target: ModelSize, place: Place) -> PaperDrafter | None:
    ranks = place.ranks if question.drafter_tensor_parallel > 1 else 1
    drafter = paper_drafter(
        question.drafter, question.model, target, kv_format=question.kv_format, memory=place.gpu.memory * ranks
    )
    return drafter if drafter is None or ranks == 1 else split_drafter(drafter, ranks)


def _too_small(question: Question, degrees: Sequence[int], tried: int) -> OutOfMemory:
    """Say what is missing, and how many GPUs would do."""
    gpu, memory = question.gpu, _at(question, tried)[1]
    need = memory.weights + memory.drafter + memory.workspace + memory.kv_token * question.context
    enough = [degree for degree in degrees if _at(question, degree)[1].sequences(question.context)]
    fewer = "a smaller --format such as fp8 or int4, a shorter --context, or fewer --max-sequences"
    both = ("--tensor-parallel", "--drafter-tensor-parallel")[: 2 if question.drafter_tensor_parallel > 1 else 1]
    advice = (
        f"{enough[0]} would do: --gpus {gpu.name}:{enough[0]} {' '.join(f'{option} {enough[0]}' for option in both)}"
        if enough
        else f"no number up to {LINKED} would do: take {fewer}"
    )
    return OutOfMemory(
        f"{question.model} with one sequence of {question.context} tokens needs {format_size(need)} on each of {tried} "
        f"{gpu.name}, which have {format_size(gpu.memory)}; {advice}"
    )


def _powers(most: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*(1 << shift for shift in range(most.bit_length())), most]))


def _notes(question: Question, machine: Machine) -> tuple[str, ...]:
    notes = []
    ranks, drafter = machine.place.ranks, machine.drafter
    if ranks > 1:
        notes.append(f"{ranks} ranks: sums across GPUs were never measured, and Paceline splits no model over GPUs yet")
    if question.count % ranks:
        notes.append(f"{question.count % ranks} of {question.count} GPUs are left over: replicas of {ranks}")
    if machine.target.few.narrow:
        notes.append(f"targets in {machine.target.format} were never measured: their speed is a coarse estimate")
    if drafter and question.acceptance is None:
        notes.append("no --acceptance: speeds with drafts are not known, only from which acceptance on drafts pay")
    return tuple(notes)
