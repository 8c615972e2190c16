"""Drafts of sequences with a grammar: without tokens that it forbids, and with those that it forces behind the others.

Drafters need not know grammars. A token that the grammar forbids cannot be right, so its row would be wasted. Where a
branch of the draft ends and the grammar forces what follows, the forced tokens are right whenever the branch is:

    drafted                 "  description          description is forbidden
    forced behind  "           arguments
    verified                "  arguments
"""

from __future__ import annotations

from dataclasses import replace

from paceline.draft import Draft
from paceline.sampling.grammar_state import GrammarState


def follow_grammar(draft: Draft, grammar: GrammarState, *, limit: int) -> Draft:
    """Return the allowed part of a draft, with forced tokens behind its ends, at most `limit` tokens in all."""
    if grammar.strained:
        return draft
    paths = draft.paths
    kept = [node for node, path in enumerate(paths) if grammar.fitting(path) == len(path)]
    if len(kept) < len(paths):
        draft = _part(draft, kept)
        paths = [paths[node] for node in kept]
    return draft if draft.probs is not None else _with_forced(draft, paths, grammar, limit=limit)


def _part(draft: Draft, kept: list[int]) -> Draft:
    """Return the tokens of the nodes `kept`, which contain the parent of each."""
    places = {-1: -1} | {node: place for place, node in enumerate(kept)}
    return replace(
        draft,
        tokens=tuple(draft.tokens[node] for node in kept),
        parents=tuple(places[draft.parents[node]] for node in kept) if draft.parents else (),
        probs=None if draft.probs is None else draft.probs[kept],
        confidence=(),
    )


def _with_forced(draft: Draft, paths: list[tuple[int, ...]], grammar: GrammarState, *, limit: int) -> Draft:
    """Add the tokens that are forced behind the ends of a draft. Rules that want probabilities take none of them."""
    tokens, parents = [*draft.tokens], [*(draft.parents or range(-1, len(draft.tokens) - 1))]
    for end in sorted({*range(len(paths))} - {*parents}):
        for token in grammar.forced_behind(paths[end], limit - len(tokens)):
            parents.append(end)
            end = len(tokens)
            tokens.append(token)
    if len(tokens) == len(paths):
        return draft
    chain = parents == [*range(-1, len(tokens) - 1)]
    return replace(draft, tokens=tuple(tokens), parents=() if chain else tuple(parents), confidence=())
