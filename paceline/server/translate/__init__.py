"""From the body of a request to the requests of the engine.

    translator    one method per endpoint: sampling, prompts, and the facts that the answer needs
    speculation   the field `speculation`, within the limits of the server
    fields        single fields: read, checked, named where they have no effect
    formats       the form of an answer → a grammar
    inputs        prompts, messages and items → texts and messages
    foreign       bodies of other APIs, read by `anthropic` and `ollama` as a chat or a completion
    unused        names of fields without effect inside tools, schemas and messages

The types of a body are checked before this package, everything else here or in functions called from here, before the
engine gets the request. Nothing is changed silently: fields without effect are listed in `ignored_fields`.
"""
