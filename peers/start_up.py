"""Seconds from the start of Python to the first token, of a random checkpoint of a known shape, by stage.

    python -m peers.start_up --shape llama-3.1-8b --folder /tmp/checkpoint

The checkpoint is written once (16 GB for 8B) and stays. Then two processes load it: one with an empty cache of kernels,
and one with the cache of the first. The operating system has the file in its memory both times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16"}
LOAD = """
import logging, time
began = time.perf_counter()
logging.basicConfig(level=logging.DEBUG, format="%(message)s")
logging.getLogger().setLevel(logging.WARNING)
logging.getLogger("paceline").setLevel(logging.DEBUG)
from paceline.llm import LLM
from paceline.types import SamplingParams
imported = time.perf_counter()
llm = LLM({folder!r}, device="cuda", drafter={drafters!r})
loaded = time.perf_counter()
llm.generate("a", SamplingParams(max_tokens=1, temperature=0))
print(f"imports {{imported - began:.1f}} s, loading {{loaded - imported:.1f}} s, first token "
      f"{{time.perf_counter() - loaded:.2f}} s; graphs: {{llm.parts.prepared}}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="one of paceline/models/shapes.py, of the kind Llama")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--drafter", action="append", default=[])
    args = parser.parse_args()
    if not (args.folder / "tokenizer.json").exists():
        write(args.shape, args.folder)
    with tempfile.TemporaryDirectory() as kernels:
        for cache in ("cold", "warm"):
            print(f"{cache} cache of kernels:", flush=True)
            code = LOAD.format(folder=str(args.folder), drafters=args.drafter)
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_CACHE_DIR": kernels})
            print(f"{cache}: {time.perf_counter() - began:.1f} s in all", flush=True)


def write(shape: str, folder: Path) -> None:
    """Write config, random weights of bf16 and a tokenizer of bytes."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from paceline.models.shapes import shape_config
    from paceline.models.tensor_names import HUGGING_FACE, expected_shapes

    began, config = time.perf_counter(), shape_config(shape)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    names = {HUGGING_FACE.canonical(name, config): name for name in _names(config.num_layers)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {
        names[canonical]: (torch.randn(size, device=device) * 0.02).to(torch.bfloat16).cpu()
        for canonical, size in expected_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    print(f"wrote {folder} in {time.perf_counter() - began:.1f} s", flush=True)


def _names(layers: int) -> list[str]:
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    )
    inner = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    return ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *inner]


if __name__ == "__main__":
    main()
