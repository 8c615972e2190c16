"""Ollama's Python package: list, show, ps, chat, generate, tools, forms, options, errors.

python clients/with_ollama.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import asyncio
import json

from checks import ASK_PERSON, ASK_WEATHER, PERSON, QUESTION, WEATHER, Checks, expect
from ollama import AsyncClient, Client, ResponseError

GREEDY = {"temperature": 0, "num_predict": 24}


def main() -> None:
    checks = Checks("ollama")
    client = Client(host=checks.root, timeout=120)
    name = f"{checks.model}:latest"

    with checks("list, show, ps"):
        [model] = client.list().models
        expect(model.model == name and model.size > 0 and model.details.parameter_size, model)
        shown = client.show(checks.model)
        context = shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"]
        expect(context > 0 and "tools" in shown.capabilities and shown.template, shown.capabilities)
        [running] = client.ps().models
        expect(running.model == name and running.context_length == context, running)

    with checks("chat: same text plain, speculative, streamed, asynchronous"):
        whole = client.chat(name, messages=QUESTION, options=GREEDY)
        plain = client.chat(name, messages=QUESTION, options=GREEDY | {"draft_num_predict": 0})
        chunks = list(client.chat(checks.model, messages=QUESTION, options=GREEDY, stream=True))
        text = "".join(chunk.message.content for chunk in chunks)
        expect(text and text == whole.message.content == plain.message.content, (text, whole.message.content))
        expect([chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True], "one end")
        counts = chunks[-1].eval_count, chunks[-1].prompt_eval_count
        expect(counts == (whole.eval_count, whole.prompt_eval_count) and whole.eval_duration > 0, whole)
        expect(asyncio.run(_later(checks, name)) == text, "the same, asynchronous")

    with checks("generate: prompt, system, raw"):
        asked = client.generate(name, prompt=QUESTION[0]["content"], options=GREEDY)
        expect(asked.response == client.chat(name, messages=QUESTION, options=GREEDY).message.content, asked.response)
        brief = client.generate(name, prompt="Hello", system="You are brief.", options=GREEDY, stream=True)
        expect("".join(chunk.response for chunk in brief), "an answer")
        raw = client.generate(name, prompt="1, 2, 3, 4,", raw=True, options=GREEDY | {"stop": ["9"]})
        expect(raw.response and "9" not in raw.response, raw.response)

    with checks("chat: a call may come, and its result goes back"):
        called = client.chat(name, messages=ASK_WEATHER, tools=[WEATHER], options=GREEDY | {"num_predict": 60})
        call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
        turn = [{"role": "assistant", "content": "", "tool_calls": called.message.tool_calls or [call]}]
        turn += [{"role": "tool", "content": "21 degrees, sunny", "tool_name": "get_weather"}]
        answered = client.chat(name, messages=[*ASK_WEATHER, *turn], tools=[WEATHER], options=GREEDY)
        expect(answered.done, answered)

    with checks("forms: json, schema"):
        long = GREEDY | {"num_predict": 100}
        made = client.chat(name, messages=ASK_PERSON, format=PERSON, options=long).message.content
        expect(set(json.loads(made)) == {"name", "age"}, made)
        made = client.generate(name, prompt="A person, as JSON", format="json", options=long | {"num_predict": 200})
        if made.done_reason == "stop":
            json.loads(made.response)

    with checks("seeds"):
        sampled = {"temperature": 1.0, "seed": 7, "num_predict": 12}
        first = client.chat(name, messages=QUESTION, options=sampled).message.content
        again = client.chat(name, messages=QUESTION, options=sampled | {"draft_num_predict": 0}).message.content
        expect(first == again, (first, again))

    with checks("load, unload"):
        expect(client.generate(name, prompt="").done_reason == "load", "load")
        expect(client.generate(name, prompt="", keep_alive=0).done_reason == "unload", "unload")
        expect(client.chat(name, messages=QUESTION, options=GREEDY).done, "it answers afterwards")

    with checks("errors are the package's own"):
        _fails(404, client, "llama3", QUESTION)
        _fails(400, client, name, [{"role": "user", "content": "x", "images": [b"no image"]}])

    checks.end()


async def _later(checks: Checks, name: str) -> str:
    stream = await AsyncClient(host=checks.root).chat(name, messages=QUESTION, options=GREEDY, stream=True)
    return "".join([chunk.message.content async for chunk in stream])


def _fails(status: int, client: Client, model: str, messages: list[dict[str, object]]) -> None:
    try:
        client.chat(model, messages=messages)
    except ResponseError as error:
        expect(error.status_code == status and error.error, error)
    else:
        raise AssertionError(f"no {status}")


if __name__ == "__main__":
    main()
