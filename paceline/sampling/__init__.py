"""From logits to a token: filters, penalties, grammars. One function serves the target and every drafter."""

from paceline.moved import names_of

__getattr__ = names_of("paceline.sampling", "paceline.sampling.sampler")
