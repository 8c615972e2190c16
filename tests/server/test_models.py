"""What is served, how it is, and what the server says of itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline import __version__
from paceline.llm import LLM
from paceline.rules import BUILT_IN
from paceline.server.banner import announce, chosen
from paceline.server.settings import Settings
from tests.cli.tiny_model import write_model
from tests.server.api import HELLO, MODEL, Api, serving


def test_models(api: Api) -> None:
    listed = api.get("/v1/models").json()
    [card] = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)  # Anthropic's fields
    assert (card["type"], card["display_name"], card["max_input_tokens"]) == ("model", MODEL, 256)
    assert card["created_at"].endswith("Z")
    assert card["id"] == MODEL
    assert card["max_model_len"] == 256
    assert api.get(f"/v1/models/{MODEL}").json() == card
    for name in ("other", "org/other", "%F0%9F%90%8D"):
        response = api.get(f"/v1/models/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_the_facts_of_the_model(api: Api, llm: LLM) -> None:
    [card] = api.get("/v1/models").json()["data"]
    facts, target, advice = card["meta"], llm.parts.target, llm.default_sampling
    assert facts["n_params"] == sum(part.parameters for part in target.parts) > 0
    assert facts["size"] == sum(facts["formats"].values()) > 0
    assert facts["bits_per_weight"] == round(8 * facts["size"] / facts["n_params"], 2)
    assert facts["n_ctx_train"] >= card["max_model_len"]
    assert (facts["n_vocab"], facts["n_embd"]) == (target.model.config.vocab_size, target.model.config.hidden_size)
    assert (facts["device"], facts["device_name"], facts["kernels"]) == ("cpu", "CPU", target.why)
    assert facts["drafters"] == {"ngram": llm.parts.drafters["ngram"].how}
    assert facts["default_sampling"] == {
        "temperature": advice.temperature,
        "top_p": advice.top_p,
        "top_k": advice.top_k,
    }


def test_state(api: Api) -> None:
    for path in ("/health", "/ready"):
        assert api.get(path).json() == {"status": "ready"}
    assert api.get("/version").json() == {"version": __version__}


def test_speculation_now(api: Api) -> None:
    before = api.get("/v1/speculation").json()
    assert before["drafters"] == {"ngram": None, "prediction": None}
    assert before["default_drafter"] == "ngram"
    assert before["how"].keys() == {"ngram"}
    assert before["rules"] == list(BUILT_IN)
    assert before["num_drafts"] == 0
    told = api.chat(temperature=0, allowed_token_ids=[70, 71], max_tokens=40)["speculation"]
    api.chat(speculation={"enabled": False})
    after = api.get("/v1/speculation").json()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert after[name] == told[name] > 0
    assert after["running"] == after["waiting"] == after["pages_held"] == 0
    assert after["output_tokens"] > before["output_tokens"]
    assert sum(after["off_reasons"].values()) >= 1


def test_a_bridge_is_said_wherever_a_user_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By /v1/speculation, by the facts of the model, and by the banner and the log of a server that starts."""
    (tmp_path / "drafter").mkdir()
    special = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|more|>")
    drafter = write_model(tmp_path / "drafter", special=special, context=128)
    (tmp_path / "target").mkdir()
    llm = LLM(str(write_model(tmp_path / "target")), drafter=f"model:{drafter}", format="fp32", measure_cost=False)
    with serving(llm) as api:
        told = [api.get("/v1/speculation").json()["how"], api.get("/v1/models").json()["data"][0]["meta"]["drafters"]]
    announce(facts := chosen(llm, "tiny", Settings()), Settings())
    announce(facts, Settings(log_json=True))
    for text in (*(each["model"] for each in told), facts["drafters"], capsys.readouterr().out):
        assert "another vocabulary, 256 tokens in common: 100% of the target's, and 100% of the tokens in text" in text
        assert "Expect fewer accepted tokens than from a model of the target's family" in text
        assert "drafts within its 128 tokens of context, the target has 256" in text


def test_tokens_there_and_back(api: Api, llm: LLM) -> None:
    text = "héllo <|im_end|>"
    made = api.post("/tokenize", {"prompt": text, "return_token_strs": True, "model": MODEL, "odd": 1}).json()
    assert made["tokens"] == llm.tokenizer.encode(text)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["ignored_fields"] == ["odd"]
    assert api.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = api.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert chat == list(llm.encode_chat(HELLO))
    shorter = api.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert chat[: len(shorter)] == shorter
    assert len(shorter) < len(chat)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "model": "other"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**31]}),
        ("/detokenize", {"tokens": [1.0]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {}),
    ],
    ids=str,
)
def test_bad_tokens(api: Api, path: str, body: dict[str, Any]) -> None:
    api.refused(path, body)


def test_the_openapi_document_is_whole(api: Api) -> None:
    document = api.get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    assert {reference.removeprefix("#/components/schemas/") for reference in references(document)} <= schemas.keys()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "4XX", "5XX"} <= responses.keys()
        assert "422" not in responses
        assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
    fields = schemas["ChatRequest"]["properties"]
    assert {"messages", "temperature", "speculation", "stop_token_ids", "return_token_ids"} <= fields.keys()


def test_nothing_else_is_here(api: Api) -> None:
    for path in ("/v1", "/v1/images", "/docs", "/redoc"):
        response = api.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
    response = api.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"]


def test_an_open_playground_does_not_fill_the_log(api: Api, log: io.StringIO) -> None:
    for path in ("/v1/speculation", "/playground/main.js", "/playground/nothing.js", "/v1/models"):
        api.get(path)
    assert [json.loads(line)["path"] for line in log.getvalue().splitlines()] == [
        "/playground/nothing.js",
        "/v1/models",
    ]
