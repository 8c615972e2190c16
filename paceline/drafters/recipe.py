"""Recipes: the costs of a drafter, and how to build it into an engine.

A drafter is made in two steps, because KV memory is divided only once all models are known. First its kind reads
options and weights and returns a `Recipe`, which says what a page of KV memory costs it. Then the engine divides the
memory and calls `build` with its `BuildContext`. A drafter without KV memory may be made in the first step already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.drafters.base import Drafter
from paceline.drafters.guard import Guard
from paceline.kernels.base import Forward
from paceline.kv.pages import PagePool
from paceline.models.weights import Progress
from paceline.runner.lanes import Lanes
from paceline.runner.loading.models import ReadyModel
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.ranks import Ranks
from paceline.runner.rounds.protocol import DeviceDrafter


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The engine that a drafter is built into."""

    lanes: Lanes  # tokens and page table of the running sequences
    pool: PagePool
    vocab_size: int  # size of the target's vocabulary
    max_context: int  # tokens
    max_step_tokens: int  # rows of a pass, at most
    threads: int | None
    target: Forward
    corpus: Sequence[str] = ()  # text files that a drafter may learn from
    drafters: Mapping[str, Guard] = field(default_factory=dict)  # those built before, the cheapest first
    hot: bool = False  # True: the target may be running while the drafter is built
    share_prefixes: bool = True  # a drafter with pages of its own may share those of equal beginnings, by salt

    @property
    def ranks(self) -> Ranks | None:
        """The processes that the target is split over; None: it is whole."""
        return self.target.ranks if isinstance(self.target, SplitForward) else None


OnDevice = Callable[[Drafter | None, Forward], DeviceDrafter]
"""(the drafter that `build` returned, the target) → the drafter that runs inside rounds on the device."""

OfMembers = Callable[[Mapping[str, DeviceDrafter]], DeviceDrafter]
"""(the drafters that run inside rounds on the device, by name) → a drafter that is made of them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A drafter that can be built: its name, its costs and its parts."""

    name: str  # used by requests and statistics
    build: Callable[[BuildContext], Drafter | None]  # returns None where only a device can run it
    how: str = "runs on the host"  # how it drafts, in words
    words: str = ""  # by which a user asked for it
    page_bytes: int = 0  # bytes of its own KV memory for one page
    pass_bytes: int = 0  # bytes of weights that one draft pass reads
    weight_bytes: int | None = None  # bytes of weights of its own in memory; None: see `own_bytes`
    one_pass: bool = False  # a draft takes one pass, however long it is
    lane_bytes: int = 0  # bytes of a GPU that it needs for each sequence, beside pages
    taps: Sequence[int] = ()  # places of the target whose hidden states it reads
    vocabulary: int | None = None  # tokens of the target that it can draft; None: all
    model: ReadyModel | None = None
    on_device: OnDevice | None = None  # None: only the host can run it
    of_members: OfMembers | None = None  # None: it is not made of the other drafters
    profile: Callable[[int, int], None] | None = None  # (rows, rows with logits) → run the largest pass on the device

    @property
    def own_bytes(self) -> int:
        """Bytes of weights that the drafter has and the target does not: those of its model, else those that a pass
        reads."""
        if self.weight_bytes is not None:
            return self.weight_bytes
        return self.pass_bytes if self.model is None else sum(part.bytes for part in self.model.parts)

    def rank_bytes(self, num_pages: int, ranks: int) -> list[int]:
        """Count the bytes that it will take on each rank of its target: on rank 0 alone, unless it is split as well."""
        if self.model is not None and self.model.split is not None:
            return self.model.rank_bytes(num_pages)
        return [self.host_bytes(num_pages), *[0] * (ranks - 1)]

    def host_bytes(self, num_pages: int) -> int:
        """Count the bytes of a CPU's memory that the drafter will take in this process, once it is built."""
        return num_pages * self.page_bytes + (0 if self.model is None else self.model.unread_bytes)


MakeRecipe = Callable[[str, ReadyModel, Progress | None], Recipe]
"""(options, the target, callback for loading progress) → a recipe. Options are the text after the name's colon."""


MODEL = "model"  # name of a draft model, whatever its own is


def name_by(words: str, recipes: Mapping[str, Recipe]) -> str:
    """Return the name under which a drafter was loaded by a user's words. `recipes`: by name."""
    for name, made in recipes.items():
        if made.words == words:
            return name
    kind = words.partition(":")[0]  # words that were completed, such as those of a head that comes with the target
    return kind if kind in recipes else MODEL


OnGpu = Literal["device", "host", "refused"]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A kind of drafter that a name stands for, and where it can run.

    `on_gpu` says what happens where the target runs on a GPU: "device", the recipe has `on_device`, which returns a
    `DeviceDrafter`; "host", it drafts on the host, beside the step in flight (`engine.offers`); "refused", it is
    an error, before any weights are read. `reads_corpus`: it learns from the files of `BuildContext.corpus`.
    `computes`: drafts cost passes of a network, so that a lookup beside it pays. `splits`: the passes can be split over
    the ranks of the target."""

    make: MakeRecipe
    on_gpu: OnGpu = "refused"
    reads_corpus: bool = False
    computes: bool = False
    splits: bool = False
