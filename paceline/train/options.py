"""Options of `paceline train`: the target, a training, and a measurement of a drafter that is already trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.models.weights import Format
from paceline.train.data.answers import AnswerSettings
from paceline.train.students.labels import Aim
from paceline.train.students.packing import Packing

HELD_OUT_PROMPTS = 256  # prompts to judge by, of 1,024 or more
CPU_BATCH_TOKENS = 2048  # tokens of a step on a CPU: some seconds
DRAFT_VOCAB = 16384  # tokens in the draft vocabulary of a new EAGLE head


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The target: which model, on which device, and how it answers prompts."""

    model: str  # a directory, a .gguf file, 'smollm2', or a hub id
    device: str = "cpu"
    format: Format = "auto"  # weights while the target answers
    serving: Format | None = None  # weights that the drafter will be served with; None: unquantised
    threads: int | None = None  # CPU threads; None: one per core
    max_length: int = 1024  # tokens of prompt and answer together
    max_new: int = 320  # tokens of an answer
    answer_batch: int = 256  # sequences that one worker answers at once
    answer_workers: int = 1  # processes per GPU

    def answer_settings(self, *, sampled: float = 0.0, temperature: float = 0.0, seed: int = 0) -> AnswerSettings:
        return AnswerSettings(
            target=self.model,
            format="bf16" if self.format == "auto" and self.device == "cuda" else self.format,
            max_length=self.max_length,
            max_new=self.max_new,
            sampled=sampled,
            temperature=temperature,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Everything that defines a training. Nothing is written outside `out` and `work`."""

    kind: str
    target: TargetOptions
    prompts: Path
    out: Path
    evals: Mapping[str, Path] = field(default_factory=dict)  # evaluation sets, never trained on
    excludes: Sequence[Path] = ()  # further texts; prompts that overlap with them are not trained on
    license: str = "other"
    max_prompts: int | None = None
    held_out: int | None = None  # prompts that the trainer evaluates on; None: HELD_OUT_PROMPTS, or a quarter of fewer
    samples: int = 1  # answers per training prompt
    sampled: float = 0.3  # share of first answers sampled at `temperature`; further answers all are
    temperature: float = 0.8
    initial_head: str | None = None  # EAGLE head to start from: a directory, a hub id, or the name of a shipped one
    draft_vocab: int | None = None  # None: DRAFT_VOCAB, or that of `initial_head`
    unroll: int = 5  # draft steps that an EAGLE or MTP head is trained over
    intermediate: int | None = None  # width of the MLP; None: the target's, that of `initial_head`, or 8/3 of `hidden`
    heads: int = 4  # number of Medusa heads
    hidden: int = 192  # width of a small model
    layers: int = 4  # layers of a small model or a block drafter
    block: int = 8  # rows of a block
    taps: int = 3  # hidden states that a block drafter reads
    markov: int = 64  # rank of a block drafter's markov head; 0: none
    aim: Aim = "likelihood"
    batch_tokens: int = 16384
    learning_rate: float = 4e-3
    minutes: float = 15.0
    max_steps: int | None = None
    evaluations: int = 24
    draft: int = 4  # tokens of a draft in evaluations
    seed: int = 0
    packing: Packing = "bf16"
    command: str = ""  # the command line, for the model card

    @property
    def work(self) -> Path:
        """Directory of answers and checkpoints; may be removed once training has ended."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def answer_settings(self) -> AnswerSettings:
        return self.target.answer_settings(sampled=self.sampled, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """A measurement of a trained drafter on evaluation sets; no file is left behind."""

    target: TargetOptions
    drafter: Path
    evals: Mapping[str, Path]
    draft: int = 4  # tokens of a draft
    batch_tokens: int = 16384
