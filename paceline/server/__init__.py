"""Paceline over HTTP. Needs the extra `serve`; nothing below this package imports it."""
