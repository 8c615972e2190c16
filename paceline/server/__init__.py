"""Paceline over HTTP. Needs the extra `serve`; nothing below this package imports it.

    client ─▶ http1 ─▶ guards/ ─▶ routes/ ─▶ translate/ ─▶ sse.send ─▶ bridge ═▶ engine
    client ◀─ http1 ◀───────────────────── answers/ ◀───── sse ◀────── bridge ◀═

`process` runs it all, `app` puts it together, `settings` and `live` have the limits. `protocol/` has the bodies and
`problems` the errors; `metrics`, `logs`, `traces` and `record` say what happened.
"""
