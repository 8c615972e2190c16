"""The systems that are measured: each is a function that loads a model and returns a function that answers prompts.

    open_llamacpp(model=…, threads=2)([[1, 4093, …], …], 64)  ->  answers to all prompts, made at the same time

Prompts are token ids, the same for every system; an answer is token ids or text, whichever the system returns, without
the end token. All decode greedily until the model's end token. Prefix caches are off. A system is imported within its
function, because an environment has only some of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.models.weights import Format

MAX_AT_ONCE = 8  # prompts
CONTEXT_TOKENS = 2048  # prompt and answer together
END_TOKEN = 2  # <|im_end|> of SmolLM2


@dataclass(frozen=True, slots=True)
class SystemAnswer:
    tokens: int
    said: Sequence[int] | str
    drafted: int = 0
    accepted: int = 0


Prompts = Sequence[Sequence[int]]
System = Callable[[Prompts, int], list[SystemAnswer]]


def open_paceline(*, model: str, threads: int, drafter: str | None = None, format: Format = "auto") -> System:
    """`drafter`: `default` for Paceline's default drafters, or none."""
    from paceline.llm import LLM
    from paceline.types import SamplingParams

    llm = LLM(model, format=format, drafter=None if drafter == "default" else [], threads=threads, prefix_cache=False)

    def answer(prompts: Prompts, tokens: int) -> list[SystemAnswer]:
        made = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens))
        stats = [each.stats for each in made]
        return [_ids(each.tokens, drafted=s.drafted, accepted=s.accepted) for each, s in zip(made, stats, strict=True)]

    return answer


def open_llamacpp(
    *,
    model: str,
    threads: int,
    drafter: str | None = None,
    options: Mapping[str, int] | None = None,
    at_once: int = MAX_AT_ONCE,
    context: int = CONTEXT_TOKENS,
) -> System:
    """`drafter`: one of llama.cpp's own that needs no model, such as `ngram_simple`; `options`: its options.
    `context`: tokens of each of `at_once` prompts and its answer."""
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = at_once * context, at_once, 0
    params.cache_ram_mib, params.verbosity = 0, 0
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = threads
    if drafter is not None:
        params.speculative.types = [
            getattr(llama.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{drafter.upper()}")
        ]
        for name, value in (options or {}).items():
            setattr(getattr(params.speculative, drafter), name, value)
    server = llama.Server(params)
    clients = ThreadPoolExecutor(MAX_AT_ONCE)

    def one(prompt: Sequence[int], tokens: int) -> SystemAnswer:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        reply = server.handle_completions(asked)
        reply = json.loads(reply) if isinstance(reply, str) else reply
        if "timings" not in reply:
            raise RuntimeError(f"llama.cpp refused: {reply}")
        timings, [choice] = reply["timings"], reply["choices"]
        count = timings["predicted_n"] - (choice["finish_reason"] == "stop")  # the end token is counted there
        drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return SystemAnswer(count, choice["text"], drafted=drafts[0], accepted=drafts[1])

    def answer(prompts: Prompts, tokens: int) -> list[SystemAnswer]:
        return list(clients.map(lambda prompt: one(prompt, tokens), prompts))

    return answer


def open_openvino(*, model: str, threads: int, drafter: str | None = None, dynamic: bool = True) -> System:
    """`drafter`: `lookup`, or none. `dynamic`: quantise activations, OpenVINO's own default."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.max_num_seqs = False, MAX_AT_ONCE
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if not dynamic:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    if drafter == "lookup":
        properties["prompt_lookup"] = True
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def answer(prompts: Prompts, tokens: int) -> list[SystemAnswer]:
        config = genai.GenerationConfig(max_new_tokens=tokens, eos_token_id=END_TOKEN, stop_token_ids={END_TOKEN})
        if drafter == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        asked = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [_ids(made.m_generation_ids[0]) for made in pipeline.generate(asked, [config] * len(asked))]

    return answer


def open_transformers(*, model: str, threads: int, drafter: str | None = None, dtype: str = "bfloat16") -> System:
    """`drafter`: `lookup`, which takes one prompt at a time, or none."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    lookup = {"prompt_lookup_num_tokens": 10} if drafter == "lookup" else {}

    def answer(prompts: Prompts, tokens: int) -> list[SystemAnswer]:
        longest = max(map(len, prompts))
        padded = torch.tensor([[END_TOKEN] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = network.generate(padded, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **lookup)
        return [_ids(row[longest:]) for row in made.tolist()]

    return answer


def open_vllm(*, model: str, threads: int, drafter: str | None = None, max_draft: int = 4) -> System:
    """`drafter`: `ngram`, or none."""
    import os

    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}  # one process, GiB
    from vllm import LLM, SamplingParams

    lookup = {"method": drafter, "num_speculative_tokens": max_draft, "prompt_lookup_max": 4}
    engine = LLM(
        model=model, dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=CONTEXT_TOKENS, max_num_seqs=MAX_AT_ONCE, speculative_config=lookup if drafter else None,
        disable_log_stats=True,
    )  # fmt: skip  # a field a line would hide what belongs together

    def answer(prompts: Prompts, tokens: int) -> list[SystemAnswer]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, stop_token_ids=[END_TOKEN], detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [_ids(made.outputs[0].token_ids) for made in engine.generate(asked, sampling, use_tqdm=False)]

    return answer


def _ids(tokens: Sequence[int], *, drafted: int = 0, accepted: int = 0) -> SystemAnswer:
    """An answer of token ids, cut before the end token."""
    kept = list(tokens)
    kept = kept[: kept.index(END_TOKEN)] if END_TOKEN in kept else kept
    return SystemAnswer(len(kept), kept, drafted=drafted, accepted=accepted)


KINDS: Mapping[str, Callable[..., System]] = {
    "paceline": open_paceline,
    "llama.cpp": open_llamacpp,
    "openvino": open_openvino,
    "transformers": open_transformers,
    "vllm": open_vllm,
}
