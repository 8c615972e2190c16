"""Fill-in-the-middle (FIM): the control tokens of a model that was trained to write the text between two others.

    prefix first    BOS │ PRE prefix │ SUF suffix │ MID      Qwen-Coder, StarCoder, CodeGemma, DeepSeek, CodeLlama
    suffix first    BOS │ SUF suffix │ PRE prefix            Codestral

Other files of a project stand before that, for models with tokens for them: REPO name, then SEP file name, text.
Whether a model was trained on its tokens is not known: files of a family share one vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
# Texts of the tokens PRE, SUF and MID in published vocabularies; without MID the suffix comes first.
FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
SEPARATORS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
ENDS = ("▁<EOT>", "<EOT>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>")
MAX_TOKEN_CHARACTERS = 16  # of a token on average, in the part of a long text that is read; code has three or four
PREFIX_SHARE = 0.75  # of the room for prefix and suffix, where both are too long: llama.cpp's ratio of 3 to 1


@dataclass(frozen=True, slots=True)
class FillIn:
    """The prompt of a fill-in."""

    prompt: tuple[int, ...]
    behind: tuple[int, ...]  # tokens of the text behind the middle: a prediction of what the answer runs into
    ends: frozenset[int]  # tokens after which the middle is complete, beside those that end any answer
    cut: bool  # the prompt lacks a part of what was given, for it would not have fitted


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the control tokens that mark prefix, suffix and the place where the middle begins."""

    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first, and the prefix ends where the middle begins
    repository: int | None
    separator: int | None  # None: the model knows no other files
    ends: frozenset[int]  # tokens after which the middle is complete, beside those that end any answer

    def prompt(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        *,
        begin: Sequence[int] = (),
        files: Sequence[Sequence[int]] = (),
        room: int | None = None,
    ) -> FillIn:
        """Make the prompt of a fill-in.

        `begin`: tokens that the model expects before any text. `files`: other files of the project, marks included.
        `room`: tokens that the prompt may have; None: any number. The first files go first. Then the prefix loses its
        beginning and the suffix its end, so that at least a quarter of the room is left for each."""
        marks = 2 + (self.middle is not None) + len(begin)
        left = max(0, (len(prefix) + len(suffix) + sum(map(len, files))) if room is None else room - marks)
        behind = min(len(suffix), max(left - int(left * PREFIX_SHARE), left - len(prefix)))
        before = min(len(prefix), left - behind)
        kept = last_within(files, left - before - behind, len)
        head = [self.prefix, *prefix[len(prefix) - before :]]
        tail = [self.suffix, *suffix[:behind]]
        parts = [*tail, *head] if self.middle is None else [*head, *tail, self.middle]
        cut = (before, behind, len(kept)) != (len(prefix), len(suffix), len(files))
        prompt = (*begin, *(token for file in kept for token in file), *parts)
        return FillIn(prompt, tuple(suffix[:behind]), self.ends, cut)


def find_fim_tokens(tokens: Sequence[str], named: Mapping[str, int]) -> FimTokens | None:
    """Find the tokens in a vocabulary. `named`: ids that a GGUF file gives as pre, suf, mid, pad, rep and sep."""
    wanted = {text for family in FAMILIES for text in family} | {*REPOSITORIES, *SEPARATORS, *ENDS}
    ids = {text: i for i, text in enumerate(tokens) if text in wanted}
    marks = _named_marks(named) or _known_marks(ids)
    if marks is None:
        return None
    repository = named.get("rep", _first(REPOSITORIES, ids))
    separator = named.get("sep", _first(SEPARATORS, ids))
    ends = {*marks, repository, separator, named.get("pad"), *(ids.get(text) for text in ENDS)}
    return FimTokens(
        prefix=marks[0],
        suffix=marks[1],
        middle=marks[2],
        repository=repository if separator is not None else None,
        separator=separator,
        ends=frozenset(token for token in ends if token is not None),
    )


def _named_marks(named: Mapping[str, int]) -> tuple[int, int, int | None] | None:
    return (named["pre"], named["suf"], named.get("mid")) if {"pre", "suf"} <= named.keys() else None


def _known_marks(ids: Mapping[str, int]) -> tuple[int, int, int | None] | None:
    for prefix, suffix, middle in FAMILIES:
        if prefix in ids and suffix in ids and (middle is None or middle in ids):
            return ids[prefix], ids[suffix], None if middle is None else ids[middle]
    return None


def _first(texts: Iterable[str], ids: Mapping[str, int]) -> int | None:
    return next((ids[text] for text in texts if text in ids), None)


def last_within(files: Sequence[T], room: int, size: Callable[[T], int]) -> Sequence[T]:
    """Return as many of the last files as have at most `room` together."""
    first = len(files)
    while first and size(files[first - 1]) <= room:
        first -= 1
        room -= size(files[first])
    return files[first:]
