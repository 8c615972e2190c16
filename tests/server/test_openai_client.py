"""OpenAI's own client, untouched, against the whole server."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from paceline.llm import LLM
from tests.server.api import HELLO, MODEL, Api

if TYPE_CHECKING:
    import openai
else:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

MESSAGES: Any = HELLO


@pytest.fixture
def client(api: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=api.http, max_retries=0)


def test_chat(api: Api, client: openai.AsyncOpenAI) -> None:
    async def ask(**fields: Any) -> Any:
        return await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, **fields)

    answer = api.run(ask(temperature=0, n=2, logprobs=True, top_logprobs=2, extra_body={"top_k": 5, "odd": 1}))
    assert len(answer.choices) == 2
    assert answer.choices[0].message.content == answer.choices[1].message.content
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.completion_tokens == 16
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    assert answer.ignored_fields == ["odd"]
    assert answer.speculation["drafter"] == "ngram"


def test_a_streamed_chat(api: Api, client: openai.AsyncOpenAI) -> None:
    async def ask(**fields: Any) -> list[Any]:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=8,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        return [chunk async for chunk in stream]

    on, off = api.run(ask()), api.run(ask(extra_body={"speculation": {"enabled": False}}))
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices) for chunks in (on, off)]
    assert texts[0] == texts[1] != ""
    assert on[-1].usage.completion_tokens == 8
    assert on[-2].choices[0].finish_reason == "length"


def test_the_clients_own_helper_for_streams(api: Api, client: openai.AsyncOpenAI) -> None:
    """It takes only answers that ended by themselves."""
    fields: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 20}
    fields["stop"] = api.chat(**fields)["choices"][0]["message"]["content"][6]

    async def ask() -> Any:
        async with client.chat.completions.stream(model=MODEL, **fields) as stream:
            return await stream.get_final_completion()

    assert api.run(ask()).choices[0].message.content == api.chat(**fields)["choices"][0]["message"]["content"]


def test_completions(api: Api, client: openai.AsyncOpenAI, llm: LLM) -> None:
    async def ask(**fields: Any) -> Any:
        return await client.completions.create(model=MODEL, max_tokens=4, temperature=0, **fields)

    prompts = [llm.tokenizer.encode("abc"), llm.tokenizer.encode("hello")]
    answer = api.run(ask(prompt=prompts, echo=True, logprobs=1))
    assert [choice.text[: len(prompt)] for choice, prompt in zip(answer.choices, prompts, strict=True)] == [
        "abc",
        "hello",
    ]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert len(answer.choices[1].logprobs.tokens) == 9
    assert api.run(ask(prompt="abc")).choices[0].text == answer.choices[0].text[3:]


def test_responses(api: Api, client: openai.AsyncOpenAI) -> None:
    async def ask() -> tuple[Any, list[Any]]:
        fields: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 6, "temperature": 0}
        whole = await client.responses.create(**fields)
        stream = await client.responses.create(**fields, stream=True)
        return whole, [event async for event in stream]

    whole, events = api.run(ask())
    assert whole.output_text
    assert whole.usage.output_tokens == 6
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_forms_and_tools(api: Api, client: openai.AsyncOpenAI) -> None:
    """The context is too short for the tools of a template that does not know them: a call comes by its form alone."""
    schema = {"enum": ["red", "blue"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}

    async def ask(**fields: Any) -> Any:
        return await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, seed=1, **fields)

    choice = api.run(ask(response_format=form)).choices[0]
    assert json.loads(choice.message.content) in ("red", "blue")
    assert choice.finish_reason == "stop"
    tools = [{"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError) as long:
        api.run(ask(tools=tools))
    assert long.value.code == "context_length_exceeded"
    assert api.run(ask(tools=tools, tool_choice="none")).choices[0].message.tool_calls is None


def test_models(api: Api, client: openai.AsyncOpenAI) -> None:
    async def ask() -> list[str]:
        listed = [model.id async for model in client.models.list()]
        return [*listed, (await client.models.retrieve(MODEL)).id]

    assert api.run(ask()) == [MODEL, MODEL]


def test_errors(api: Api, client: openai.AsyncOpenAI) -> None:
    def ask(**fields: Any) -> Coroutine[Any, Any, Any]:
        return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})

    with pytest.raises(openai.BadRequestError) as bad:
        api.run(ask(temperature=1000))
    assert bad.value.param == "temperature"
    assert isinstance(bad.value.response, httpx.Response)
    with pytest.raises(openai.NotFoundError) as missing:
        api.run(ask(model="other"))
    assert missing.value.code == "model_not_found"


def test_a_predicted_answer(api: Api, client: openai.AsyncOpenAI) -> None:
    letters = {"allowed_token_ids": list(range(65, 91))}  # read back as they were written

    async def ask(**fields: Any) -> Any:
        return await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=40, seed=3, extra_body=letters, **fields
        )

    plain = api.run(ask())
    text = plain.choices[0].message.content
    answer = api.run(ask(prediction={"type": "content", "content": text}))
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 20
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_embeddings(api: Api, client: openai.AsyncOpenAI) -> None:
    """The client asks for base64 by itself, and reads it back as numbers."""

    async def ask() -> Any:
        return await client.embeddings.create(model=MODEL, input=["one", "two"])

    answer = api.run(ask())
    floats = api.post("/v1/embeddings", {"input": "two"}).json()["data"][0]["embedding"]
    assert answer.data[1].embedding == pytest.approx(floats, abs=1e-5)
    assert answer.usage.total_tokens == 6
