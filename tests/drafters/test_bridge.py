"""A draft model with another vocabulary: it accepts as with equal ids, and its keys and values fit its own text."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.bridge.context import DrafterContext
from paceline.drafters.bridge.drafter import BridgedDrafter, common_length
from paceline.drafters.bridge.logits import TargetLogits
from paceline.drafters.bridge.recipe import bridged_recipe, described, find_bridge
from paceline.drafters.recipe import BuildContext
from paceline.errors import InvalidRequest, VocabularyMismatch
from paceline.kernels.base import Batch, Output
from paceline.sampling.sampler import Sampler
from paceline.text.bridge import VocabularyBridge
from paceline.text.tokenizer import Tokenizer
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.other_vocabularies import (
    Other,
    Renamed,
    bridge_to,
    of_five,
    one_in_common,
    permuted,
    removed,
    sentencepiece_like,
)
from tests.rig import Rig, build
from tests.rig_drafters import bridged_drafter, model_drafter, renamed
from tests.runs import Run, run, tokens_of
from tests.text.vocabularies import byte_level_tokenizer, metadata, sentencepiece_tokenizer
from tests.tiny_models import TARGET, VOCAB, Model, tiny_tokenizer
from tests.toy import ToyForward

KEPT = tuple(token for token in range(VOCAB) if token not in removed())


def asked(count: int = 6, *, seed: int = 0, **params: Any) -> list[Request]:
    drawn = np.random.default_rng(seed)
    return [
        Request(
            id=str(i),
            prompt=tuple(drawn.choice(KEPT, 12 + 5 * i).tolist()),
            sampling=SamplingParams(**{"seed": i, "max_tokens": 30, **params}),
        )
        for i in range(count)
    ]


# ── as with equal ids ──


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_ids_accept_what_equal_ids_do(temperature: float) -> None:
    requests = asked(temperature=temperature)
    rigs = [build("toy", {"model": made}) for made in (model_drafter(Model(noise=0.1)), renamed(permuted(), noise=0.1))]
    usual, told = [run(rig, requests) for rig in rigs]
    for key, each in told.items():
        assert each.tokens == usual[key].tokens
        assert each.stats.accepted_by_position == usual[key].stats.accepted_by_position
        assert each.stats.drafted == usual[key].stats.drafted
    assert rigs[0].engine.stats.accepted > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("are_said", [False, True])
def test_without_a_tenth_of_the_tokens(temperature: float, are_said: bool) -> None:
    """Where the lacking tokens are not said, little is lost: pairs of letters that are one token of the target. Where
    they are, drafts fail at them, and the toy is lost behind them, since it hashes its whole context."""
    requests = asked(12, temperature=temperature, **({} if are_said else {"allowed_tokens": KEPT}))
    rigs = [build("toy", {"model": made}) for made in (model_drafter(TARGET), renamed(permuted(removed())))]
    usual, told = [run(rig, requests) for rig in rigs]
    assert tokens_of(told) == tokens_of(usual)
    said = [token for each in told.values() for token in each.tokens]
    assert (sum(token in removed() for token in said) > len(said) / 20) == are_said
    most, accepted = (rig.engine.stats.accepted for rig in rigs)
    assert accepted > (0.4 if are_said else 0.9) * most


def test_rules_that_want_distributions() -> None:
    """Also where a request allows no token that the drafter has: it drafts nothing, and makes no mistake."""
    strange = tuple(token for token in range(VOCAB) if token not in (0, 1))  # all but <eos> and "a"
    for rule in (Rule.REJECTION, Rule.BLOCK, Rule.CONFIDENCE):
        rig = build("toy", {"model": renamed(one_in_common())}, min_acceptance=0.0)
        requests = [
            Request(id=each.id, prompt=each.prompt, sampling=each.sampling, speculation=Speculation(rule=rule))
            for each in asked(3, temperature=1.0, allowed_tokens=strange)
        ]
        run(rig, requests)
        assert rig.engine.drafters["model"].fault is None


# ── its own text ──


class Watching:
    """Makes a bridged drafter, and checks that its KV memory has what it takes for read."""

    def __init__(self, vocabulary: tuple[Tokenizer, tuple[int, ...]], **options: Any) -> None:
        self.tokenizer, self.order = vocabulary
        self.options = options
        self.rows = 0
        self.drafter: BridgedDrafter

    def make(self, context: BuildContext, backend: str) -> Drafter:
        make = bridged_drafter(Other(order=self.order, noise=0.1), bridge_to(self.tokenizer), **self.options)
        made = make(context, "toy")
        assert isinstance(made, BridgedDrafter)
        self.drafter, forward = made, made.forward
        assert isinstance(forward, Renamed)
        counted = forward.__call__

        class Counted:
            def __call__(watched, batch: Batch) -> Output:  # noqa: N805 - `self` is the maker
                self.rows += len(batch.tokens)
                return counted(batch)

            def __getattr__(watched, name: str) -> Any:  # noqa: N805
                return getattr(forward, name)

        made.forward = Counted()  # type: ignore[assignment]
        self.forward = forward
        return made

    def check(self) -> None:
        self.drafter._cache.check()
        usual = np.maximum(np.array(self.order), 0)
        for text in self.drafter._texts.values():
            if text.span is not None:
                slots = self.drafter._cache.slots(text.span, 0, len(text.read))
                assert self.forward._kv.tokens[slots].tolist() == usual[text.read].tolist()
                assert self.forward._kv.positions[slots].tolist() == list(range(len(text.read)))
                assert text.span.committed <= min(len(text.read), text.context.settled)


def follow(rig: Rig, watching: Watching, requests: list[Request]) -> None:
    going = Run(rig)
    going.submit(requests)
    while rig.engine.has_work:
        going.step()
        watching.check()
    going.finish()
    assert rig.engine.drafters["model"].fault is None
    assert watching.drafter._texts == {}
    assert watching.drafter._cache.pool.held == 0


VOCABULARIES = {"permuted": permuted(removed()), "spm": sentencepiece_like(), "one": one_in_common()}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "usual": ("permuted", {}),
    "spm": ("spm", {}),
    "one in common": ("one", {"min_acceptance": 0.0}),
    "few rows": ("permuted", {"max_step_tokens": 9}),
    "few pages of the target": ("permuted", {"num_pages": 13}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_has_read_what_it_believes(case: str) -> None:
    name, options = CASES[case]
    watching = Watching(VOCABULARIES[name])
    rig = build("toy", {"model": watching.make}, **options)
    follow(rig, watching, asked())
    follow(rig, watching, asked(2, temperature=0.0))
    assert rig.engine.stats.drafted > 20
    assert (rig.engine.stats.preemptions > 0) == (case == "few pages of the target")


def test_too_few_pages_of_its_own() -> None:
    """Sequences without pages go on without drafts."""
    watching = Watching(permuted())
    rig = build("toy", {"model": watching.make})
    watching.drafter._cache.pool.take(2 * 160 - 6)
    going = Run(rig)
    going.submit(asked())
    going.finish()
    assert rig.engine.drafters["model"].fault is None
    assert watching.drafter._cache.pool.held == 2 * 160 - 6


def test_a_text_that_its_context_cannot_hold() -> None:
    watching = Watching(permuted())
    rig = build("toy", {"model": watching.make})
    watching.drafter._max_context = 40
    [request] = asked(1, temperature=0.0, max_tokens=60)
    told = run(rig, [request])
    accepted = told["0", 0].stats
    assert 0 < accepted.drafted < 40


def test_a_cut_word_is_read_again() -> None:
    """A context that changes at its end is read from the first difference on."""
    tokenizer, order = permuted()
    watching = Watching((tokenizer, order))
    rig = build("toy", {"model": watching.make}, max_draft=1)
    run(rig, asked(1, temperature=0.0, max_tokens=21))
    [request] = asked(1)
    prompt, rounds = len(request.prompt), rig.engine.stats.steps
    assert prompt <= watching.rows <= prompt + 3 * rounds


def test_a_beginning_that_was_read_before() -> None:
    rows = {}
    for salts in (("a", "a"), ("a", "b")):
        watching = Watching(permuted())
        rig = build("toy", {"model": watching.make}, max_draft=1, max_step_tokens=256)
        text = tiny_tokenizer().encode(3 * "hello you all in one long text of many words", add_bos=False)
        for number, salt in enumerate(salts):
            sampling = SamplingParams(temperature=0.0, max_tokens=3)
            run(rig, [Request(id=str(number), prompt=tuple(text), sampling=sampling, cache_salt=salt)])
        rows[salts] = watching.rows
    assert rows["a", "b"] - rows["a", "a"] >= 32, "two pages at least"


def utf8_texts() -> list[str]:
    drawn = random.Random(3)
    letters = "helo wrd\n é漢😀  "
    return ["".join(drawn.choices(letters, k=40)) for _ in range(8)]


@pytest.mark.parametrize("text", utf8_texts())
def test_a_context_that_grows_equals_one_that_is_made_at_once(text: str) -> None:
    drawn = random.Random(len(text))
    for target, drafter in (
        (byte_level_tokenizer(), sentencepiece_tokenizer()),
        (sentencepiece_tokenizer(), byte_level_tokenizer()),
    ):
        bridge = VocabularyBridge(target, drafter)
        ids = np.array(target.encode(text), dtype=np.int32)
        whole = DrafterContext(bridge)
        whole.follow(ids)
        grown, length, before = DrafterContext(bridge), 0, []
        while length < len(ids):
            length = min(len(ids), length + drawn.randrange(1, 4))
            grown.follow(ids[:length])
            assert grown.tokens[: len(before)] == before, "settled tokens changed"
            before = grown.tokens[: grown.settled]
        assert grown.tokens == whole.tokens
        assert grown.tokens[: len(drafter.prefix)] == list(drafter.prefix)
        assert drafter.decode(grown.tokens, continuation=True).strip(" ") == text.strip(" ")


def test_only_one_beginning_of_text() -> None:
    spm, other = sentencepiece_tokenizer(), byte_level_tokenizer()
    context = DrafterContext(VocabularyBridge(other, spm))
    context.follow(np.array(other.encode("hello"), dtype=np.int32))
    assert context.tokens.count(spm.bos_id) == 1
    back = DrafterContext(VocabularyBridge(spm, other))
    back.follow(np.array(spm.encode("hello"), dtype=np.int32))
    assert other.bos_id not in back.tokens, "its file asks for none"


@pytest.mark.parametrize(
    ("one", "other", "known", "length"), [("abc", "abd", 0, 2), ("abc", "abcd", 1, 3), ("", "a", 0, 0)]
)
def test_common_length(one: str, other: str, known: int, length: int) -> None:
    assert common_length([*map(ord, one)], [*map(ord, other)], known) == length


# ── its logits ──


def test_logits_of_the_likeliest_token_that_begins_alike() -> None:
    target, drafter, _ = of_five()
    logits = TargetLogits.of(VocabularyBridge(target, drafter).to_target, model_vocab_size=6, vocab_size=7)
    given = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 99.0]])  # <eos> c a b bc, and one without a meaning
    [found] = logits(given).tolist()
    lacks = -torch.inf
    assert found == [0.0, 2.0, 4.0, lacks, 1.0, lacks, lacks]  # <eos> a b ab c, and padding
    assert logits.meanings[4] == (2, 4)
    assert logits.source(2, given[0]) == 4
    assert logits.source(2, torch.tensor([0.0, 0.0, 0.0, 5.0, 4.0, 0.0])) == 3
    assert logits.source(3, given[0]) is None


# ── drafts that do not line up ──


class Sure(ToyForward):
    """Says one token after each: `after` has the next one by the last."""

    def __init__(self, after: dict[int, int]) -> None:
        super().__init__(num_pages=9, vocab_size=5)
        self.after = after
        self.passes = 0

    def logits_after(self, context: np.ndarray) -> np.ndarray:
        self.passes += 1
        return np.eye(5, dtype=np.float32)[self.after[int(context[-1])]] * 40


def proposed(after: dict[int, int], prompt: Sequence[int], rule: Rule = Rule.COUPLED) -> tuple[Draft, Sure]:
    """A draft of at most three tokens by a drafter with the tokens <eos> c a b bc; the target's are <eos> a b ab c."""
    target, tokenizer, _ = of_five()
    forward = Sure(after)
    sizes = {"sequences": 1, "max_context": 40, "vocab_size": 5, "chunk": 40, "min_confidence": 0.0}
    drafter = BridgedDrafter(forward, VocabularyBridge(target, tokenizer), **sizes)
    tokens = np.array(prompt, dtype=np.int32)
    drafter.start(1, 0, tokens)
    sampler = Sampler(SamplingParams(temperature=1.0), seed=0, vocab_size=5, eos_ids=())
    [draft] = drafter.propose([Ask(key=1, lane=0, tokens=tokens, max_draft=3, sampler=sampler, rule=rule)])
    assert draft.problem(vocab_size=5, max_length=3) is None
    return draft, forward


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.CONFIDENCE])
def test_a_token_that_is_two_of_the_target(rule: Rule) -> None:
    draft, _ = proposed({2: 4, 4: 4}, [1], rule)
    assert draft.tokens == (2, 4, 2), "b c b, and no room for another c"
    assert (draft.probs is not None) == (rule is Rule.REJECTION)
    if draft.probs is not None:
        assert draft.probs[1].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0], "c follows from the token that was drawn"
    assert len(draft.confidence) == (3 if rule is Rule.CONFIDENCE else 0)


def test_two_tokens_that_are_one_of_the_target() -> None:
    draft, forward = proposed({1: 2, 2: 3, 3: 2}, [4])
    assert draft.tokens == (3, 1), "ab a"
    assert forward.passes == 3, "as many tokens of its own as there are pages for"
    draft, _ = proposed({1: 2, 2: 3, 3: 2}, [4], Rule.REJECTION)
    assert draft.tokens == (1, 2, 1), "each as it was drawn"


# ── recipes ──


def a_model(tokenizer: Tokenizer | None, *, context: int = 100, **fields: Any) -> Any:
    config = SimpleNamespace(max_context=context, vocab_size=VOCAB)
    usual = {"name": "small", "why": "compiled", "page_bytes": 8, "pass_bytes": 9, "decoder": None}
    return SimpleNamespace(**usual | {"tokenizer": tokenizer, "model": SimpleNamespace(config=config)} | fields)


def test_what_is_said_of_a_bridge() -> None:
    target = a_model(byte_level_tokenizer(), name="big")
    ready = a_model(sentencepiece_tokenizer())
    bridge = find_bridge(ready, target)
    assert bridge is not None
    made = bridged_recipe(bridge, ready, target, {})
    assert made.vocabulary == bridge.common
    assert made.page_bytes == 10
    assert f"{bridge.common} tokens in common: {bridge.share:.0%} of the target's" in made.how
    assert "inspect --pair measures" in described(bridge)
    assert "Expect fewer accepted tokens" in made.how
    assert "33% of SmolLM2's drafted tokens were accepted, and 56%" in made.how
    assert "tokens of context" not in made.how
    short = a_model(sentencepiece_tokenizer(), context=50)
    assert bridged_recipe(bridge, short, target, {}).how.endswith("within its 50 tokens of context, the target has 100")
    with pytest.raises(InvalidRequest, match="small has another vocabulary than big: its drafts have no branches"):
        bridged_recipe(bridge, ready, target, {"branches": 2})


def test_when_there_is_no_bridge() -> None:
    tokenizer = tiny_tokenizer()
    assert find_bridge(a_model(tokenizer), a_model(tokenizer)) is None
    assert find_bridge(a_model(None), a_model(tokenizer)) is None
    strange = Tokenizer.from_gguf(metadata(model="gpt2", pre="gpt-2", tokens=["X", "Y", "XY"], merges=["X Y"]))
    with pytest.raises(VocabularyMismatch, match="small cannot draft for big: they have no token in common; take"):
        find_bridge(a_model(strange), a_model(tokenizer, name="big"))
    with pytest.raises(
        InvalidRequest, match="small has another vocabulary than big, and drafts over a bridge run on a"
    ):
        find_bridge(a_model(permuted()[0]), a_model(tokenizer, name="big", decoder=object()))


@pytest.mark.parametrize("context", [100, 4000])
def test_a_shorter_context_is_said(context: int, caplog: pytest.LogCaptureFixture) -> None:
    rig = build("toy")
    built = BuildContext(
        lanes=rig.lanes, pool=rig.cache.pool, vocab_size=VOCAB, max_context=160, max_step_tokens=32, threads=1,
        target=rig.forward, share_prefixes=False,
    )  # fmt: skip  # one of many
    tokenizer, order = permuted()
    sizes = {}

    def forward(**given: Any) -> Any:
        sizes.update(given)
        return Other(order=order).forward("toy", num_pages=given["num_pages"])

    ready = a_model(tokenizer, context=context, forward=forward)
    target = a_model(tiny_tokenizer(), name="big")
    with caplog.at_level(logging.WARNING):
        made = bridged_recipe(bridge_to(tokenizer), ready, target, {"max_draft": 3}).build(built)
    assert isinstance(made, BridgedDrafter)
    assert made.max_draft == 3
    assert sizes["max_context"] == min(context, 320)
    assert sizes["num_pages"] == 200
    said = "small knows 100 tokens of context, and sequences may have 160: beyond it they go on without its drafts"
    assert (said in caplog.text) == (context == 100)


def test_bad_options() -> None:
    with pytest.raises(InvalidRequest, match="max_draft 0 must be at least 1"):
        BridgedDrafter(
            Other(order=permuted()[1]).forward("toy", num_pages=1), bridge_to(permuted()[0]), sequences=1,
            max_context=9, vocab_size=VOCAB, chunk=9, max_draft=0,
        )  # fmt: skip  # one of many
