"""OpenAI's Python SDK: models, chat, completions, responses; whole and streamed.

python clients/with_openai.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

from checks import ASK_PERSON, ASK_WEATHER, KEY, PERSON, QUESTION, WEATHER, Checks, expect, get
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from openai.types import CompletionUsage
from pydantic import BaseModel, Field

PLAIN = {"speculation": {"enabled": False}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


class Person(BaseModel):
    name: str
    age: int


class City(BaseModel):
    """The weather of a city"""

    city: str = Field(max_length=20)


def main() -> None:
    checks = Checks("openai")
    client = OpenAI(base_url=checks.url, api_key=KEY, max_retries=0, timeout=120)
    greedy = {"model": checks.model, "temperature": 0, "max_tokens": 24}
    chat, completions, responses = client.chat.completions, client.completions, client.responses

    with checks("models"):
        expect(checks.model in [model.id for model in client.models.list()], "the list has the model")
        expect(client.models.retrieve(checks.model).id == checks.model, "the model can be retrieved")

    with checks("chat: same text plain, speculative, streamed"):
        whole = chat.create(messages=QUESTION, **greedy)
        plain = chat.create(messages=QUESTION, extra_body=PLAIN, **greedy)
        chunks = list(chat.create(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **greedy))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        text = whole.choices[0].message.content
        expect(text and text == plain.choices[0].message.content == streamed, f"{text!r}, {streamed!r}")
        expect(chunks[-1].usage == whole.usage or _counts(chunks[-1].usage) == _counts(whole.usage), "the same usage")
        expect(all(chunk.usage is None for chunk in chunks[:-1]), "usage comes last")

    with checks("chat: n, seed"):
        sampled = {"messages": QUESTION, "model": checks.model, "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3}
        first, again = chat.create(**sampled), chat.create(**sampled, extra_body=PLAIN)
        texts = [choice.message.content for choice in first.choices]
        expect(len(texts) == 3 and len(set(texts)) > 1, f"three answers that differ: {texts}")
        expect(texts == [choice.message.content for choice in again.choices], "same seed, same texts")

    with checks("chat: logprobs"):
        scored = chat.create(messages=QUESTION, logprobs=True, top_logprobs=3, **greedy).choices[0]
        content = scored.logprobs.content
        expect(
            bytes(b for each in content for b in each.bytes).decode() == scored.message.content, "bytes make the text"
        )
        expect(all(len(each.top_logprobs) == 3 for each in content), "three alternatives")
        expect(all(each.logprob == each.top_logprobs[0].logprob for each in content), "greedy takes the best")

    with checks("chat: tools, one after the other"):
        asked = chat.create(
            messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required", **greedy | {"max_tokens": 60}
        )
        [call] = asked.choices[0].message.tool_calls
        expect(asked.choices[0].finish_reason == "tool_calls", asked.choices[0].finish_reason)
        expect(call.function.name == "get_weather" and "city" in json.loads(call.function.arguments), call)
        back = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
        turn = [*ASK_WEATHER, asked.choices[0].message, back]
        expect(chat.create(messages=turn, tools=[WEATHER], **greedy).choices[0].message.content, "an answer")

    with checks("chat: tool by name, streamed"):
        named = {"type": "function", "function": {"name": "get_weather"}}
        with chat.stream(
            messages=ASK_WEATHER, tools=[WEATHER], tool_choice=named, **greedy | {"max_tokens": 60}
        ) as stream:
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        expect(set(json.loads(call.function.arguments)) == {"city"}, call)

    with checks("chat: json_schema, json_object, parse"):
        long = greedy | {"max_tokens": 100}
        made = chat.create(messages=ASK_PERSON, response_format=SCHEMA, **long).choices[0].message.content
        expect(set(json.loads(made)) == {"name", "age"}, made)
        made = chat.create(messages=ASK_PERSON, response_format={"type": "json_object"}, **long | {"max_tokens": 200})
        if made.choices[0].finish_reason == "stop":
            json.loads(made.choices[0].message.content)
        parsed = chat.parse(messages=ASK_PERSON, response_format=Person, **long).choices[0].message.parsed
        expect(isinstance(parsed, Person), parsed)

    with checks("tools beside a form: a call or the form, strict"):
        long = greedy | {"max_tokens": 100}
        tool = pydantic_function_tool(City, name="get_weather")
        for messages in (ASK_WEATHER, ASK_PERSON):
            made = chat.parse(
                messages=messages, tools=[tool], response_format=Person, parallel_tool_calls=False, **long
            )
            message = made.choices[0].message
            calls = [call.function.parsed_arguments for call in message.tool_calls or ()]
            called = bool(calls) and all(isinstance(call, City) for call in calls)
            expect(called != isinstance(message.parsed, Person), message)
        made = chat.parse(messages=ASK_WEATHER, tools=[tool], response_format=Person, tool_choice="required", **long)
        [call] = made.choices[0].message.tool_calls
        expect(isinstance(call.function.parsed_arguments, City), call)
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        [call] = (
            chat.create(messages=ASK_WEATHER, tools=[tool], tool_choice=choice, **long).choices[0].message.tool_calls
        )
        City.model_validate_json(call.function.arguments)

    with checks("completions: a prompt scored alone, control tokens"):
        scored = completions.create(prompt="a b c", echo=True, logprobs=0, **greedy | {"max_tokens": 0}).choices[0]
        expect(scored.text == "a b c" and scored.logprobs.token_logprobs[1:], scored)
        asked = {"prompt": "<|im_start|>user", **greedy | {"max_tokens": 1}}
        text, parsed = (completions.create(**asked, extra_body={"parse_special": flag}) for flag in (False, True))
        expect(text.usage.prompt_tokens > parsed.usage.prompt_tokens, (text.usage, parsed.usage))

    with checks("completions: token ids, batches, echo, logprobs"):
        ids = completions.create(prompt="The capital of France is", extra_body={"return_token_ids": True}, **greedy)
        prompt = ids.choices[0].model_extra["prompt_token_ids"]
        batch = completions.create(prompt=[prompt, prompt[:3]], echo=True, logprobs=1, **greedy | {"max_tokens": 1})
        off = completions.create(
            prompt=[prompt, prompt[:3]], echo=True, logprobs=1, extra_body=PLAIN, **greedy | {"max_tokens": 1}
        )
        expect([choice.index for choice in batch.choices] == [0, 1], "two choices")
        for choice, tokens in zip(batch.choices, [prompt, prompt[:3]], strict=True):
            scores, offsets = choice.logprobs.token_logprobs, choice.logprobs.text_offset
            expect(len(scores) == len(tokens) + 1 and scores[0] is None, "a score for each token but the first")
            spans = [choice.text[a:b] for a, b in pairwise([*offsets, len(choice.text)])]
            expect(spans == choice.logprobs.tokens, f"offsets cut the text into its tokens: {spans}")
        same = [choice.logprobs for choice in batch.choices] == [choice.logprobs for choice in off.choices]
        expect(same, "same likelihoods with speculation off")

    with checks("completions: streamed, stop"):
        whole = completions.create(prompt="1, 2, 3, 4,", stop=["9"], **greedy)
        stream = list(completions.create(prompt="1, 2, 3, 4,", stop=["9"], stream=True, **greedy))
        expect("".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text, "the same text")
        expect(whole.choices[0].finish_reason in ("stop", "length") and "9" not in whole.choices[0].text, whole)

    with checks("responses: whole and streamed"):
        asked = {"model": checks.model, "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 24}
        whole = responses.create(**asked)
        events = list(responses.create(**asked, stream=True))
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        expect(whole.output_text and deltas == whole.output_text == events[-1].response.output_text, (deltas, whole))
        expect(
            [event.sequence_number for event in events] == sorted({e.sequence_number for e in events}), "numbers rise"
        )
        with responses.stream(**asked) as stream:
            stream.until_done()
            # get_final_response() takes only `completed`; this one may end as `incomplete`, by its length
        expect(whole.usage.output_tokens > 0 and whole.usage.total_tokens > whole.usage.output_tokens, whole.usage)

    with checks("responses: conversation, json_schema, parse"):
        form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
        made = responses.create(model=checks.model, input=ASK_PERSON, text=form, temperature=0, max_output_tokens=100)
        expect(set(json.loads(made.output_text)) == {"name", "age"}, made.output_text)
        parsed = responses.parse(
            model=checks.model, input=ASK_PERSON, text_format=Person, temperature=0, max_output_tokens=100
        )
        expect(isinstance(parsed.output_parsed, Person), parsed.output_text)

    with checks("embeddings: base64 by default, and floats"):
        texts = ["a cat on the mat", "a cat on a mat", "the treaty was signed in 1648"]
        found = [each.embedding for each in client.embeddings.create(model=checks.model, input=texts).data]
        floats = client.embeddings.create(model=checks.model, input=texts[0], encoding_format="float").data[0].embedding
        expect(max(abs(a - b) for a, b in zip(found[0], floats, strict=True)) < 1e-6, "the same numbers")
        near, far = (sum(a * b for a, b in zip(found[0], other, strict=True)) for other in found[1:])
        expect(far < near <= 1.0001, f"a near text is nearer: {near}, {far}")

    with checks("timings"):
        made = chat.create(messages=QUESTION, **greedy)
        told = made.model_extra["timings"]
        expect(told["predicted_n"] == made.usage.completion_tokens, told)
        expect(told["prompt_n"] + told["cache_n"] == made.usage.prompt_tokens, told)

    with checks("fields nobody knows are named"):
        made = chat.create(messages=QUESTION, extra_body={"frobnicate": 1}, **greedy)
        expect(made.model_extra["ignored_fields"] == ["frobnicate"], made.model_extra)
        stats = made.model_extra["speculation"]
        expect(stats["num_accepted_tokens"] <= stats["num_draft_tokens"], stats)

    with checks("errors are the SDK's own"):
        _fails(NotFoundError, lambda: chat.create(messages=QUESTION, model="gpt-4"))
        _fails(BadRequestError, lambda: chat.create(messages=[], model=checks.model))
        _fails(BadRequestError, lambda: chat.create(messages=QUESTION, model=checks.model, temperature=-1))
        expect(get(f"{checks.root}/health")["status"] == "ready", "the server is well")

    checks.end()


def _counts(usage: CompletionUsage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


def _fails(kind: type[APIStatusError], call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        expect(error.body and error.body["message"], "an error body")
    else:
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    main()
