"""`timings` of an answer: llama.cpp's counts and times, from what the engine counted."""

from __future__ import annotations

import math

from paceline.server.answers.timings import timings
from paceline.types import SequenceStats
from tests.server.api import Api

NAMES = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second", "draft_n", "draft_n_accepted"),
}


def test_counts_are_summed_and_the_longest_time_counts() -> None:
    first = SequenceStats(
        prompt_tokens=100, cached_tokens=60, output_tokens=10, drafted=8, accepted=5,
        time_queued=0.5, time_to_first=0.7, time_total=1.2,
    )  # fmt: skip
    second = SequenceStats(
        prompt_tokens=100, cached_tokens=100, output_tokens=30, time_queued=0.5, time_to_first=0.6, time_total=1.6
    )
    made = timings([first, second], samples=2).model_dump()
    assert made.keys() == NAMES
    counts = {name: value for name, value in made.items() if isinstance(value, int)}
    assert counts == {"cache_n": 60, "prompt_n": 40, "predicted_n": 40, "draft_n": 8, "draft_n_accepted": 5}
    times = {"prompt_ms": 200, "prompt_per_token_ms": 5, "prompt_per_second": 200}
    times |= {"predicted_ms": 1000, "predicted_per_token_ms": 25, "predicted_per_second": 40}
    assert all(math.isclose(made[name], value) for name, value in times.items())


def test_an_answer_without_time_or_tokens_has_no_infinity() -> None:
    assert set(timings([SequenceStats()]).model_dump().values()) == {0}


def test_answers_and_last_chunks_have_them(api: Api) -> None:
    for answer, chunks in (
        (api.chat(n=2), api.chat_stream(n=2, stream_options={"include_usage": True})),
        (api.complete(prompt=["ab", "cd"]), api.complete_stream(prompt=["ab", "cd"])),
    ):
        usage, told, speculation = answer["usage"], answer["timings"], answer["speculation"]
        assert told.keys() == NAMES
        assert told["prompt_n"] + told["cache_n"] == usage["prompt_tokens"]
        assert told["predicted_n"] == usage["completion_tokens"]
        assert told["draft_n"] == speculation["num_draft_tokens"]
        assert told["draft_n_accepted"] == speculation["num_accepted_tokens"]
        with_choices = [chunk for chunk in chunks if chunk["choices"]]
        assert [("timings" in chunk) for chunk in with_choices] == [False] * (len(with_choices) - 1) + [True]
        assert with_choices[-1]["timings"]["predicted_n"] == usage["completion_tokens"]


def test_timings_of_each_token_are_not_there(api: Api) -> None:
    assert api.chat(timings_per_token=True)["ignored_fields"] == ["timings_per_token"]
