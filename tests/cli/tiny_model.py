"""A model directory as small as a command can load: random Llama, byte-level tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 2, 64, 96, 4, 2, 16, 256
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(
    path: Path,
    *,
    template: str | None = TEMPLATE,
    seed: int = 0,
    special: tuple[str, ...] = SPECIAL,
    context: int = CONTEXT,
) -> Path:
    """`special`: control tokens; the first three are the end of a text and the marks of a turn."""
    vocab = _write_tokenizer(path, template, special)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 40}), encoding="utf-8")
    save_file(_weights(vocab, seed), path / "model.safetensors")
    return path


def _write_tokenizer(path: Path, template: str | None, special: tuple[str, ...]) -> int:
    """One token a byte, after the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*special, *letters))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[1], "add_bos_token": False}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return len(vocab)


def _weights(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (vocab, HIDDEN),
    }
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        shapes |= {
            f"{layer}.input_layernorm": (HIDDEN,),
            f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.post_attention_layernorm": (HIDDEN,),
            f"{layer}.mlp.gate_proj": (MLP, HIDDEN),
            f"{layer}.mlp.up_proj": (MLP, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, MLP),
        }
    random = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.2
        for name, shape in shapes.items()
    }
