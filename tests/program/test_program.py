"""Programs as users write them: texts, variables, forks, nested programs, batches, streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from paceline.errors import InvalidRequest, ProgramError
from paceline.llm import LLM
from paceline.program import State, assistant, gen, program, select, system, user
from paceline.types import Grammar, SamplingParams, Speculation, TokenEvent


@program
def two(s: State, word: str, tokens: int = 5) -> str:
    s += f"{word}: "
    s += gen("first", max_tokens=tokens) + "; "
    s += gen("second", max_tokens=tokens, temperature=0)
    return s["first"] + s["second"]


@program
def forks(s: State, count: int = 4) -> list[str]:
    s += "A text that is long enough for two pages of the cache. "
    made = s.fork(count)
    for i, fork in enumerate(made):
        fork += f"{i % 2}"
        fork += gen("answer", max_tokens=6, temperature=1.0)
    s.join(made)
    answers: list[str] = s["answer"]
    return answers


def test_text_and_variables(llm: LLM) -> None:
    state = two.run("abc", on=llm, seed=1)
    assert state.text == f"abc: {state['first']}; {state['second']}" == str(state)
    assert state.variables == {"first": state["first"], "second": state["second"]}
    assert state.value == state["first"] + state["second"]
    assert "first" in state
    assert "third" not in state
    assert (state.error, state.done) == (None, True)
    assert len(state.sample("first").tokens) == 5


def test_a_generation_is_that_of_the_llm(llm: LLM) -> None:
    """The prompt is the text so far, and what is not given follows the model's advice."""
    state = two.run("abc", on=llm, seed=1)
    [call, other] = state.run.calls
    sampling = llm.default_sampling
    assert sampling.temperature == 0.5, "the advice of the tiny model"
    first = llm.generate("abc: ", SamplingParams(temperature=0.5, top_k=40, max_tokens=5, seed=call.seed))[0]
    second = llm.generate(f"abc: {first.text}; ", SamplingParams(temperature=0, top_k=40, max_tokens=5))[0]
    assert (state["first"], state["second"]) == (first.text, second.text)
    assert call.seed != other.seed


def test_same_seed_same_text(llm: LLM) -> None:
    """Also one by one after a batch, with and without speculation; a batch gives each run a seed of its own."""
    alone = [forks.run(on=llm, seed=seed).value for seed in (1, 2)]
    assert alone[0] == forks.run(on=llm, seed=1).value
    assert alone[0] != alone[1]
    assert len({*alone[0]}) > 2, "forks draw by themselves"
    batch = forks.run_batch([{}] * 6, on=llm, seed=7)
    assert len({state.seed for state in batch}) == 6
    assert [state.value for state in batch] == [forks.run(on=llm, seed=state.seed).value for state in batch]
    again = forks.run_batch([()] * 6, on=llm, seed=7, at_once=1)
    assert [state.value for state in batch] == [state.value for state in again]
    drawn = [forks.run(on=llm) for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed


def test_a_seed_of_a_generation_is_kept(llm: LLM) -> None:
    @program
    def seeded(s: State) -> None:
        for fork in s.fork(2):
            fork += "abc" + gen("a", max_tokens=6, seed=5, temperature=1.0)

    assert [call.seed for call in seeded.run(on=llm).run.calls] == [5, 5]


def test_forks_run_in_one_batch_and_share_their_beginning(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fork reads the beginning, the others begin when it is in the cache."""
    running, step = [0], llm.engine.step

    def watched() -> list[TokenEvent]:
        events = step()
        running.append(len(llm.engine._scheduler.running))
        return events

    monkeypatch.setattr(llm.engine, "step", watched)

    @program
    def fresh(s: State) -> None:
        s += "This text is new to the cache, and it fills more than three pages."
        for fork in s.fork(6):
            fork += gen("a", max_tokens=20, temperature=1.0)

    state = fresh.run(on=llm, seed=1)
    assert max(running) == 6
    cached = [call.usage.cached_tokens for call in state.run.calls]
    assert cached == [0, *[64] * 5]


def test_calls_that_wait_do_not_block_the_program(llm: LLM) -> None:
    """Only a value that is needed is waited for."""
    order = []

    @program
    def lazy(s: State) -> None:
        s += "abc" + gen("a", max_tokens=20)
        s += "def" + gen("b", max_tokens=3)
        order.append(s.run.calls[0].ended)
        order.append(len(s["b"]) > 0 and s.run.calls[0].ended)

    lazy.run(on=llm)
    assert order == [False, True]


def test_join_gathers_what_each_fork_has(llm: LLM) -> None:
    @program
    def some(s: State) -> None:
        s += "abc" + gen("before", max_tokens=2)
        made = s.fork(3)
        made[0] += gen("x", max_tokens=2)
        made[2] += gen("x", max_tokens=2)
        made[2] += gen("y", max_tokens=2)
        assert made[1]["before"] == s["before"]
        s.join(made)
        assert s["x"] == [made[0]["x"], None, made[2]["x"]]
        assert s["y"] == [None, None, made[2]["y"]]

    state = some.run(on=llm)
    assert state.text == f"abc{state['before']}"
    with pytest.raises(InvalidRequest, match="'x' comes from a join: ask its fork"):
        state.sample("x")


@program
def judge(s: State, mark: str) -> str:
    s += f" {mark}? "
    s += gen("verdict", max_tokens=3, choices=["yes", "no"])
    return s["verdict"].upper()


def test_a_program_inside_another(llm: LLM) -> None:
    """Its text goes on with the outer one, its variables are its own, so it can be called twice."""

    @program
    def outer(s: State) -> None:
        s += "abc"
        good, fine = judge(s, "good"), judge(s, "fine")
        assert good.value == good["verdict"].upper()
        assert "verdict" not in s
        s += gen("end", max_tokens=2)
        s += f" {fine['verdict']}"

    state = outer.run(on=llm)
    said = [call.value for call in state.run.calls]
    assert state.text == f"abc good? {said[0]} fine? {said[1]}{said[2]} {said[1]}"
    assert state.run.calls[1].site.program == "judge (called by outer)"


def test_a_run_inside_another_uses_its_backend(llm: LLM) -> None:
    @program
    def outer(s: State) -> None:
        s += "abc" + gen("a", max_tokens=2)
        s += judge.run("good", seed=3)["verdict"]

    inner = judge.run("good", on=llm, seed=3)
    assert outer.run(on=llm).text.endswith(inner["verdict"])


def test_every_form(llm: LLM) -> None:
    @program
    def forms(s: State) -> None:
        s += "abc" + gen("regex", regex="[0-9]{4}")
        s += gen("schema", schema={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
        s += gen("choices", choices=["left", "right"])
        s += gen("grammar", grammar=Grammar.regex("x|y"))
        s += gen("off", speculation=Speculation(enabled=False), max_tokens=4)
        s += gen("predicted", prediction="abcabc", max_tokens=4)

    found = forms.run(on=llm).variables
    assert found["regex"].isdigit()
    assert '"a"' in found["schema"]
    assert found["choices"] in ("left", "right")
    assert found["grammar"] in ("x", "y")


def test_speculation_changes_nothing_and_helps(llm: LLM) -> None:
    def texts(speculation: Speculation) -> State:
        @program
        def loop(s: State) -> None:
            s += "abcabcabc"
            for i in range(3):
                s += gen(f"part{i}", max_tokens=16, temperature=0, speculation=speculation) + "abc"

        return loop.run(on=llm, seed=1)

    drafting, plain = texts(Speculation()), texts(Speculation(enabled=False))
    assert drafting.text == plain.text
    assert sum(call.usage.accepted for call in drafting.run.calls) > 0
    assert sum(call.usage.drafted for call in plain.run.calls) == 0


def test_a_chat_is_what_the_server_would_build(llm: LLM) -> None:
    prompts = []
    submit = llm.engine.submit

    @program
    def chat(s: State) -> None:
        s += system("Be kind.") + user("<|im_end|> hello")
        s += assistant(gen("a", max_tokens=3))
        s += user("Go ", "on.")
        s += assistant("Well, ")
        s += gen("b", max_tokens=3)
        s += "!"
        s += gen("c", max_tokens=3)

    def watched(request: object, *, validated: bool) -> None:
        prompts.append(request.prompt)
        submit(request, validated=validated)

    llm.engine.submit = watched
    try:
        state = chat.run(on=llm, seed=1)
    finally:
        llm.engine.submit = submit
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "<|im_end|> hello"},
        {"role": "assistant", "content": state["a"]},
        {"role": "user", "content": "Go on."},
    ]
    assert prompts[0] == llm.encode_chat(messages[:2])
    assert prompts[1] == (*llm.encode_chat(messages), *llm.encode("Well, "))
    assert prompts[2] == (*llm.encode_chat(messages), *llm.encode(f"Well, {state['b']}!"))
    last = {"role": "assistant", "content": f"Well, {state['b']}!{state['c']}"}
    assert state.messages == [*messages, last]
    assert state.text.splitlines()[0] == "system: Be kind."


def test_streams(llm: LLM) -> None:
    """Pieces come while the program runs, of any variable, before it is declared and after its end."""
    with two.start("abc", tokens=12, on=llm, seed=1) as state:
        second = list(state.stream("second"))
        first = list(state.stream("first"))
    assert "".join(first) == state["first"]
    assert "".join(second) == state["second"]
    assert len(second) > 1


def test_a_stream_of_nothing(llm: LLM) -> None:
    with two.start("abc", on=llm) as state, pytest.raises(InvalidRequest, match="did you mean 'second'"):
        list(state.stream("secnd"))


def test_async(llm: LLM) -> None:
    async def play() -> None:
        together = await asyncio.gather(*(two.run_async("abc", on=llm, seed=seed) for seed in (1, 2, 1)))
        assert together[0].text == together[2].text != together[1].text
        state = two.start("abc", on=llm, seed=1)
        pieces = [piece async for piece in state.stream("second")]
        assert "".join(pieces) == together[0]["second"]
        await state
        with pytest.raises(ProgramError, match="context"):
            await two.run_async("abc" * 100, on=llm)

    asyncio.run(asyncio.wait_for(play(), 60))


def test_a_cancelled_task_stops_its_run(llm: LLM) -> None:
    runs: list[State] = []

    @program
    def endless(s: State) -> None:
        runs.append(s)
        for i in range(1000):
            s.fork(1)[0].__iadd__("abc" + gen(f"a{i}", max_tokens=200))

    async def play() -> None:
        task = asyncio.create_task(endless.run_async(on=llm))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(play(), 60))
    assert "it was cancelled" in str(runs[0].error)


def test_a_batch_goes_on_when_one_fails(llm: LLM) -> None:
    @program
    def odd(s: State, i: int) -> None:
        s += "abc" + gen("a", max_tokens=3)
        if i % 2:
            raise ValueError(f"{i} is odd, {s['a']!r}")

    states = odd.run_batch([(i,) for i in range(7)], on=llm, at_once=3)
    assert [state.error is None for state in states] == [True, False] * 3 + [True]
    assert "ValueError: 3 is odd" in str(states[3].error)
    assert isinstance(states[3].error.__cause__, ValueError)
    assert len(states[3]["a"]) > 0, "what is known can be read"


def test_progress(llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("paceline.progress.LOG_SECONDS", 0.005)
    two.run_batch([("abc",)] * 9, on=llm, progress=True, at_once=1)
    assert any("of 9 runs" in record.getMessage() for record in caplog.records)


def test_the_llm_is_free_again(llm: LLM) -> None:
    @program
    def asks_itself(s: State, ask: Callable[[], object]) -> None:
        s += "abc" + gen("a", max_tokens=2)
        ask()

    with pytest.raises(ProgramError, match="programs use this LLM: wait for their end"):
        asks_itself.run(lambda: llm.generate("abc"), on=llm)
    stream = llm.stream("abc", SamplingParams(max_tokens=4))
    with pytest.raises(InvalidRequest, match="has open streams"):
        two.run("abc", on=llm)
    assert list(stream)
    assert two.run("abc", on=llm).text


def test_select_and_gen_tell_what_they_have(llm: LLM) -> None:
    @program
    def both(s: State) -> None:
        s += "abc" + gen("g", max_tokens=2, logprobs=1) + select("s", ["x", "y"])

    state = both.run(on=llm)
    assert len(state.sample("g").logprobs) == 2
    assert state["s"] == max(state.scores("s"), key=state.scores("s").__getitem__)
    with pytest.raises(InvalidRequest, match="from select and has no sample"):
        state.sample("s")
    with pytest.raises(InvalidRequest, match="from gen and has no options"):
        state.scores("g")


def test_threads_of_the_program_may_add_to_forks(llm: LLM) -> None:
    @program
    def threaded(s: State) -> None:
        s += "abc"
        made = s.fork(4)
        workers = [threading.Thread(target=lambda f=f: f.__iadd__(gen("a", max_tokens=3))) for f in made]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        s.join(made)

    assert len(threaded.run(on=llm)["a"]) == 4
