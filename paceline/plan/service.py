"""What one replica does in a step, as tables that a simulation reads millions of times.

    step     seconds by the number of sequences, and more for each token of their contexts
    prompts  a pass of its own, in the same step: reading ^ x + computing ^ x as in `plan.passes`, and attention

A sequence gets the mean number of tokens in every step: acceptance is not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.plan.fleet import Plan, longest_draft
from paceline.plan.passes import PROMPT_ROWS, prompt_attention, prompt_seconds
from paceline.plan.speed import Machine, Step

FAR = 1024  # tokens of context at which the price of a token of context is taken


@dataclass(frozen=True, slots=True)
class Service:
    """A replica on paper. Entry n of a table is for n sequences; entry 0 is not used."""

    steps: tuple[float, ...]  # seconds of a step without context
    slopes: tuple[float, ...]  # seconds more for each token of context, of all sequences together
    tokens: tuple[float, ...]  # for each sequence in a step
    prompts: tuple[float, ...]  # seconds to read as many tokens, by `PROMPT_GRAIN`
    attention: float  # seconds for each pair of a prompt's row and a position that it sees
    rows_alone: int  # rows of prompts in a step without decoding sequences
    rows_beside: int  # rows of prompts in a step with some
    kv_tokens: int

    @property
    def max_sequences(self) -> int:
        return len(self.steps) - 1

    def reading(self, rows: int) -> float:
        """Return the seconds of a pass over `rows` tokens of prompts, without attention."""
        place = rows / PROMPT_GRAIN
        low = int(place)
        return self.prompts[low] + (place - low) * (self.prompts[low + 1] - self.prompts[low])


PROMPT_GRAIN = 64  # tokens between two entries of `Service.prompts`


def service_of(plan: Plan, *, speculation: bool) -> Service:
    """Make the tables of a replica of the plan, with drafts as the governor would choose them, or plain."""
    machine, question = plan.machine, plan.question
    acceptance = question.acceptance if speculation else None
    chosen = [_chosen(machine, count, question.draft, acceptance) for count in range(1, plan.largest_batch + 1)]
    slopes = [_slope(machine, step) for step in chosen]
    pairs = PROMPT_ROWS * (PROMPT_ROWS + 1) / 2
    prompts = [_prompt_pass(machine, grain * PROMPT_GRAIN) for grain in range(PROMPT_ROWS // PROMPT_GRAIN + 2)]
    limit = EngineConfig.of(device="cuda").max_prompt_seconds
    beside = max([grain for grain, seconds in enumerate(prompts) if seconds <= limit] or [1])
    return Service(
        steps=(0.0, *(machine.step_seconds(step.sequences, 0, step.draft) for step in chosen)),
        slopes=(0.0, *slopes),
        tokens=(0.0, *(step.tokens for step in chosen)),
        prompts=tuple(prompts),
        attention=prompt_attention(machine.target, machine.place, PROMPT_ROWS) / pairs,
        rows_alone=PROMPT_ROWS,
        rows_beside=min(PROMPT_ROWS, max(1, beside) * PROMPT_GRAIN),
        kv_tokens=plan.memory.kv_tokens,
    )


def _chosen(machine: Machine, count: int, draft: int, acceptance: float | None) -> Step:
    if acceptance is None:
        return machine.step(count, FAR)
    return machine.best_step(count, FAR, longest=longest_draft(count, draft), acceptance=acceptance)


def _slope(machine: Machine, step: Step) -> float:
    """Return the seconds of a token of context in a step."""
    near, far = (machine.step_seconds(step.sequences, context, step.draft) for context in (0, FAR))
    return (far - near) / (FAR * step.sequences)


def _prompt_pass(machine: Machine, rows: int) -> float:
    """Return the seconds of a pass over prompts, without attention."""
    if not rows:
        return 0.0
    target, place = machine.target, machine.place
    return prompt_seconds(target, place, rows) - prompt_attention(target, place, rows)
