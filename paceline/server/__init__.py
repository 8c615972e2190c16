"""Paceline over HTTP. Needs the extra `serve`; nothing below this package imports it.

    client ─▶ http1 ─▶ guards/ ─▶ routes/ ─▶ translate/ ─▶ sse.send ─▶ bridge ═▶ engine
    client ◀─ http1 ◀───────────────────── answers/ ◀───── sse ◀────── bridge ◀═

`process` runs the server, `app` assembles it, `settings` and `live` hold its options. `protocol/` defines the bodies
and `problems` the errors. `metrics`, `logs`, `traces` and `record` report what happened.
"""
