"""OpenAI's Agents SDK: tools beside an output type, hand-offs and streams, over chat completions and responses.

python clients/with_openai_agents.py --url http://127.0.0.1:8000/v1

The model is too small to decide well. What it may not decide is its form: a call with fitting arguments, or the output.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded
from checks import KEY, Checks, expect
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
SHORT = {"max_tokens": 150, "temperature": 0.0}


class Report(BaseModel):
    """A report of the weather."""

    sky: Literal["clear", "cloudy", "rain"]
    degrees: int = Field(ge=-40, le=50)


class Weather:
    """A tool that counts its calls, and can be offered once only."""

    def __init__(self, *, once: bool) -> None:
        self.cities: list[str] = []

        @function_tool(is_enabled=lambda *_: not (once and self.cities))
        def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
            """The weather of a city.

            Args:
                city: Its name.
            """
            self.cities.append(city)
            return f"clear sky and 21 degrees in {city}"

        self.tool = get_weather


def main() -> None:
    checks = Checks("openai-agents")
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=checks.url, api_key=KEY, max_retries=0)
    with asyncio.Runner() as runner:
        for kind, model in KINDS.items():
            for name, check in CHECKS.items():
                with checks(f"{kind}: {name}"):
                    runner.run(check(model(model=checks.model, openai_client=client)))
        runner.run(client.close())
    checks.end()


async def two_turns(model: Model) -> None:
    """A call that is demanded, then its result and the output type."""
    weather = Weather(once=True)
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, **SHORT)
    agent = _agent(model, weather, settings)
    result = await Runner.run(agent, "What is the weather in Paris?", max_turns=3)
    expect(weather.cities, "the tool is called")
    expect(isinstance(result.final_output, Report), result.final_output)
    kinds = [item.type for item in result.new_items]
    expect(kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds)


async def its_own_choice(model: Model) -> None:
    """A call or the output type, as the model likes; it may not come to an end."""
    for question in ("What is the weather in Oslo?", "Report: clear sky, 20 degrees.", "Hello!"):
        weather = Weather(once=False)
        agent = _agent(model, weather, ModelSettings(**SHORT))
        try:
            result = await Runner.run(agent, question, max_turns=2)
        except MaxTurnsExceeded:
            expect(weather.cities, "turns go by calls alone")
        else:
            expect(isinstance(result.final_output, Report), result.final_output)


async def output_alone(model: Model) -> None:
    """A type that is no object: the SDK wraps it."""
    reports = Annotated[list[Report], Field(max_length=2)]
    agent = Agent(name="Reporter", model=model, model_settings=ModelSettings(**SHORT), output_type=reports)
    result = await Runner.run(agent, "Report the weather of two cities.")
    expect(all(isinstance(report, Report) for report in result.final_output), result.final_output)


async def handoff(model: Model) -> None:
    """One agent hands the conversation over to another, which answers in its own output type."""
    reporter = Agent(
        name="Reporter",
        handoff_description="Reports the weather",
        model=model,
        model_settings=ModelSettings(**SHORT),
        output_type=Report,
    )
    desk = Agent(
        name="Desk",
        instructions="Hand over to the reporter.",
        model=model,
        model_settings=ModelSettings(tool_choice="required", **SHORT),
        handoffs=[reporter],
    )
    result = await Runner.run(desk, "What is the weather in Rome?", max_turns=3)
    expect(result.last_agent.name == "Reporter", result.last_agent.name)
    expect(isinstance(result.final_output, Report), result.final_output)


async def streamed(model: Model) -> None:
    weather = Weather(once=True)
    agent = _agent(model, weather, ModelSettings(tool_choice="get_weather", **SHORT))
    result = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=3)
    names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
    expect({"tool_called", "tool_output", "message_output_created"} <= {*names}, names)
    expect(isinstance(result.final_output, Report), result.final_output)


async def conversation(model: Model) -> None:
    """The items of one run, ids and annotations included, are the input of the next."""
    weather = Weather(once=True)
    agent = _agent(model, weather, ModelSettings(tool_choice="required", **SHORT))
    first = await Runner.run(agent, "What is the weather in Paris?", max_turns=3)
    other = Agent(name="Reporter", model=model, model_settings=ModelSettings(**SHORT), output_type=Report)
    again = await Runner.run(other, [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    expect(isinstance(again.final_output, Report), again.final_output)


CHECKS: dict[str, Any] = {
    "output type and tools, two turns": two_turns,
    "output type and tools, its own choice": its_own_choice,
    "a list of outputs": output_alone,
    "hand-off": handoff,
    "streamed": streamed,
    "items sent back": conversation,
}


def _agent(model: Model, weather: Weather, settings: ModelSettings) -> Agent[None]:
    return Agent(
        name="Reporter",
        instructions="Report the weather.",
        model=model,
        model_settings=settings,
        tools=[weather.tool],
        output_type=Report,
    )


if __name__ == "__main__":
    main()
