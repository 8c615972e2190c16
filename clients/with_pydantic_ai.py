"""Pydantic AI: native, tool and prompted output, tools and streams, over chat completions and responses.

python clients/with_pydantic_ai.py --url http://127.0.0.1:8000/v1

The model is too small to decide well; checks are on the form of what it says.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import KEY, Checks, expect
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
SHORT = ModelSettings(max_tokens=150, temperature=0.0)
QUESTION = "What is the weather in Paris?"


class Report(BaseModel):
    """A report of the weather."""

    sky: Literal["clear", "cloudy", "rain"]
    degrees: int = Field(ge=-40, le=50)


class Refusal(BaseModel):
    """A reason why there is no report."""

    reason: Literal["no data", "no city"]


def main() -> None:
    checks = Checks("pydantic-ai-slim")
    client = AsyncOpenAI(base_url=checks.url, api_key=KEY, max_retries=0)
    provider = OpenAIProvider(openai_client=client)
    with asyncio.Runner() as runner:
        for kind, model in KINDS.items():
            for name, check in CHECKS.items():
                with checks(f"{kind}: {name}"):
                    runner.run(check(model(checks.model, provider=provider)))
        runner.run(client.close())
    checks.end()


async def native(model: Model) -> None:
    agent = Agent(model, output_type=NativeOutput(Report), model_settings=SHORT)
    result = await agent.run(QUESTION)
    expect(isinstance(result.output, Report), result.output)


async def native_union(model: Model) -> None:
    agent = Agent(model, output_type=NativeOutput([Report, Refusal]), model_settings=SHORT)
    result = await agent.run(QUESTION)
    expect(isinstance(result.output, Report | Refusal), result.output)


async def native_and_tools(model: Model) -> None:
    """Calls, or the output. The model may call until its requests are used up."""
    cities = []
    agent = Agent(model, output_type=NativeOutput(Report), model_settings=SHORT)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"clear sky and 21 degrees in {city}"

    try:
        result = await agent.run(QUESTION, usage_limits=UsageLimits(request_limit=3))
    except UsageLimitExceeded:
        expect(cities, "turns go by calls alone")
    else:
        expect(isinstance(result.output, Report), result.output)


async def by_tool(model: Model) -> None:
    agent = Agent(model, output_type=ToolOutput(Report, name="report"), model_settings=SHORT)
    result = await agent.run(QUESTION)
    expect(isinstance(result.output, Report), result.output)
    calls = [
        part.tool_name for message in result.all_messages() for part in message.parts if type(part) is ToolCallPart
    ]
    expect(calls == ["report"], calls)


async def by_tools(model: Model) -> None:
    """One of two output tools is called."""
    kinds = [ToolOutput(Report, name="report"), ToolOutput(Refusal, name="refuse")]
    result = await Agent(model, output_type=kinds, model_settings=SHORT).run(QUESTION)
    expect(isinstance(result.output, Report | Refusal), result.output)


async def streamed(model: Model) -> None:
    agent = Agent(model, output_type=NativeOutput(Report), model_settings=SHORT)
    async with agent.run_stream(QUESTION) as result:
        outputs = [output async for output in result.stream_output(debounce_by=None)]
    expect(isinstance(outputs[-1], Report), outputs)


async def conversation(model: Model) -> None:
    """Messages of one run go with the next."""
    agent = Agent(model, output_type=ToolOutput(Report, name="report"), model_settings=SHORT)
    first = await agent.run(QUESTION)
    again = await agent.run("And in Rome?", message_history=first.all_messages())
    expect(isinstance(again.output, Report), again.output)


CHECKS: dict[str, Any] = {
    "NativeOutput": native,
    "NativeOutput of a union": native_union,
    "NativeOutput and tools": native_and_tools,
    "ToolOutput": by_tool,
    "ToolOutput of two": by_tools,
    "NativeOutput, streamed": streamed,
    "messages sent back": conversation,
}


if __name__ == "__main__":
    main()
