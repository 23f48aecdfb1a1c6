"""How many tokens to draft: as many as pay, by what was accepted lately."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# What a drafted row adds to a step, as a share of the step of one sequence: on most hardware reading the weights takes
# nearly all of the time of a small step. A draft is too long where its last token is accepted less often than that.
ROW_COST = 0.01
LEAST_RATE = 0.25  # of draft tokens that are right, below which drafting stops: it then gains a third of a token
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # steps without drafts after drafts have failed
LONGEST_START = 8  # steps at the start of a sequence until its first draft: another text may be another case
LONGEST_REST = 16  # steps without a look after looks that found nothing to draft
DECAY = 0.9  # of what was seen, per draft
KNOWN = 5.0  # draft tokens' worth of what a sequence takes over from the one before


@dataclass
class DraftLength:
    """The draft length of one sequence, from its recent acceptance (goodput as in Liu et al., 2024, arXiv:2406.14066,
    with costs that are assumed and not measured: outputs must not depend on a clock).

    With a share `rate` of right tokens, the n-th draft token counts with probability rate**n. Where the rate is too low
    nothing is drafted for a while, longer each time; then a draft is tried again.
    """

    most: int
    hits: float = 0.6 * KNOWN  # what was seen, weighted: draft tokens that were right, and all that were reached
    trials: float = KNOWN
    wait: int = 0  # steps until the next draft
    pause: int = FIRST_PAUSE  # steps to wait the next time
    idle: int = 0  # steps that the last look has cost, where it found nothing

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    def next(self, num_sequences: int = 1) -> int:
        """Tokens to draft for the coming step, in which `num_sequences` decode: each pays for the rows of all."""
        if self.wait > 0:
            self.wait -= 1
            return 0
        cost, rate = _cost(num_sequences), min(max(self.rate, 0.1), 0.99)
        if cost >= 1:
            return 0
        return min(self.most, int(math.log(cost) / math.log(rate)))

    def rests(self, num_sequences: int) -> bool:
        """Whether `next` will be 0, whatever the token is that the step before draws."""
        return self.wait > 0 or _cost(num_sequences) >= 1

    def passed_by(self) -> None:
        """A step began in which nothing was asked, because `rests`."""
        self.wait = max(0, self.wait - 1)

    def found(self, anything: bool) -> None:
        """Whether a look for drafts found any. A look has a price where the engine could run ahead otherwise: what
        finds nothing looks again later, each time."""
        self.idle = 0 if anything else min(2 * self.idle or 1, LONGEST_REST)
        self.wait = self.idle

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft that was verified."""
        self.hits = DECAY * self.hits + num_accepted
        self.trials = DECAY * self.trials + num_accepted + (num_accepted < num_drafted)
        if self.rate >= LEAST_RATE or num_accepted > 0:  # a token more is worth many drafted rows
            self.pause = FIRST_PAUSE
            return
        self.wait, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)

    def successor(self) -> DraftLength:
        """Where another sequence of the same kind begins: it goes on waiting, but not for long, and is surer of nothing
        than a new one."""
        return replace(self, hits=KNOWN * self.rate, trials=KNOWN, wait=min(self.wait, LONGEST_START))


def _cost(num_sequences: int) -> float:
    """Of a draft token for each of so many sequences, as a share of a step."""
    return ROW_COST * num_sequences
