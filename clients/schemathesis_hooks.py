"""Loaded by Schemathesis: most bodies name no model, so that they get as far as the engine."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict):
        body.pop("model", None)
    return body
