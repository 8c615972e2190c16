"""The model card of a trained drafter: purpose, measured acceptance, training, data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline import __version__
from paceline.train.loop.score import Score


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the card says."""

    kind: str
    target: str
    license: str
    parameters: int
    packing: str
    scores: Mapping[str, tuple[int, Score]]  # number of prompts and score, by set; no set was trained on
    sources: Sequence[tuple[str, str, int]]  # source, licence, number of prompts
    left_out: int  # prompts that overlap with an evaluation set
    answers: int
    answer_tokens: int
    sampled: float  # share of answers that are sampled
    temperature: float
    vocabulary: tuple[int, float] | None  # size of the draft vocabulary, and the share of the answers it covers
    origin: tuple[str, str | None] | None  # name and licence of the initial head
    steps: int
    minutes: float
    device: str
    command: str
    max_new: int  # tokens of the longest answer


def card(facts: Facts) -> bytes:
    parts = [_front(facts), _about(facts), _scores(facts), _making(facts), _data(facts)]
    return "\n".join(parts).encode()


def _front(facts: Facts) -> str:
    return f"---\nlicense: {facts.license}\nlibrary_name: paceline\ntags: [speculative-decoding, {facts.kind}]\n---\n"


def _about(facts: Facts) -> str:
    word = "model" if facts.kind == "small" else facts.kind
    return (
        f"# A drafter of kind `{facts.kind}` for {facts.target}\n\n"
        f"{facts.parameters / 1e6:.1f} million parameters, matrices in {facts.packing}. It guesses what the target "
        f"says next; the target checks every guess, so the text is the target's own.\n\n"
        f"```\npaceline generate {facts.target} --drafter {word}:PATH\n```\n"
    )


def _scores(facts: Facts) -> str:
    draft = max((score.draft for _, score in facts.scores.values()), default=0)
    lines = [
        "## Measured acceptance\n",
        f"Greedy, drafts of {draft} tokens, on prompts that were not trained on, rounds counted as the engine does "
        f"over answers of up to {facts.max_new} tokens.\n",
    ]
    lines.append("| set | prompts | tokens per round | " + " | ".join(f"position {i + 1}" for i in range(draft)) + " |")
    lines.append("|---|---:|---:|" + "---:|" * draft)
    for name, (prompts, score) in facts.scores.items():
        shares = " | ".join(f"{share:.1%}" for share in score.by_position)
        lines.append(f"| {name} | {prompts} | {score.tokens_per_round:.2f} | {shares} |")
    lines.append("\nA position's share: how often its token was accepted, given that those before it were.\n")
    return "\n".join(lines)


def _making(facts: Facts) -> str:
    vocabulary = origin = ""
    if facts.vocabulary is not None:
        tokens, share = facts.vocabulary
        vocabulary = f" It drafts {tokens} tokens of the vocabulary, {share:.2%} of what the target says."
    if facts.origin is not None:
        name, license = facts.origin
        origin = (
            f"It began with the weights of `{name}` (licence: {license or 'not known'}), which had been trained before "
            "on what its own card tells. "
        )
    return (
        f"## How it was made\n\n{origin}{facts.steps} steps in {facts.minutes:.1f} minutes of training on "
        f"{facts.device}, with Paceline {__version__}. The target answered the prompts itself: {facts.answers} "
        f"answers, {facts.answer_tokens} tokens, {facts.sampled:.0%} of them sampled at temperature "
        f"{facts.temperature:g}, the others greedy.{vocabulary}\n\n```\n{facts.command}\n```\n\n"
        "![loss and held-out tokens per round](curves.svg)\n"
    )


def _data(facts: Facts) -> str:
    lines = ["## Data\n", f"Prompts only; {facts.left_out} were left out because they overlap with a set above.\n"]
    lines += ["| source | licence | prompts |", "|---|---|---:|"]
    lines += [f"| {source} | {license} | {count} |" for source, license, count in facts.sources]
    return "\n".join(lines) + "\n"
