"""Models of the Hugging Face hub: their names, which files to fetch, how to fetch them, and where they lie.

    org/name          a repository: its safetensors, or the GGUF file that is preferred
    org/name:Q8_0     the GGUF file of that quantisation; a file's name may stand there, too

Uses the standard library only. Every file is checked against the digest that the hub states before it gets its name.
"""
