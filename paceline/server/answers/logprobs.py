"""Log-probabilities: the parts that several formats share. Names of tokens, numbers, and vLLM's format of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.protocol.answers import PromptScore, PromptScores
from paceline.text.tokenizer import Tokenizer
from paceline.types import Logprob

LOWEST_LOGPROB = -9999.0  # OpenAI's number for a probability of zero: JSON has no infinity


def prompt_scores(scores: Sequence[Logprob | None], tokenizer: Tokenizer) -> PromptScores:
    """Write a prompt's log-probabilities in vLLM's format: by token id, the prompt's own token and the best ones."""
    return [None if score is None else _ranked(score, tokenizer) for score in scores]


def token_name(token: int, tokenizer: Tokenizer) -> str:
    """Name a token by its text, or by its bytes if they are no whole characters, so that any two names differ."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _ranked(score: Logprob, tokenizer: Tokenizer) -> dict[str, PromptScore]:
    ranks = [(score.token, score.logprob, score.rank), *((t, p, rank) for rank, (t, p) in enumerate(score.top))]
    return {
        str(token): PromptScore(logprob=finite(logprob), rank=rank + 1, decoded_token=token_name(token, tokenizer))
        for token, logprob, rank in ranks
    }
