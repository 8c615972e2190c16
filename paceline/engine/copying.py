"""Copies beside a network: from which match on a lookup drafts instead of it, and how many tokens, for each sequence.

A portfolio has both in one round of a device (`drafters.portfolio.on_device`). The device takes the copy where the last
tokens of a text stand in it already, at least as many as the *bar* says that travels with the seat. So nobody waits for
the host, which sets the bar by what has landed:

    a match of 2, 3, … tokens    how often the token after it was right, and each after that
    the network                  how many tokens of its drafts were right lately

The bar is the shortest match from which on copies are expected to have more tokens right than the network; in a round
without the network, more than ENOUGH_RIGHT. A landing
tells of the match also where nothing was copied. So the host knows what a copy would have been, and learns from rounds
in which the network drafts whether copies would do better.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.runner.rounds.protocol import Landed

# Chosen, not measured: what sequences and texts show replaces them within some rounds.
SIZES = 2, 3, 4, 5, 6  # tokens of matches that are told apart; longer ones count as the longest
PLACES = range(len(SIZES) - 1, -1, -1)  # of the longest first
FIRST_RATES = 0.5, 0.65, 0.75, 0.8, 0.85  # probability that a copied token is right, by size, before any was judged
FIRST_RIGHT = 1.5  # tokens of the network's draft that are right, before any was judged
ENOUGH_RIGHT = 1.0  # right tokens of a copy that are worth its rows where nobody else drafts
PRIOR_WEIGHT = 4.0  # judged tokens, or drafts, that the experience with all sequences weighs as much as, for one
TEXT_DECAY, ALL_DECAY = 0.9, 0.98  # weight of the past at each landing, for one sequence and for all
LENGTHS = 4, 8, 16  # tokens of copies: few lengths, because a seat that changes is sent again
FOLLOWED_TOKENS = 32  # copied tokens in a row that were right, from which on a text needs no network
SHARE_RISE, SHARE_FALL = 0.3, 0.5  # parts by which a round with a copy, and one without, move the share of copies


@dataclass(slots=True)
class Experience:
    """Experience with copies, by the place of their match in SIZES, and with the network's drafts. The past decays."""

    right: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))  # copied tokens that were right
    judged: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))  # all that were judged
    network_right: float = 0.0  # tokens of the network's drafts that were right
    network_drafts: float = 0.0

    def learn(self, place: int, right: int, judged: int, *, network: int, decay: float) -> None:
        """Learn that of a copy behind a match so many judged tokens were right, and of the network's draft `network`.
        A `place` or `network` below 0: there was none."""
        if place >= 0:
            self.right[place] = decay * self.right[place] + right
            self.judged[place] = decay * self.judged[place] + judged
        if network >= 0:
            self.network_right = decay * self.network_right + network
            self.network_drafts = decay * self.network_drafts + 1


@dataclass(slots=True)
class Copying:
    """The copies of one sequence beside a network."""

    allowed: bool = True  # the rule of the sequence judges copies as it judges the network's drafts
    passes: int = 0  # tokens that the network may draft in the step that is planned
    max_copy: int = 0  # tokens that a copy may have in it; 0: nobody looks
    sure: int = 0  # tokens of a match from which there is a copy in it; 0: never
    bar: int = 0  # tokens of a match from which a copy takes the place of the network's draft; 0: never
    lone_bar: int = 0  # the same in rounds without the network
    length: int = LENGTHS[0]  # tokens of its next copy
    hopes: bool = True  # the latest match that was looked for went on as a copy would
    followed: int = 0  # tokens in a row that were copied and right; from FOLLOWED_TOKENS on copies alone go on
    share: float = 0.0  # of recent rounds in which somebody looked, those with a copy: the network was of no use there
    own: Experience = field(default_factory=Experience)

    def set_bars(self, everyone: Experience) -> None:
        """Set the bars by the experience with this sequence, and with all."""
        # No calls, because every sequence pays for them in every step.
        own, prior = self.own, PRIOR_WEIGHT
        others = (everyone.network_right + prior * FIRST_RIGHT) / (everyone.network_drafts + prior)
        network = (own.network_right + prior * others) / (own.network_drafts + prior)
        self.bar = self.lone_bar = 0
        beside = alone = True  # all longer matches are sure
        for place in PLACES:
            others = (everyone.right[place] + prior * FIRST_RATES[place]) / (everyone.judged[place] + prior)
            rate = (own.right[place] + prior * others) / (own.judged[place] + prior)
            right = rate * (1 - rate**self.length) / (1 - rate)  # tokens of a copy that are expected to be right
            beside, alone = beside and right > network, alone and right > ENOUGH_RIGHT
            if beside:
                self.bar = SIZES[place]
            if alone:
                self.lone_bar = SIZES[place]

    def learn(self, text: Seq[int], landed: Landed, everyone: Experience, *, network: bool) -> None:
        """Learn from an outcome. `text`: the tokens before it; `network`: the network could draft in this round."""
        match, accepted = landed.match, len(landed.path)
        assert match is not None, "nobody has looked for a match"
        if match.copied:
            right, ended = accepted, accepted < len(landed.drafted)
            wanted = right + 2 if ended else 2 * self.length
            self.length = LENGTHS[(wanted > LENGTHS[0]) + (wanted > LENGTHS[1])]
        else:
            right = agreeing(text, match.end, landed.tokens) if match.size else 0
            ended = right < len(landed.tokens)
        place, drafted = min(match.size, SIZES[-1]) - SIZES[0], accepted if network and not match.copied else -1
        self.own.learn(place, right, right + ended, network=drafted, decay=TEXT_DECAY)
        everyone.learn(place, right, right + ended, network=drafted, decay=ALL_DECAY)
        self.hopes = right > 0 and place >= 0
        self.followed = self.followed + right if match.copied and not ended else 0
        self.share += SHARE_RISE * (1 - self.share) if match.copied else -SHARE_FALL * self.share
        self.set_bars(everyone)


def agreeing(text: Seq[int], end: int, tokens: Seq[int]) -> int:
    """Count the first tokens that a copy of `text` from `end` on would have had right."""
    period = len(text) - end
    for index, token in enumerate(tokens):
        if text[end + index % period] != token:
            return index
    return len(tokens)
