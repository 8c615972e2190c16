"""A grammar is a parameter like any other (laws 1, 2, 6, 7): it is kept, and speculation does not change the text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from paceline.drafters.ngram import NgramDrafter
from paceline.errors import InvalidRequest
from paceline.types import Finish, Grammar, Origin, Request, Rule, SamplingParams, Speculation
from tests.odd_drafters import Scripted
from tests.rig import Rig, build
from tests.rig_drafters import DeviceRig, Made, always, model_drafter
from tests.runs import Key, Told, plain, prompt, run, tokens_of
from tests.text.vocabularies import PERSON, byte_level_tokenizer
from tests.tiny_models import Model

TOKENIZER = byte_level_tokenizer()
SIZE = TOKENIZER.vocab_size + 3  # as where a model pads its embedding
TARGET = Model(vocab_size=SIZE)
EOS = 2
[TOOL_CALL] = TOKENIZER.encode("<tool_call>", add_bos=False)
COMPACT = Grammar.json_schema(PERSON | {"x-guidance": {"whitespace_flexible": False}})
WORDS = Grammar.regex("hello( world){1,3}(!|[?]+)")
ENDLESS = Grammar.regex("hello [?]+")
CHOICE = Grammar.choice(["hello world", "hello there", "goodbye"])
CALL = Grammar.json_schema({"enum": [{"name": "hello"}, {"name": "world"}]})
CALLS = Grammar.calls(CALL, marks=("<tool_call>", "</tool_call>"), parallel=False, otherwise=CHOICE)
TEXT = Grammar.calls(CALL, marks=("<tool_call>", "</tool_call>"))
PARAMS = (
    SamplingParams(temperature=0, grammar=COMPACT),
    SamplingParams(temperature=1, seed=3, grammar=COMPACT, n=2),
    SamplingParams(temperature=0.8, seed=4, grammar=WORDS, top_k=20, repetition_penalty=1.2),
    SamplingParams(temperature=1.5, seed=5, grammar=CHOICE, frequency_penalty=0.5),
    SamplingParams(temperature=1, seed=6, grammar=ENDLESS, min_tokens=60),
    SamplingParams(temperature=0, grammar=WORDS, logprobs=2, stop=(" world wor",)),
    SamplingParams(temperature=1, seed=7),  # a neighbour without one
    SamplingParams(temperature=1, seed=8, grammar=CALLS, n=4),
    SamplingParams(temperature=1, seed=9, grammar=TEXT, logit_bias={TOOL_CALL: 9.0}),
)
DRAFTERS: Mapping[str, Made] = {
    "ngram": lambda setting, backend: NgramDrafter(min_ngram=1),
    "good": model_drafter(TARGET),
    "noisy": model_drafter(replace(TARGET, noise=0.05)),
    "narrow": model_drafter(Model(seed=5, vocab_size=200)),
}


def asked(rule: Rule = Rule.COUPLED, **changes: Any) -> list[Request]:
    return [
        Request(
            id=str(i),
            prompt=tuple(token % SIZE for token in prompt(5 + 7 * i, seed=i, repeat=i % 2 == 0)),
            sampling=replace(params, max_tokens=90, **changes),
            speculation=Speculation(rule=rule, max_draft=None if i % 3 else 3),
        )
        for i, params in enumerate(PARAMS)
    ]


def engine(
    drafters: Mapping[str, Made] | None = None,
    *,
    backend: str = "toy",
    on_device: Mapping[str, DeviceRig] | None = None,
    **options: Any,
) -> Rig:
    taps = sorted({tap for made in (on_device or {}).values() for tap in getattr(made, "taps", ())})
    forward = TARGET.forward(backend, num_pages=160, taps=taps)
    options |= {"tokenizer": TOKENIZER, "eos_ids": (EOS,), "on_device": on_device}
    return build(backend, drafters, forward=forward, **options)


@functools.cache
def expected() -> dict[Key, Told]:
    return run(engine(), plain(asked()))


def scripted(**options: Any) -> Made:
    scripts = [[*asked()[int(i)].prompt, *told.tokens] for (i, _), told in expected().items()]
    return always(Scripted(scripts, vocab_size=SIZE, **options))


def assert_fits(params: SamplingParams, told: Told) -> None:
    if params.grammar is TEXT:  # may go on for ever
        whole = told.text.rpartition("<tool_call>")[0]
        call = r'<tool_call>\s*\{\s*"name"\s*:\s*"(?:hello|world)"\s*\}\s*</tool_call>'
        assert len(re.findall(call, whole)) == whole.count("<tool_call>")
        return
    assert told.finish is Finish.STOP
    if params.grammar is CALLS:
        called = re.fullmatch(r"<tool_call>\s*(\{.*\})\s*</tool_call>", told.text, re.DOTALL)
        assert (
            told.text in ("hello world", "hello there", "goodbye") if called is None else json.loads(called[1])["name"]
        )
    if params.grammar is WORDS and not params.stop:
        assert re.fullmatch(r"hello( world){1,3}(!|\?+)", told.text)
    if params.grammar is CHOICE:
        assert told.text in ("hello world", "hello there", "goodbye")
    if params.grammar is COMPACT:
        person = json.loads(told.text)
        assert list(person) == ["name", "kind", "age", "tags"]
        assert re.fullmatch("[a-z]{1,8}", person["name"])
        assert person["kind"] in ("hello world", "hello", "other")
        assert 0 <= person["age"] <= 150
        assert all(tag in (True, False) for tag in person["tags"])


def test_the_grammar_is_kept() -> None:
    for (i, _), told in expected().items():
        if PARAMS[int(i)].grammar is not None:
            assert_fits(PARAMS[int(i)], told)
            assert not set(told.tokens[:-1]) & {0, 1, 2}


def test_min_tokens_lasts_as_long_as_the_grammar_goes_on() -> None:
    told = expected()["4", 0]
    assert len(told.tokens) >= 60
    assert re.fullmatch(r"hello \?+", told.text)


@pytest.mark.parametrize("name", [*DRAFTERS, "chain", "right-chain", "sure-chain", "tree", None])
def test_same_answers_whoever_drafts(name: str | None) -> None:
    made = {
        "chain": scripted(wrong=0.3),
        "right-chain": scripted(wrong=0.0),
        "sure-chain": scripted(wrong=0.3, probs=True),
        "tree": scripted(wrong=0.5, tree=True),
        **DRAFTERS,
    }
    rig = engine({name: made[name]} if name else None)
    told = run(rig, asked())
    assert tokens_of(told) == tokens_of(expected())
    assert {key: each.text for key, each in told.items()} == {key: each.text for key, each in expected().items()}
    assert rig.engine.stats.accepted > 0


@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_same_answers_on_real_backends(backend: str) -> None:
    some = [asked()[i] for i in (0, 2, 3)]
    wanted = run(engine(backend=backend), plain(some))
    told = run(engine({"noisy": DRAFTERS["noisy"]}, backend=backend), some)
    assert tokens_of(told) == tokens_of(wanted)
    for (i, _), each in told.items():
        assert_fits(PARAMS[int(i)], each)


def test_the_grammar_is_kept_by_rejection() -> None:
    for name in ("noisy", "narrow"):
        for (i, _), told in run(engine({name: DRAFTERS[name]}), asked(Rule.REJECTION)).items():
            if PARAMS[int(i)].grammar is not None:
                assert_fits(PARAMS[int(i)], told)


@pytest.mark.parametrize("name", ["good", "noisy", None])
def test_in_steps_of_a_device(name: str | None) -> None:
    """Beside any other parameter, with log-probabilities of what was drawn; more in test_grammars_on_device.py."""
    rig = engine(on_device={name: replace(TARGET, noise=0.05 * (name == "noisy"))} if name else {})
    told = run(rig, [*asked(), Request("other", prompt(9, seed=1), SamplingParams(temperature=0, ignore_eos=True))])
    del told["other", 0]
    assert tokens_of(told) == tokens_of(expected())
    assert [one.token for one in told["5", 0].logprobs] == told["5", 0].tokens
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.accepted > 0


def test_forced_tokens_are_drafted_for_free() -> None:
    """Without any drafter, and counted as drafted; not where speculation is off."""
    for request, wanted in ((asked()[0], True), (plain(asked())[0], False)):
        told = run(engine(), [request])["0", 0]
        assert (Origin.ACCEPTED in told.origins) is wanted
        assert (told.stats.drafted > 0) is wanted
        assert told.tokens == expected()["0", 0].tokens
        assert (told.stats.steps < len(told.tokens) // 2) is wanted


def test_forced_tokens_say_nothing_of_the_drafter() -> None:
    """It is not told of drafts that are not its own, and its pace is judged by its own."""

    class Mute(Scripted):
        def observe(self, key: int, tokens: Any, accepted: int) -> None:
            raise AssertionError("a draft of nobody's was observed")

    rig = engine({"mute": always(Mute([], vocab_size=SIZE))})
    told = run(rig, [asked()[0]])["0", 0]
    assert told.stats.accepted > 20
    assert rig.engine.drafters["mute"].out is None
    assert told.tokens == expected()["0", 0].tokens


def test_a_drafter_believes_in_what_the_grammar_leaves() -> None:
    """Of two tokens one is likely, however little it counted among all."""
    rig = engine({"sure": model_drafter(TARGET, min_confidence=0.5)})
    params = SamplingParams(temperature=0, grammar=Grammar.regex("[ab]{80}"))
    told = run(rig, [Request("x", (5, 6), params)])["x", 0]
    assert told.tokens == run(engine(), plain([Request("x", (5, 6), params)]))["x", 0].tokens
    assert told.stats.drafted > 2 * told.stats.rounds


def test_a_sequence_that_is_preempted_keeps_its_place() -> None:
    rig = engine({"ngram": DRAFTERS["ngram"]}, num_pages=160)
    tight = build(
        "toy",
        {"ngram": DRAFTERS["ngram"]},
        forward=TARGET.forward("toy", num_pages=12),
        tokenizer=TOKENIZER,
        eos_ids=(EOS,),
    )
    some = asked()[:3]
    assert tokens_of(run(tight, some)) == tokens_of(run(rig, some))
    assert tight.engine.stats.preemptions > 0


def test_an_engine_without_an_end_token_ends_with_the_grammar() -> None:
    rig = build("toy", forward=TARGET.forward("toy", num_pages=160), tokenizer=TOKENIZER)
    assert_fits(PARAMS[3], run(rig, [asked()[3]])["3", 0])


def test_max_tokens_may_cut_the_text_short() -> None:
    told = run(engine(), [replace(asked()[0], sampling=replace(PARAMS[0], max_tokens=4))])["0", 0]
    assert told.finish is Finish.LENGTH
    assert len(told.tokens) == 4


def test_a_grammar_that_cannot_be_followed_ends_its_answer_alone() -> None:
    grammar = Grammar.regex("((a{1,100}){1,100}){1,100}")
    explosive = SamplingParams(temperature=0, grammar=grammar, logit_bias={EOS: -100}, max_tokens=140)
    rig = engine({"ngram": DRAFTERS["ngram"]})
    told = run(rig, [Request("x", (5, 6), explosive), asked()[3]])
    assert told["x", 0].finish is Finish.ERROR
    assert "the grammar cannot be followed any further" in (told["x", 0].error or "")
    assert set(told["x", 0].text) == {"a"}
    assert told["3", 0].tokens == expected()["3", 0].tokens
    assert tokens_of(run(engine(), plain([Request("x", (5, 6), explosive)])))["x", 0] == told["x", 0].tokens


def test_what_cannot_be_used_is_refused_at_once() -> None:
    for rig in (engine(), build("toy")):
        with pytest.raises(InvalidRequest, match=r"cannot be used|needs a tokenizer"):
            rig.engine.submit(Request("x", (5,), SamplingParams(grammar=Grammar.regex("(a"))))
        assert not rig.engine.has_work
