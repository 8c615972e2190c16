"""LangChain's ChatOpenAI and OpenAI.

python clients/with_langchain.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from typing import Annotated

from checks import KEY, Checks, expect
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """The weather of a city"""
    return f"21 degrees in {city}"


def main() -> None:
    checks = Checks("langchain-openai")
    server = {"base_url": checks.url, "api_key": KEY, "model": checks.model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**server, max_tokens=24, stream_usage=True)
    longer = ChatOpenAI(**server, max_tokens=100)
    question = [SystemMessage("Answer in one sentence."), HumanMessage("Why is the sky blue?")]

    with checks("invoke, stream, batch"):
        whole = chat.invoke(question)
        streamed = None
        for chunk in chat.stream(question):
            streamed = chunk if streamed is None else streamed + chunk
        expect(whole.content and whole.content == streamed.content, f"{whole.content!r}, {streamed.content!r}")
        expect(streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], "the same usage")
        expect({answer.content for answer in chat.batch([question] * 4)} == {whole.content}, "the same text in company")

    with checks("logprobs"):
        made = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
        expect(made.response_metadata["logprobs"]["content"], made.response_metadata)

    with checks("tools"):
        asked = [HumanMessage("What is the weather in Paris?")]
        made = longer.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(asked)
        [call] = made.tool_calls
        expect(call["name"] == "get_weather" and set(call["args"]) == {"city"}, call)
        back = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        expect(longer.bind_tools([get_weather]).invoke([*asked, made, back]) is not None, "an answer")

    for method in ("json_schema", "function_calling"):
        with checks(f"structured output by {method}"):
            made = longer.with_structured_output(Person, method=method).invoke(
                "Invent a person: name and age, as JSON."
            )
            expect(isinstance(made, Person), made)

    with checks("the Responses API"):
        made = ChatOpenAI(**server, max_tokens=24, use_responses_api=True).invoke(question)
        expect(made.text == whole.content, f"{made.text!r}, {whole.content!r}")

    with checks("completions"):
        expect(OpenAI(**server, max_tokens=16).invoke("Once upon a time"), "a text")

    checks.end()


if __name__ == "__main__":
    main()
