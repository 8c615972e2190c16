"""Routes that desktop clients look for: paths without /v1, llama.cpp's /props and /slots, LM Studio's list."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.llm import LLM
from paceline.server.aliases import ALIASES
from tests.server.api import HELLO, Api, serving

BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO, "max_tokens": 3, "seed": 1},
    "/completions": {"prompt": "abc", "max_tokens": 3, "seed": 1},
    "/embeddings": {"input": "abc"},
    "/responses": {"input": "abc", "max_output_tokens": 3, "seed": 1},
}


def said(answer: Any) -> Any:
    """An answer without what differs from one to the next."""
    fleeting = ("id", "created", "created_at", "timings", "speculation", "usage", "output")
    return {name: value for name, value in answer.items() if name not in fleeting}


def test_the_version_may_be_left_out(api: Api) -> None:
    assert {*BODIES, "/models"} == ALIASES
    for path, body in BODIES.items():
        short, long = api.post(path, body), api.post(f"/v1{path}", body)
        assert short.status_code == 200, short.text
        assert said(short.json()) == said(long.json())
    assert api.get("/models").json() == api.get("/v1/models").json()
    assert api.refused("/chat/completions", {"messages": []})["param"] == "messages"


def test_keys_and_rates_are_the_same_there(llm: LLM) -> None:
    with serving(llm, api_keys=("secret",)) as api:
        for path in ("/props", "/slots", "/models", "/api/v0/models"):
            assert api.get(path).status_code == 401
        for path in (*BODIES, "/infill"):
            assert api.post(path, BODIES.get(path, {})).status_code == 401
    with serving(llm, requests_per_minute_per_key=1) as api:
        assert api.post("/v1/completions", BODIES["/completions"]).status_code == 200
        assert api.post("/completions", BODIES["/completions"]).status_code == 429


@pytest.mark.parametrize("path", ["/v1/props", "/chat", "/completions/x", "/v1/v1/models"])
def test_no_other_path_is_taken_for_one(api: Api, path: str) -> None:
    assert api.get(path).status_code == 404


def test_props_and_slots(api: Api, llm: LLM) -> None:
    props = api.get("/props").json()
    slots = api.get("/slots").json()
    context = llm.parts.memory.max_context
    assert props["total_slots"] == len(slots) == llm.engine.max_sequences
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"] == context
    assert props["default_generation_settings"]["params"]["temperature"] == llm.default_sampling.temperature
    assert props["chat_template"] == llm.tokenizer.chat_template
    assert (props["model_alias"], props["model_path"]) == ("tiny", "tiny"), "no place on the disk is told"
    assert not any(slot["is_processing"] for slot in slots)


def test_lm_studio_finds_the_model(api: Api) -> None:
    [model] = api.get("/api/v0/models").json()["data"]
    assert (model["id"], model["arch"], model["state"], model["type"]) == ("tiny", "llama", "loaded", "llm")
    assert api.get("/api/v0/models/tiny").json() == model
    assert api.get("/api/v0/models/other").status_code == 404
