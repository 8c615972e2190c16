"""From the body of a request to the requests of the engine.

    translator    one method an endpoint; sampling, prompts, and all that the answer must know
    speculation   the field `speculation`, within the limits of the server
    formats       the form of an answer → a grammar
    inputs        prompts, messages and items → texts and messages

Everything that can be wrong with a request and is not a matter of types is said here, or by what is called from here,
before the engine hears of it. Nothing is changed silently: what has no effect is listed in `ignored_fields`.
"""
