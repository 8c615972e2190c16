"""Writes a tiny transformers model as a GGUF file the way llama.cpp's converter would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma3": "gemma3"}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Any, path: Path, *, kind: Kind = Kind.F32) -> None:
    """Matrices are written as `kind`, and put back into the model as what `kind` made of them."""
    config = model.config
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    architecture = ARCHITECTURES[prefix]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config, architecture)
    for name, weight in model.named_parameters():
        data = weight.detach().clone()
        if data.dim() == 2 and kind != Kind.F32:
            packed = gguf.quants.quantize(data.numpy(), kind)
            with torch.no_grad():
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
        _write_tensor(writer, config, architecture, name, data, kind)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma3":
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(config.vocab_size - 1)] + ["<|im_end|>"])
    writer.add_array("tokenizer.ggml.token_type", [1] * (config.vocab_size - 1) + [3])


def _write_tensor(
    writer: gguf.GGUFWriter, config: Any, architecture: str, name: str, data: torch.Tensor, kind: Kind
) -> None:
    stem, suffix = name.rsplit(".", 1)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if match:
        part = PARTS[match[2]]
        if architecture == "gemma3" and match[2] == "post_attention_layernorm":
            part = "post_attention_norm"
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            data = data.view(heads, 2, -1, *data.shape[1:]).transpose(1, 2).reshape(data.shape)
        stem = f"blk.{match[1]}.{part}"
    else:
        stem = TOP[stem]
    if architecture == "gemma3" and stem.endswith("norm"):
        data = data + 1
    array = data.contiguous().numpy()
    if data.dim() == 1 or kind == Kind.F32:
        writer.add_tensor(f"{stem}.{suffix}", array)
    else:
        writer.add_tensor(f"{stem}.{suffix}", gguf.quants.quantize(array, kind), raw_dtype=kind)


def _llama3_factors(config: Any) -> np.ndarray:
    rope, half = config.rope_parameters, config.head_dim // 2
    factors = []
    for index in range(half):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / half)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
