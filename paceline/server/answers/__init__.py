"""Answers of the endpoints that write text: one class a file, each made for one HTTP request.

    add      count an event of the engine, for an answer that is sent as a whole
    whole    make the body of that answer
    chunks   count an event, and make the chunks of a stream that it brings
    end      make the last chunks of a stream
    fail     make the last chunks of a stream that breaks off

`server.sse` calls these methods and decides when their output is sent. Each of the classes counts its events in a
`tally.Tally` of its own. `chat`, `completions` and `responses` are OpenAI's, `anthropic` and `ollama` those of others.
"""
