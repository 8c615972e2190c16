"""Chats: messages through the model's own template to tokens, and tool calls out of an answer's text. No HTTP."""

from paceline.moved import names_of

__getattr__ = names_of("paceline.chat", "paceline.chat.template")
