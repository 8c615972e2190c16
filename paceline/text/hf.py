"""A tokenizer from a model directory, as Hugging Face publishes them. These files are read:

    tokenizer.json                          the tokens, and how text is cut
    tokenizer_config.json                   which token is bos or eos, whether they are added
    special_tokens_map.json                 names of special tokens that tokenizer_config.json leaves out
    generation_config.json or config.json   further tokens that end an answer
    chat_template.jinja, chat_template.json or tokenizer_config.json   the chat template

Nothing is downloaded, and no code of the directory is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from paceline.errors import ModelFileError, UnsupportedModel
from paceline.text.steps import steps
from paceline.text.vocabulary import TokenizerParts, Vocabulary

MAX_ID = 10_000_000  # bound of ids, far above any vocabulary; a larger one is an error that would cost much memory
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

Json = dict[str, Any]


def read_parts(path: Path) -> TokenizerParts:
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    encoder = _read_encoder(path / "tokenizer.json")
    frame = _post_processor_frame(encoder)
    encoder.post_processor = None  # Tokenizer.encode frames the text instead
    _add_missing_tokens(encoder, config)
    names = {name: text for name in _NAMES if (text := _content(config.get(name), name)) is not None}
    ids = {name: encoder.token_to_id(text) for name, text in names.items()}
    control = _control_tokens(encoder, names)
    encoder.encode_special_tokens = True
    prefix, suffix = _frame(config, frame, ids)
    vocabulary = _vocabulary(encoder, control)
    if not all(token_id < len(vocabulary) for token_id in prefix + suffix):
        raise ModelFileError(
            f"tokenizer.json frames text by the tokens {prefix + suffix}, but has only {len(vocabulary)}"
        )
    return TokenizerParts(
        vocabulary=vocabulary,
        encoder=encoder,
        inner_encoder=_inner_encoder(encoder),
        control=control,
        prefix=prefix,
        suffix=suffix,
        bos_id=ids.get("bos_token"),
        eos_ids=tuple(dict.fromkeys([*_known(ids.get("eos_token")), *_generation_eos(path)])),
        chat_template=_chat_template(path, config),
        names=names,
    )


# ── tokenizer.json ──


def _read_encoder(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ModelFileError(f"{file.parent} has no tokenizer.json; save the model's fast tokenizer into it")
    try:
        encoder = tokenizers.Tokenizer.from_str(_read_text(file))
    except ModelFileError:
        raise
    except Exception as error:  # the tokenizers package raises no narrower one
        raise ModelFileError(f"{file} cannot be read as a tokenizer: {error}") from error
    if not isinstance(encoder.model, models.BPE):
        kind = type(encoder.model).__name__
        raise UnsupportedModel(f"{file} holds a tokenizer of kind {kind}; Paceline reads BPE (GPT, Llama, Qwen, Gemma)")
    encoder.no_truncation()
    encoder.no_padding()
    encoder.model.dropout = None
    return encoder


def _add_missing_tokens(encoder: tokenizers.Tokenizer, config: Json) -> None:
    """Add tokens that only tokenizer_config.json names. Their ids must come out as written there."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise ModelFileError("added_tokens_decoder in tokenizer_config.json must map ids to tokens")
    for token_id, token in sorted(((_integer(key), token) for key, token in listed.items()), key=lambda item: item[0]):
        text = _content(token, f"added_tokens_decoder[{token_id}]")
        if text and encoder.token_to_id(text) is None:
            flags = {name: bool(token.get(name)) for name in ("lstrip", "rstrip", "single_word", "special")}
            encoder.add_tokens([AddedToken(text, normalized=False, **flags)])
        if text and encoder.token_to_id(text) != token_id:
            found = encoder.token_to_id(text)
            raise ModelFileError(
                f"tokenizer_config.json calls token {token_id} {text!r}, tokenizer.json calls it {found}"
            )


def _control_tokens(encoder: tokenizers.Tokenizer, names: Mapping[str, str]) -> dict[int, AddedToken]:
    added = encoder.get_added_tokens_decoder()
    control = {token_id: token for token_id, token in added.items() if token.special and token.content}
    for name, text in names.items():
        token_id = encoder.token_to_id(text)
        if token_id is None and name in ("bos_token", "eos_token"):
            raise ModelFileError(f"tokenizer_config.json names {text!r} as {name}, which tokenizer.json does not hold")
        if token_id is not None and text:
            control.setdefault(token_id, AddedToken(text, normalized=False, special=True))
    return control


def _vocabulary(encoder: tokenizers.Tokenizer, control: Mapping[int, AddedToken]) -> Vocabulary:
    ids = encoder.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if not 0 < size <= MAX_ID:
        raise ModelFileError(
            f"tokenizer.json has ids up to {size - 1}; allowed are 0 to {MAX_ID - 1}, and at least one"
        )
    tokens = [""] * size
    for token, token_id in ids.items():
        tokens[token_id] = token
    special = frozenset(control)
    decoders = list(steps(encoder.decoder, "decoders"))
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        added = frozenset(encoder.get_added_tokens_decoder())
        return Vocabulary(tuple(tokens), special, literal=special | added, style="bytes")
    if kinds & {"Metaspace", "ByteFallback"}:
        leading = any(_takes_leading_space(decoder) for decoder in decoders)
        return Vocabulary(tuple(tokens), special, literal=special, style="spm", leading_space=leading)
    raise UnsupportedModel(
        f"tokenizer.json decodes by {sorted(kinds)}; Paceline knows ByteLevel, Metaspace, ByteFallback"
    )


def _takes_leading_space(decoder: Json) -> bool:
    if decoder["type"] == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return bool(decoder["type"] == "Strip" and decoder.get("content") == " " and decoder.get("start", 0) > 0)


def _inner_encoder(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Make the encoder for text after a control token: some models put a space only before the first text."""
    found = list(steps(encoder.pre_tokenizer, "pretokenizers"))
    if not any(step["type"] == "Metaspace" and step.get("prepend_scheme") == "first" for step in found):
        return encoder
    if len(found) > 1:
        raise UnsupportedModel("tokenizer.json combines Metaspace 'first' with other pre-tokenizers; Paceline does not")
    inner = tokenizers.Tokenizer.from_str(encoder.to_str())
    inner.encode_special_tokens = True
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=found[0]["replacement"], prepend_scheme="never", split=found[0].get("split", True)
    )
    return inner


# ── which tokens frame a text, which end it ──

Frame = tuple[tuple[int, ...], tuple[int, ...]]


def _post_processor_frame(encoder: tokenizers.Tokenizer) -> Frame:
    """Find the ids that tokenizer.json puts before and after a text."""
    for step in steps(encoder.post_processor, "processors"):
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            return (step["cls"][1],), (step["sep"][1],)
        if step["type"] == "TemplateProcessing":
            return _template_frame(step["single"], step["special_tokens"])
    return (), ()


def _template_frame(pieces: list[Json], tokens: Json) -> Frame:
    """Find the ids before and after the text in `pieces`: special tokens by name, and the text between them."""
    sides: list[list[int]] = [[]]
    for piece in pieces:
        if "Sequence" in piece:
            sides.append([])
        elif (name := piece["SpecialToken"]["id"]) in tokens:
            sides[-1] += tokens[name]["ids"]
        else:
            raise ModelFileError(f"the post-processor in tokenizer.json uses {name!r:.60}, which it does not define")
    return tuple(sides[0]), tuple(sides[-1]) if len(sides) > 1 else ()


def _frame(config: Json, frame: Frame, ids: Mapping[str, int | None]) -> Frame:
    """Choose the ids around a text: those of tokenizer.json, or if it has none those of tokenizer_config.json."""
    if frame != ((), ()):
        return frame
    prefix = _known(ids.get("bos_token")) if config.get("add_bos_token") is True else ()
    suffix = _known(ids.get("eos_token")) if config.get("add_eos_token") is True else ()
    return prefix, suffix


def _known(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _generation_eos(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and 0 <= token_id < MAX_ID for token_id in ids):
            raise ModelFileError(f"eos_token_id in {path / name} is {value!r:.60}; it must be an id or a list of ids")
        if ids:
            return ids
    return []


# ── chat template ──


def _chat_template(path: Path, config: Json) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"the chat template in {path} must be a string, not {type(template).__name__}")
    return template


# ── files ──


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{file} is not valid UTF-8 at byte {error.start}") from None


def _read_json(file: Path) -> Json:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _content(token: object, name: str) -> str | None:
    """Read the text of a token, which the file writes as a string, or as an object with text and flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ModelFileError(f"{name} in tokenizer_config.json must be a string, not {type(text).__name__}")
    return text


def _integer(key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise ModelFileError(
            f"added_tokens_decoder in tokenizer_config.json names the id {key!r:.40}, which is no number"
        )
    return int(key)
