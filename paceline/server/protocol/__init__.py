"""The bodies that travel over HTTP, in OpenAI's words and with the fields that other servers' clients know.

`requests`: bodies that clients send. `answers`: bodies that they get. `anthropic` and `ollama`: both, of these APIs.
Docstrings and descriptions are part of the OpenAPI document.
"""
