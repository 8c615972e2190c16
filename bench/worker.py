"""One system under measurement, alone in its process, driven by JSON lines.

The driver writes `{"prompt": …, "tokens": n}` to stdin; the worker generates n tokens greedily, ignoring the end of the
sequence, and answers `{"tokens", "decode_s", "text", "drafted", "accepted"}` on stdout, where `decode_s` runs from the
first token to the last: prefill is not in it, so speed is (tokens - 1) / decode_s. The first line out is
`{"version": …}`, written when the model is loaded. Between requests the worker blocks on stdin and uses no CPU.

Runs under any interpreter that has the system installed; imports nothing of the driver.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Generate = Callable[[str, int], dict[str, Any]]


def paceline(*, model: str, threads: int, drafter: str | None = None, max_draft: int | None = None) -> Generate:
    from paceline.llm import LLM
    from paceline.types import SamplingParams, Speculation

    llm = LLM(model, drafter=drafter, threads=threads)
    speculation = Speculation(enabled=drafter is not None, max_draft=max_draft)

    def generate(prompt: str, tokens: int) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        text, count, times, stats = "", 0, [], None
        for event in llm.stream(prompt, sampling, speculation=speculation):
            if event.tokens:
                times.append(time.perf_counter())
                count += len(event.tokens)
            text += event.text
            stats = event.stats or stats
        assert stats is not None, "the last event carries the statistics"
        return answer(count, times[-1] - times[0], text, drafted=stats.drafted, accepted=stats.accepted)

    return generate


def llamacpp(
    *, model: str, threads: int, drafter: str | None = None, max_draft: int = 3, p_min: float = 0.0
) -> Generate:
    """`drafter`: the path of a model, `ngram` for lookup in prompt and output, or none."""
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 4096, 1, 0
    params.cache_ram_mib, params.verbosity = 0, 0
    draft = params.speculative.draft
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads = threads
    if drafter == "ngram":
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, max_draft
    elif drafter is not None:
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path, draft.n_gpu_layers, draft.n_max, draft.p_min = drafter, 0, max_draft, p_min
    server = llama.Server(params)

    def generate(prompt: str, tokens: int) -> dict[str, Any]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        reply = server.handle_completions(asked)
        reply = json.loads(reply) if isinstance(reply, str) else reply
        if "timings" not in reply:
            raise RuntimeError(f"llama.cpp refused: {reply}")
        timings, text = reply["timings"], reply["choices"][0]["text"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        seconds = timings["predicted_ms"] / 1000  # counted from the first token
        return answer(timings["predicted_n"], seconds, text, drafted=drafted, accepted=accepted)

    return generate


def openvino(
    *, model: str, threads: int, drafter: str | None = None, max_draft: int = 5, dynamic: bool = False
) -> Generate:
    """`drafter`: `ngram` for prompt lookup, or none. `dynamic`: quantise activations, OpenVINO's own default."""
    import openvino_genai

    group = {} if dynamic else {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    lookup = {"prompt_lookup": True} if drafter == "ngram" else {}
    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **group, **lookup)

    def generate(prompt: str, tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, apply_chat_template=False)
        if drafter == "ngram":
            config.num_assistant_tokens, config.max_ngram_size = max_draft, 3
        result = pipeline.generate([prompt], config)
        metrics = result.perf_metrics
        seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1000
        seconds -= metrics.get_detokenization_duration().mean / 1000
        return answer(metrics.get_num_generated_tokens(), seconds, result.texts[0])

    return generate


def answer(tokens: int, decode_s: float, text: str, *, drafted: int = 0, accepted: int = 0) -> dict[str, Any]:
    return {"tokens": tokens, "decode_s": decode_s, "text": text, "drafted": drafted, "accepted": accepted}


KINDS: dict[str, Callable[..., Generate]] = {"paceline": paceline, "llamacpp": llamacpp, "openvino": openvino}
PACKAGES = {"paceline": "paceline", "llamacpp": "xllamacpp", "openvino": "openvino-genai"}


def version(kind: str) -> str:
    try:
        return importlib.metadata.version(PACKAGES[kind])
    except importlib.metadata.PackageNotFoundError:
        return "of the working tree"


def claim_stdout() -> TextIO:
    """The driver's line out; whatever the libraries print goes to stderr instead."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lines


def serve(*, kind: str, options: Mapping[str, Any]) -> None:
    out = claim_stdout()
    generate = KINDS[kind](**options)
    print(json.dumps({"version": version(kind)}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(generate(request["prompt"], request["tokens"])), file=out)


if __name__ == "__main__":
    serve(kind=sys.argv[1], options=json.loads(sys.argv[2]))
