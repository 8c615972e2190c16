"""The target's tokenizer as files, so that a small model trained for it loads like any other model directory.

Files of a model directory are copied. The tokenizer of a GGUF file is written as tokenizer.json, together with the
control tokens that its encoder does not contain.
"""

from __future__ import annotations

import json

from tokenizers import decoders

from paceline.errors import UnsupportedModel
from paceline.models.load import LoadedModel
from paceline.text import gguf
from paceline.text.vocabulary import SPM_SPACE

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def tokenizer_files(model: LoadedModel) -> dict[str, bytes]:
    if model.kind == "gguf":
        return _from_gguf(model)
    return {name: (model.path / name).read_bytes() for name in COPIED_FILES if (model.path / name).is_file()}


def _from_gguf(model: LoadedModel) -> dict[str, bytes]:
    parts = gguf.read_parts(model.metadata)
    steps = [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    parts.encoder.decoder = decoders.ByteLevel() if parts.vocabulary.style == "bytes" else decoders.Sequence(steps)
    data = json.loads(parts.encoder.to_str())
    vocab = data["model"].get("vocab")
    if not isinstance(vocab, dict):
        raise UnsupportedModel(
            f"{model.path}: its tokenizer cannot be written as tokenizer.json; give the target as a directory"
        )
    added = {entry["content"]: entry for entry in data["added_tokens"]}
    for index, token in sorted(parts.control.items()):
        vocab[token.content] = index
        added[token.content] = {
            "id": index,
            "content": token.content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    data["added_tokens"] = sorted(added.values(), key=lambda entry: int(entry["id"]))
    settings = {**parts.names, "chat_template": parts.chat_template, "add_bos_token": bool(parts.prefix)}
    return {
        "tokenizer.json": json.dumps(data, ensure_ascii=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, ensure_ascii=False, indent=1) + "\n").encode(),
    }
