"""LiteLLM, as its `openai/` provider.

python clients/with_litellm.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

from checks import ASK_PERSON, ASK_WEATHER, KEY, PERSON, QUESTION, WEATHER, Checks, expect
from litellm import acompletion, completion, text_completion
from litellm.exceptions import BadRequestError, NotFoundError

SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def main() -> None:
    checks = Checks("litellm")
    server = {"model": f"openai/{checks.model}", "api_base": checks.url, "api_key": KEY, "num_retries": 0}
    greedy = server | {"temperature": 0, "max_tokens": 24}

    with checks("chat: same text whole, streamed and plain"):
        whole = completion(messages=QUESTION, **greedy)
        chunks = list(completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **greedy))
        plain = completion(messages=QUESTION, extra_body={"speculation": {"enabled": False}}, **greedy)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        text = whole.choices[0].message.content
        expect(text and text == streamed == plain.choices[0].message.content, f"{text!r}, {streamed!r}")
        expect(chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, "usage in the last chunk")

    with checks("chat: eight at once"):

        async def eight() -> set[str]:
            answers = await asyncio.gather(*(acompletion(messages=QUESTION, **greedy) for _ in range(8)))
            return {answer.choices[0].message.content for answer in answers}

        expect(asyncio.run(eight()) == {text}, "the same text in company")

    with checks("chat: logprobs, n"):
        made = completion(messages=QUESTION, logprobs=True, top_logprobs=2, n=2, **greedy)
        expect(len(made.choices) == 2 and all(c.logprobs["content"] for c in made.choices), made)

    with checks("chat: tools, whole and streamed"):
        asked = greedy | {"max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"}
        [call] = completion(messages=ASK_WEATHER, **asked).choices[0].message.tool_calls
        expect(set(json.loads(call.function.arguments)) == {"city"}, call)
        parts = [chunk.choices[0].delta.tool_calls for chunk in completion(messages=ASK_WEATHER, stream=True, **asked)]
        arguments = "".join(part[0].function.arguments for part in parts if part)
        expect(json.loads(arguments) == json.loads(call.function.arguments), arguments)

    with checks("chat: json_schema"):
        made = completion(messages=ASK_PERSON, response_format=SCHEMA, **greedy | {"max_tokens": 100})
        expect(set(json.loads(made.choices[0].message.content)) == {"name", "age"}, made)

    with checks("completions"):
        server_text = greedy | {"model": f"text-completion-openai/{checks.model}"}
        expect(text_completion(prompt="Once upon a time", **server_text).choices[0].text, "a text")

    with checks("errors are its own"):
        for kind, wrong in ((NotFoundError, {"model": "openai/gpt-4"}), (BadRequestError, {"temperature": -1})):
            try:
                completion(messages=QUESTION, **greedy | wrong)
            except kind:
                continue
            raise AssertionError(f"no {kind.__name__}")

    checks.end()


if __name__ == "__main__":
    main()
