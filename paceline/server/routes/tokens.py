"""/tokenize and /detokenize: from text to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.errors import InvalidRequest
from paceline.server.dialects import ERRORS
from paceline.server.protocol.answers import Detokenized, Tokenized
from paceline.server.protocol.requests import DetokenizeRequest, TokenizeRequest, ignored, listed
from paceline.server.routes.common import ParsedRoute, translator_of
from paceline.server.translate.encoding import check_bytes, off_loop
from paceline.server.translate.translator import Translator

router = APIRouter(route_class=ParsedRoute, tags=["Tokens"], responses=ERRORS)


@router.post("/tokenize", summary="Token ids of a text or a conversation", response_model=Tokenized)
async def tokenize(body: TokenizeRequest, http: Request) -> Response:
    translator = replace(translator_of(http), bounded=False)
    translator.check_model(body.model)
    tokens = await _encode(body, translator)
    content = await off_loop(lambda: _answer(body, translator, tokens), size=len(tokens))
    return Response(content, media_type="application/json")


@router.post("/detokenize", summary="The text of token ids", response_model_exclude_none=True)
async def detokenize(body: DetokenizeRequest, http: Request) -> Detokenized:
    translator = translator_of(http)
    translator.check_model(body.model)
    tokenizer = translator.llm.tokenizer
    for token in body.tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise InvalidRequest(
                f"token {token} is outside of the vocabulary: 0 to {tokenizer.vocab_size - 1}", param="tokens"
            )
    text = tokenizer.decode(body.tokens, skip_special=False)
    return Detokenized(prompt=text, ignored_fields=listed(ignored(body)) or None)


async def _encode(body: TokenizeRequest, translator: Translator) -> Sequence[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    check_bytes(body.prompt or body.messages, allowed=translator.settings.max_tokenize_bytes, field=_field(body))
    if body.messages is not None:
        if body.parse_special:
            raise InvalidRequest(
                "parse_special is for a prompt; in messages control tokens stay text", param="parse_special"
            )
        begins = body.add_generation_prompt is not False
        return await translator.encode_messages(body.messages, add_generation_prompt=begins)
    assert body.prompt is not None
    framed, special = body.add_special_tokens is not False, bool(body.parse_special)
    return await translator.encode_text(body.prompt, framed=framed, special=special)


def _field(body: TokenizeRequest) -> str:
    return "prompt" if body.messages is None else "messages"


def _answer(body: TokenizeRequest, translator: Translator, tokens: Sequence[int]) -> str:
    tokenizer = translator.llm.tokenizer
    return Tokenized.model_construct(  # a million ids need no check
        count=len(tokens),
        max_model_len=translator.max_context,
        tokens=list(tokens),
        token_strs=[tokenizer.id_to_token(token) or "" for token in tokens] if body.return_token_strs else None,
        ignored_fields=listed(translator.ignored(body)) or None,
    ).model_dump_json(exclude_none=True)
