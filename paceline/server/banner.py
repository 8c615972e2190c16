"""The banner of a server that starts: its model, drafters and limits, the reasons for them, and its URLs."""

from __future__ import annotations

import logging

from paceline import __version__
from paceline.kernels.base import PAGE_SIZE
from paceline.llm import LLM
from paceline.server import logs
from paceline.server.settings import Settings, is_local
from paceline.sizes import format_size

Facts = dict[str, str]


def chosen(llm: LLM, name: str, settings: Settings) -> Facts:
    """Describe what runs, and why."""
    parts, target = llm.parts, llm.parts.target
    memory, kv_tokens = parts.memory, parts.memory.num_pages * PAGE_SIZE
    kv_size = format_size(memory.num_pages * memory.page_bytes)
    drafters = [f"{drafter}: {made.how}" for drafter, made in parts.drafters.items()]
    exact = "the same bits whatever rides along" if parts.bitwise else "rounding may differ with the batch"
    return {
        "model": f"{name} ({target.why})",
        "device": target.device,
        "weights": ", ".join(f"{part.format} {format_size(part.bytes)}" for part in target.parts),
        "drafters": "; ".join(drafters) or "none: plain decoding",
        "bitwise": f"{'yes' if parts.bitwise else 'no'}: {exact}",
        "kv": f"{kv_size} for {kv_tokens} tokens, {memory.max_context} a sequence at most",
        **({"graphs": str(parts.prepared)} if parts.prepared else {}),
        "sampling": f"{parts.generation} unless a request says otherwise; source: {parts.generation.source}",
        "limits": _limits(llm, settings),
        "access": _access(settings),
        **_recording(settings),
    }


def _limits(llm: LLM, settings: Settings) -> str:
    return (
        f"{llm.engine.max_sequences} sequences run, {settings.max_waiting} more may wait, "
        f"{settings.request_timeout:g} s a request, {format_size(settings.max_body_bytes)} a body"
    )


def _access(settings: Settings) -> str:
    if settings.api_keys:
        return f"{len(settings.api_keys)} API keys, {'an' if settings.admin_key else 'no'} admin key"
    reach = "this machine" if is_local(settings.host) else "THE NETWORK: set api_keys unless that is meant"
    return f"no API keys: open to everybody on {reach}"


def _recording(settings: Settings) -> Facts:
    if settings.record is None:
        return {}
    what = ", without their texts," if settings.record_without_text else ", PROMPTS INCLUDED,"
    return {"record": f"{settings.record_share:.0%} of the requests{what} are kept in {settings.record}"}


def announce(facts: Facts, settings: Settings) -> None:
    if settings.log_json:
        logs.say("serving", level=logging.INFO, url=settings.url, **facts)
        return
    lines = [f"Paceline {__version__}", *(f"  {title:<9} {text}" for title, text in facts.items())]
    places = {
        "": "playground; for Anthropic's and Ollama's clients, as base URL",
        "/v1": "for OpenAI's clients, as base_url",
        "/metrics": "for Prometheus",
    }
    lines += [f"  {settings.url + path:<32} {what}" for path, what in places.items()]
    lines.append("Ctrl-C to stop: running requests end first; once more to abort them")
    print("\n".join(lines), flush=True)
