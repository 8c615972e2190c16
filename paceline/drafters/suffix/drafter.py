"""Suffix drafting: the tokens that most likely follow, by how often they followed the last tokens before.

Three kinds of text are searched, each by suffix automata: the request's own prompt and output, past answers under the
same salt, and the files of the corpus. Drafts are trees. They end by expected acceptance: a token is drafted where its
probability pays for its row (Oliaro et al. 2024, SuffixDecoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, Ended
from paceline.drafters.options import parse_options
from paceline.drafters.paying import SURE_GAIN, gain_of
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.suffix.corpus import index_corpus
from paceline.drafters.suffix.past import PastAnswers
from paceline.drafters.trust import Trust, judged, trust_in_all
from paceline.errors import InvalidRequest, NoCompiler
from paceline.kernels.cpu.build import Library, load_library
from paceline.kernels.cpu.suffix import Drafted, SuffixAutomaton, SuffixDrafting
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel
from paceline.sizes import parse_size

NAME = "suffix"
DEFAULT_MEMORY = 64 << 20  # bytes for past answers and corpus
MIN_MEMORY = 1 << 20  # bytes: a few hundred answers of one salt
BRANCHES = 3  # tokens of a tree that may follow one
MAX_UNOBSERVED = 8  # drafts of a sequence that wait to be compared with its text
MIN_CONFIDENCE = 0.05  # least probability of a path that is drafted where no price is measured


@dataclass(slots=True)
class _Text:
    """A running sequence."""

    own: SuffixAutomaton
    greedy: bool = True  # its request is not sampled
    read: int = 0  # tokens that `own` holds
    trust: Trust = field(default_factory=Trust)
    drafts: dict[int, tuple[Drafted, float]] = field(default_factory=dict)  # by start: a draft and its factor of trust


class SuffixDrafter(Drafter):
    name = NAME
    max_draft = 64
    ends_drafts = True
    weighs_cost = True
    copies = True

    def __init__(
        self,
        library: Library,
        *,
        memory: int = DEFAULT_MEMORY,
        corpus: SuffixAutomaton | None = None,
        branches: int = BRANCHES,
    ) -> None:
        """`memory`: bytes for past answers and corpus. `branches`: most tokens that may follow one; 1: chains."""
        self._library = library
        self._drafting = SuffixDrafting(library, width=branches)
        self._corpus = [] if corpus is None else [corpus]
        self.past = PastAnswers(library, memory=memory - sum(each.bytes for each in self._corpus))
        self._trust = {greedy: trust_in_all() for greedy in (True, False)}  # a sampled text repeats less
        self._texts: dict[int, _Text] = {}

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._texts[key] = _Text(SuffixAutomaton(self._library))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        text = self._texts[ask.key]
        text.greedy = ask.sampler.greedy
        length, trust = len(ask.tokens), text.trust.factor(self._trust[text.greedy])
        # The last known row may be the first of a block that the kernels compute: later rows have the usual price.
        prices = (*ask.row_prices, ask.row_price) if ask.row_prices else (ask.price,)
        made = self._drafting.draft(
            [text.own, *self.past.sources(ask.salt), *self._corpus],
            ask.tokens,
            unread=length - text.read,
            longest=ask.max_draft,
            prices=prices,
            trust=trust,
            # Tokens are found in the order of their confidence: behind one that is below every price none pays.
            min_confidence=max(min(prices), MIN_CONFIDENCE if ask.p_min is None else ask.p_min),
        )
        text.read = length
        if not made.tokens or (ask.copies_only and gain_of(made.confidence, prices) < SURE_GAIN):
            return EMPTY
        text.drafts[length] = made, trust
        if len(text.drafts) > MAX_UNOBSERVED:  # drafts that were dropped are never observed
            del text.drafts[next(iter(text.drafts))]
        return Draft(made.tokens, made.parents, passes=0, confidence=tuple(made.confidence))

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        text = self._texts[key]
        start = len(tokens) - 1 - accepted
        drafted = text.drafts.pop(start, None)
        if drafted is not None:
            made, trust = drafted
            for right, expected in judged(*made, trust, tokens[start:].tolist()):
                text.trust.learn(right, expected)
                self._trust[text.greedy].learn(right, expected)
        text.drafts = {place: made for place, made in text.drafts.items() if place > start}

    def learn(self, ended: Ended) -> None:
        self.past.learn(ended.salt, ended.tokens[ended.prompt_length :])

    def stop(self, key: int) -> None:
        del self._texts[key]


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    memory = _memory(parse_options(NAME, options, {"memory": str}).get("memory"))
    try:
        library = load_library()
    except NoCompiler as error:
        raise NoCompiler(f"drafter {NAME!r} runs in C: {error}; or take ngram") from None
    branches = BRANCHES if target.device == "cpu" else 1  # of a tree, a device gets the likeliest path alone

    def build(context: BuildContext) -> SuffixDrafter:
        corpus = _corpus(context.corpus, target, library, memory=memory)
        return SuffixDrafter(library, memory=memory, corpus=corpus, branches=branches)

    return Recipe(name=NAME, build=build, how="looks up tokens in prompt, output, past answers and corpus")


def _memory(text: str | None) -> int:
    """Read the option `memory`, in bytes."""
    memory = DEFAULT_MEMORY if text is None else parse_size(text)
    if memory is None or memory < MIN_MEMORY:
        raise InvalidRequest(f"{NAME}:memory must be a size of at least 1M, such as 64M, not {text!r}")
    return memory


def _corpus(paths: Sequence[str], target: ReadyModel, library: Library, *, memory: int) -> SuffixAutomaton | None:
    if not paths:
        return None
    if target.tokenizer is None:
        raise InvalidRequest(f"{target.name} has random weights and no tokenizer: leave the corpus out")
    return index_corpus(paths, target.tokenizer, library, memory=memory)
