"""`select` against log-probabilities that are computed directly, and requests that share their beginning."""

from __future__ import annotations

import pytest

from paceline.llm import LLM
from paceline.program import State, assistant, program, select, user
from paceline.program.expressions import Select
from paceline.program.prefixes import MAX_PAGES, Prefixes, page_keys
from paceline.program.selection import option_scores, prefix_length
from paceline.types import SamplingParams

OPTIONS = ["yes", "no", "perhaps, who knows"]


def direct(llm: LLM, before: tuple[int, ...], option: str) -> list[float]:
    """The log-probability of each token of an option, from a prompt that is read as a whole."""
    prompt = (*before, *llm.encode(option))
    answer = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[0]
    assert answer.prompt_logprobs is not None
    assert answer.stats.cached_tokens == 0
    return [each.logprob for each in answer.prompt_logprobs[len(before) :] if each is not None]


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_the_target_s_own(llm: LLM, chat: bool) -> None:
    text = f"Of two texts that are equal for {3 + chat} pages the beginning is read once: "

    @program
    def asks(s: State) -> None:
        s += user(text) + assistant("so: ") if chat else text
        twin, *_ = s.fork(1)
        s += select("total", OPTIONS)
        twin += select("mean", OPTIONS, by="mean")
        s.join([twin])
        s.value = twin.scores("mean")

    state = asks.run(on=llm)
    before = (*llm.encode_chat([{"role": "user", "content": text}]), *llm.encode("so: ")) if chat else llm.encode(text)
    logprobs = {option: direct(llm, before, option) for option in OPTIONS}
    totals = {option: sum(each) for option, each in logprobs.items()}
    assert state.scores("total") == pytest.approx(totals, abs=1e-4)
    assert state["total"] == max(totals, key=totals.__getitem__)
    means = {option: sum(each) / len(each) for option, each in logprobs.items()}
    assert state.run.calls[1].scores == pytest.approx(means, abs=1e-4)
    assert state["mean"] == [max(means, key=means.__getitem__)]
    shared = (len(before) - 1) // 16 * 16
    assert state.run.calls[0].usage.cached_tokens == 2 * shared, "the first option reads for the others"
    assert state.run.calls[1].usage.cached_tokens == 3 * shared, "the select of the fork finds everything"


def test_an_option_that_merges_with_the_text_before() -> None:
    """Tokens behind what all texts share count, for every option."""
    assert prefix_length([1, 2, 3], [[1, 2, 3, 4], [1, 2, 3, 5, 6]]) == 3
    assert prefix_length([1, 2, 3], [[1, 2, 9], [1, 2, 3, 5]]) == 2, "one option merges with the 3"
    assert prefix_length([1, 2, 3], [[1, 2, 3, 4]]) == 3, "an option alone does not hide itself"


def test_norms() -> None:
    logprobs = [[-1.0, -1.0, -1.0], [-2.0]]
    assert option_scores(Select("a", ("x", "y")), logprobs) == {"x": -3.0, "y": -2.0}
    assert option_scores(Select("a", ("x", "y"), by="mean"), logprobs) == {"x": -1.0, "y": -2.0}


PAGE = list(range(16))


def test_page_keys() -> None:
    one, other = page_keys([*PAGE, *PAGE, 1]), page_keys([*PAGE, *PAGE[::-1], 1])
    assert len(one) == len(other) == 2
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert page_keys([*PAGE, 1], salt="a") != page_keys([*PAGE, 1]), "no prefix is shared between salts"
    assert page_keys(PAGE) == [], "the last token is always computed"
    assert page_keys([*PAGE, *PAGE, *PAGE])[1] != page_keys([*PAGE, *PAGE, *PAGE])[0]


def test_the_first_reads_and_the_others_wait() -> None:
    prefixes, keys = Prefixes(), page_keys([*PAGE * 4, 1])
    assert prefixes.leader(keys) is None
    prefixes.begin("a", keys)
    assert prefixes.reads("a")
    assert prefixes.leader(keys) == "a"
    assert prefixes.leader(keys[:1]) == "a"
    assert prefixes.leader(page_keys([*PAGE, *range(100, 180)])) is None, "too little to wait for"
    prefixes.end("a")
    assert not prefixes.reads("a")
    assert prefixes.leader(keys) is None
    longer = page_keys([*PAGE * 6, 1])
    prefixes.begin("b", longer)
    assert prefixes.leader(keys) is None, "it was read"
    assert prefixes.leader(longer) == "b"


def test_few_pages_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PAGES > 1000
    monkeypatch.setattr("paceline.program.prefixes.MAX_PAGES", 2)
    prefixes, keys = Prefixes(), page_keys([*PAGE * 4, 1])
    prefixes.begin("a", keys)
    prefixes.end("a")
    assert len(prefixes._read) == 2
