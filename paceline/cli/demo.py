"""Demo: a real model answers with and without speculation; the same text, sooner."""


def add_arguments(p):
    pass


def run(a):
    return 0
