"""Anthropic's Python SDK: messages whole and streamed, tools with their results, counting, errors.

python clients/with_anthropic.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from collections.abc import Callable

from anthropic import Anthropic, APIStatusError, BadRequestError, NotFoundError
from checks import ASK_PERSON, ASK_WEATHER, KEY, PERSON, QUESTION, WEATHER, Checks, expect, get
from pydantic import BaseModel

PLAIN = {"temperature": 0, "speculation": {"enabled": False}}
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": WEATHER["function"]["parameters"],
}


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    checks = Checks("anthropic")
    client = Anthropic(base_url=checks.root, api_key=KEY, max_retries=0, timeout=120)
    messages = client.messages
    # Recent versions of the SDK have no field for the temperature any more.
    greedy = {"model": checks.model, "max_tokens": 24, "extra_body": {"temperature": 0}}

    with checks("messages: same text plain, speculative, streamed"):
        whole = messages.create(messages=QUESTION, **greedy)
        plain = messages.create(messages=QUESTION, **greedy | {"extra_body": PLAIN})
        with messages.stream(messages=QUESTION, **greedy) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        [block] = whole.content
        expect(block.type == "text" and block.text, block)
        expect(block.text == plain.content[0].text == streamed == final.content[0].text, (block.text, streamed))
        expect(final.usage.output_tokens == whole.usage.output_tokens, (final.usage, whole.usage))
        expect(whole._request_id, "a request id")

    with checks("messages: the raw events"):
        kinds = [event.type for event in messages.create(messages=QUESTION, stream=True, **greedy)]
        expect(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds)

    with checks("messages: system, an answer that is begun, stop_sequences"):
        begun = [*QUESTION, {"role": "assistant", "content": "The sky is blue because"}]
        system = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
        made = messages.create(messages=begun, system=system, stop_sequences=["."], **greedy | {"max_tokens": 60})
        expect(made.stop_reason in ("stop_sequence", "max_tokens", "end_turn"), made.stop_reason)
        if made.stop_reason == "stop_sequence":
            expect(made.stop_sequence == "." and "." not in made.content[0].text, made)
        expect(made.model_extra["ignored_fields"] == ["system.cache_control"], made.model_extra)

    with checks("tools: a call, its result, an answer"):
        forced = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        asked = messages.create(messages=ASK_WEATHER, **forced, **greedy | {"max_tokens": 60})
        [call] = asked.content
        expect(asked.stop_reason == "tool_use" and call.name == "get_weather", asked)
        expect(set(call.input) == {"city"}, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
        turn = [*ASK_WEATHER, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        answered = messages.create(messages=turn, tools=[TOOL], **greedy)
        expect(answered.content, answered)
        failed = result | {"is_error": True, "content": "no such city"}
        turn[-1] = {"role": "user", "content": [failed, {"type": "text", "text": "What went wrong?"}]}
        expect(messages.create(messages=turn, tools=[TOOL], **greedy).content, "an answer to a failure")

    with checks("tools: by name, streamed"):
        named = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
        with messages.stream(messages=ASK_WEATHER, **named, **greedy | {"max_tokens": 60}) as stream:
            kinds = {event.type for event in stream}
            [call] = stream.get_final_message().content
        expect("input_json" in kinds and set(call.input) == {"city"}, (kinds, call))

    with checks("structured output"):
        form = {"format": {"type": "json_schema", "schema": PERSON}}
        made = messages.create(messages=ASK_PERSON, output_config=form, **greedy | {"max_tokens": 100})
        person = Person.model_validate_json(made.content[0].text)
        expect(0 <= person.age <= 120, person)
        parsed = messages.parse(messages=ASK_PERSON, output_format=Person, **greedy | {"max_tokens": 200})
        expect(isinstance(parsed.parsed_output, Person), parsed)

    with checks("count_tokens agrees with usage"):
        count = messages.count_tokens(model=checks.model, messages=QUESTION, system="You are brief.").input_tokens
        usage = messages.create(messages=QUESTION, system="You are brief.", **greedy).usage
        expect(usage.input_tokens + usage.cache_read_input_tokens == count, (usage, count))

    with checks("models"):
        expect(checks.model in [model.id for model in client.models.list()], "the list has the model")

    with checks("errors are the SDK's own"):
        _fails(NotFoundError, "not_found_error", lambda: messages.create(messages=QUESTION, **greedy | {"model": "x"}))
        _fails(BadRequestError, "invalid_request_error", lambda: messages.create(messages=[], **greedy))
        hot = greedy | {"extra_body": {"temperature": -1}}
        _fails(BadRequestError, "invalid_request_error", lambda: messages.create(messages=QUESTION, **hot))
        expect(get(f"{checks.root}/health")["status"] == "ready", "the server is well")

    checks.end()


def _fails(kind: type[APIStatusError], name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        expect(error.body["error"]["type"] == name and error.body["error"]["message"], error.body)
    else:
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    main()
