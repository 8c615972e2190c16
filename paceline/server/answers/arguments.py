"""Arguments of tool calls as objects, for the APIs that have no JSON text there."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from paceline.chat.tool_calls import ToolCall


def parsed_arguments(call: ToolCall) -> dict[str, Any]:
    """Parse the arguments of a call; of one that was cut short, as far as they go."""
    try:
        parsed = from_json(call.arguments, allow_partial=True)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
