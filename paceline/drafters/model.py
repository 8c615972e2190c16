"""A small model that drafts: one pass of its own for each level of a draft, over all sequences that want one.

It keeps its own KV memory under the target's page ids, so one page table serves both and a page that comes back from
the prefix cache may still hold this drafter's keys and values. A `Follower` tells how far it has read each sequence.
A part or a copy of the target may share its KV memory instead. It reads what the target has computed, writes behind
that, and verification writes over it.
The first pass of a round reads the missing tokens: the prompt in chunks at the beginning, later the bonus token, and
after a fully accepted draft also the draft's last token. Every further pass reads one drafted token.
A compiled model drafts in one call, and doubtful tokens may have siblings in the draft (`drafters.tree_drafting`). A
PARD model drafts in its first pass (`drafters.masked_drafting`).
Where the host must act between two tokens (penalties, rules that need distributions), and for other Forwards, a draft
is a chain, token by token. Tokens that do not pay are not drafted.

    committed      0 ................ L-1 │
    read           0 .... known-1         │          first pass: tokens known … L-1 give the draft's first token
    draft                                 │ L ... L+k-1
                                            read: tokens with a child in the draft, at their own positions
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.bridge.recipe import SHORT, bridged_recipe, find_bridge
from paceline.drafters.chain_drafting import ChainDrafting, divide_rows
from paceline.drafters.draft_in_progress import DraftInProgress
from paceline.drafters.masked_drafting import MaskedDrafting
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import MODEL, BuildContext, Recipe
from paceline.drafters.shipped import kind_of_head
from paceline.drafters.tree_drafting import Thresholds, TreeDrafting, is_simple
from paceline.errors import InvalidRequest, ModelFileError, UnsupportedModel
from paceline.kernels.base import Batch, Forward, Output
from paceline.kernels.cpu.abi import WIDTH_MAX
from paceline.kv.following import Follower, OnTargetsMemory, Reader
from paceline.kv.pages import PagePool
from paceline.models.weights import Format, Progress
from paceline.runner.batch import Share, build_batch
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.forwards.measuring import best_of
from paceline.runner.heads.trees import OF_MODEL, TreeProgram
from paceline.runner.lanes import Lanes
from paceline.runner.loading.format_speed import format_times
from paceline.runner.loading.models import ReadyModel, read_model, ready_shape
from paceline.runner.loading.splitting import split_beside
from paceline.runner.rounds.protocol import DeviceDrafter, DraftingRound
from paceline.runner.vocabulary import fit_logits, fit_tokens

logger = logging.getLogger(__name__)
OPTIONS = {"format": str, "max_draft": int, "branches": int, "min_confidence": float}
FORMATS: tuple[Format, ...] = ("int4-all", "int8")  # formats of a drafter on a CPU, the fewest bytes first
# Format of a drafter on a GPU: few rows read half the bytes of bf16 (docs/experiments.md, "The format of a draft model
# on a GPU").
GPU_FORMAT: Format = "fp8"


@dataclass(slots=True)
class _State:
    follower: Follower | OnTargetsMemory  # committed positions whose keys and values this drafter has
    draft: Draft = EMPTY  # tokens of it that have children are read already; observed drafts are forgotten


class ModelDrafter(Drafter):
    name = MODEL

    def __init__(
        self,
        forward: Forward,
        *,
        lanes: Lanes,
        pool: PagePool | None,
        vocab_size: int,
        chunk: int,
        name: str = MODEL,
        max_draft: int = 8,
        branches: int = 2,
        min_confidence: float | None = None,
        mask: int | None = None,
        max_context: int | None = None,
    ) -> None:
        """`pool` None: `forward` shares the target's KV memory. `vocab_size`: the target's. `chunk`: most rows in the
        first pass of a round. `branches`: tokens of a compiled model that may follow one. A draft ends early once the
        probability that all of it is right falls below `min_confidence`; None: once one more token does not pay. A
        request's `p_min` replaces either. `mask`: the token of drafted positions of a PARD model.
        `max_context`: tokens that it knows, drafts included, if they are fewer than the target's."""
        if max_draft < 1 or not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        if not 1 <= branches <= WIDTH_MAX:
            raise InvalidRequest(f"branches {branches} must be 1, for chains, to {WIDTH_MAX}")
        self.name = name
        self.max_draft = max_draft
        self.max_context = max_context
        self.shares_kv = pool is None
        self.ends_drafts = min_confidence is None  # with a fixed one, drafts do not follow prices
        self.forward = forward
        self._thresholds = Thresholds(min_confidence, next_acceptance=OF_MODEL.child_acceptance)
        self._lanes = lanes
        self._vocab_size = vocab_size
        self._chunk = chunk
        self._states: dict[int, _State] = {}
        self._reader = OnTargetsMemory() if pool is None else Reader(pool)
        self._mask = mask
        self._trees = None
        if isinstance(forward, CompiledForward) and mask is None:
            ids = torch.arange(forward.vocab_size, dtype=torch.int32).clamp(max=vocab_size - 1)
            by = TreeProgram(forward.program, ids, OF_MODEL)
            self._trees = TreeDrafting(by, self._batch, thresholds=self._thresholds, branches=branches)

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        pages = partial(self._lanes.pages_of, lane)
        self._states[key] = _State(self._reader.start(pages, len(tokens) - 1))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = self._catch_up(asks if self.max_context is None else self._within(asks, self.max_context))
        if not ready:
            return [EMPTY] * len(asks)
        able, shares = [ask for ask, _ in ready], [share for _, share in ready]
        drafts = dict(zip([ask.key for ask in able], self._by(able).draft(able, shares), strict=True))
        for key, made in drafts.items():
            self._states[key].draft = made if self._mask is None else EMPTY
        return [drafts.get(ask.key, EMPTY) for ask in asks]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        state = self._states[key]
        start = len(tokens) - 1 - accepted
        state.follower.reach(start + count_read(state.draft, tokens[start:-1].tolist()))
        state.draft = EMPTY

    def stop(self, key: int) -> None:
        del self._states[key]

    def close(self) -> None:
        self._trees = None  # it refers to this object, and so would keep the model until garbage is collected

    def _catch_up(self, asks: Sequence[Ask]) -> list[tuple[Ask, Share]]:
        """Read a chunk for sequences that miss more tokens than it holds. Return the others that miss some, with the
        rows that the first pass of their draft reads; they count as read from now on."""
        followers = [self._states[ask.key].follower for ask in asks]
        missing = [follower.missing(len(ask.tokens)) for follower, ask in zip(followers, asks, strict=True)]
        ready, behind = divide_rows(asks, missing, room=self._chunk)
        for ask, share in (*ready, *behind):
            self._states[ask.key].follower.reach(share.start + share.count)
        if behind:
            self.compute([share for _, share in behind])
        return ready

    @staticmethod
    def _within(asks: Sequence[Ask], context: int) -> list[Ask]:
        """Return the asks whose text leaves room for a draft in the context, for drafts that fit into it. Text behind
        it is never read."""
        return [ask.within(context - len(ask.tokens)) for ask in asks if len(ask.tokens) < context]

    def _by(self, asks: Sequence[Ask]) -> TreeDrafting | ChainDrafting | MaskedDrafting:
        """Choose the way to draft for these asks."""
        if self._trees is not None and all(map(is_simple, asks)):
            return self._trees
        chains = ChainDrafting(self, self.forward.pick, self._thresholds)
        return chains if self._mask is None else MaskedDrafting(chains, lanes=self._lanes, mask=self._mask)

    def compute(self, shares: Sequence[Share]) -> Output:
        """Run the draft model over shares of the lanes."""
        return self.forward(self._batch(shares))

    def _batch(self, shares: Sequence[Share], beyond: int = 0) -> Batch:
        """Build the batch of a pass; page tables reach `beyond` positions past its last row."""
        batch = build_batch(self._lanes, shares, beyond=beyond)
        return fit_tokens(batch, vocab_size=self._vocab_size, model_vocab_size=self.forward.vocab_size)

    # ── its text, for `ChainDrafting`: that of the target ──

    def append(self, draft: DraftInProgress, token: int, logits: Tensor) -> None:
        self._lanes.tokens_np[draft.ask.lane, draft.position] = token
        draft.tokens.append(token)

    def last_row(self, draft: DraftInProgress) -> Share:
        return Share(lane=draft.ask.lane, start=draft.position - 1, count=1)

    def in_target_vocabulary(self, output: Output) -> tuple[Tensor, Tensor]:
        logits = fit_logits(output.logits, vocab_size=self._vocab_size)
        was_cut = self.forward.vocab_size > self._vocab_size
        return logits, logits.argmax(-1) if was_cut else output.argmax


def count_read(draft: Draft, accepted: Sequence[int]) -> int:
    """Count the leading accepted tokens that the model has read while it drafted: those with a child in the draft."""
    parents = draft.parents or range(-1, len(draft.tokens) - 1)
    node = -1
    for count, token in enumerate(accepted):
        node = next((i for i, parent in enumerate(parents) if parent == node and draft.tokens[i] == token), -1)
        if node < 0 or node not in parents:
            return count
    return len(accepted)


class ModelOnDevice:
    """Implements DeviceDrafter: a model that drafts inside rounds on the device, one pass a token.

    A model with its own KV memory reads the last two committed tokens first: after a fully accepted draft it has not
    read the last drafted one. A model that shares the target's KV memory writes its keys and values there, and
    verification overwrites all of them. A PARD model drafts in one pass, over masks."""

    finds_fewer = False

    def __init__(self, forward: Forward, *, shares_kv: bool = False, mask: int | None = None) -> None:
        """`mask`: the token of drafted positions of a PARD model."""
        self.forward = forward
        self.reader = None if shares_kv else forward
        # Its later passes read the tokens drafted so far, and it keeps their keys and values.
        self.reads_draft = not shares_kv and mask is None
        self._mask = mask

    def draft(self, round: DraftingRound) -> None:
        if self._mask is not None:
            logits_after = round.masked(self.forward, self._mask)
            for turn in range(round.longest):
                round.append(logits_after(turn), turn)
            return
        for turn in range(round.longest):
            rows = 2 if turn == 0 and self.reader is not None else 1
            round.append(round.logits(self.forward, turn, rows=rows), turn)


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    name, _, rest = options.partition(",")
    given = parse_options(ModelDrafter.name, rest, OPTIONS)
    format = given.pop("format", None)
    ready = _read_in(format, name, target, progress)
    if (longest := given.get("max_draft", 1)) > (own := ready.model.config.max_context):
        raise InvalidRequest(f"max_draft {longest}: a draft must fit {name}'s max_position_embeddings of {own}")
    ready = split_beside(ready, target)
    if (bridge := find_bridge(ready, target)) is not None:
        return bridged_recipe(bridge, replace(ready, shortlist=False), target, given)
    if (mask := ready.model.config.mask_token) is not None:
        if given.get("branches", 1) != 1:
            raise InvalidRequest(f"branches {given['branches']}: a PARD model drafts chains; leave it out")
        ready = replace(ready, why=f"{ready.why}; one pass a draft (PARD)", shortlist=False)
        given["mask"] = mask
    _check_branches(given.get("branches", 1), ready)
    if given.get("min_confidence") and target.decoder is not None:
        logger.warning(
            "min_confidence of %s ends no draft on a GPU, where all sequences of a round draft together", name
        )
    return recipe_of(ready, target, given)


def _check_branches(branches: int, ready: ReadyModel) -> None:
    """Refuse siblings in drafts where a model drafts chains."""
    if branches <= 1 or ready.has_whole_program:
        return
    where = "is split over ranks" if ready.split else "runs on a GPU" if ready.decoder else "runs in torch"
    raise InvalidRequest(
        f"branches {branches}: {ready.name} {where}, and drafts of a model have branches only where one process runs "
        "it compiled; leave it out, or give 1 for chains"
    )


def recipe_of(ready: ReadyModel, target: ReadyModel, given: Mapping[str, Any], *, kind: str = MODEL) -> Recipe:
    """Make the recipe of a model with KV memory of its own."""
    own, longest = ready.model.config.max_context, target.model.config.max_context
    short = f"; drafts within its {own} tokens of context, the target has {longest}" if own < longest else ""

    def build(context: BuildContext) -> Drafter:
        forward = ready.forward(
            num_pages=context.pool.num_pages,
            threads=context.threads,
            max_context=context.max_context,
            ranks=context.ranks,
        )
        if own < context.max_context:
            logger.warning(SHORT, ready.name, own, context.max_context)
        return make_drafter(
            forward, context, name=kind, max_context=own if own < context.max_context else None, **given
        )

    def on_device(built: Drafter | None, to: Forward) -> DeviceDrafter:
        assert isinstance(built, ModelDrafter)
        return ModelOnDevice(built.forward, mask=given.get("mask"))

    return Recipe(
        name=kind,
        build=build,
        how=f"{ready.why}{short}",
        page_bytes=ready.page_bytes,
        pass_bytes=ready.pass_bytes,
        one_pass="mask" in given,
        vocabulary=min(ready.model.config.vocab_size, target.model.config.vocab_size),
        model=ready,
        on_device=on_device,
        profile=ready.profile,
    )


def make_drafter(forward: Forward, context: BuildContext, *, shares_kv: bool = False, **options: Any) -> ModelDrafter:
    """Make a drafter of a Forward for an engine. `shares_kv`: it computes on the target's KV memory. `options`: further
    arguments of ModelDrafter."""
    return ModelDrafter(
        forward,
        lanes=context.lanes,
        pool=None if shares_kv else context.pool,
        vocab_size=context.vocab_size,
        chunk=context.max_step_tokens,
        **options,
    )


def _read_in(format: Format | None, name: str, target: ReadyModel, progress: Progress | None) -> ReadyModel:
    """Read the model in a format, None: in the fastest. A head is an error that says its kind."""
    try:
        return _read(name, target, format, progress) if format else _read_fastest(name, target, progress)
    except (ModelFileError, UnsupportedModel) as error:
        kind = kind_of_head(name)
        if kind is None:
            raise
        raise InvalidRequest(f"{name} holds a head, not a model: give it as {kind}:{name}") from error


def _read(name: str, target: ReadyModel, format: Format, progress: Progress | None) -> ReadyModel:
    """Read the model; `shape:NAME` has random weights."""
    if name.startswith("shape:"):
        return ready_shape(
            name[6:], format=format, device=target.device, kv_format=target.kv_format, seed=1, beside=target
        )
    return read_model(
        name,
        format=format,
        device=target.device,
        kv_format=target.kv_format,
        progress=progress,
        beside=target,
        shortlist=True,
    )


def _read_fastest(name: str, target: ReadyModel, progress: Progress | None) -> ReadyModel:
    """Read the model in the fastest format where there are kernels for several: a draft need not be exact."""
    if target.decoder is not None:
        return _read(name, target, GPU_FORMAT, progress)
    if not target.compiled:
        return _read(name, target, "auto", progress)
    ready = _read(name, target, FORMATS[0], progress)
    if target.splits_drafters and target.split is not None and target.split.same_bits:
        return ready  # the other has one scale for all inputs, which shards within a rank would cut
    times = format_times(ready, FORMATS) if ready.compiled and ready.stored else None
    best = FORMATS[0] if times is None else cast(Format, best_of(times))
    return ready if best == FORMATS[0] else _read(name, target, best, progress)
