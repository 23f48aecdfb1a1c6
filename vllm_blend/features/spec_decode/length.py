"""Choose how many tokens to draft: as many as pay, by what was accepted recently."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# The time that a drafted row adds to a step, as a share of the step of one sequence: on most hardware reading the
# weights takes nearly all of the time of a small step. A draft is too long if its last token is accepted less often.
ROW_COST = 0.01
LEAST_RATE = 0.25  # the share of right draft tokens below which drafting stops: it then gains a third of a token
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # steps without drafts after drafts have failed
LONGEST_START = 8  # steps at the start of a sequence until its first draft: another text may be another case
LONGEST_REST = 16  # steps without a search after searches that found nothing to draft
DECAY = 0.9  # how much older evidence counts after each draft
KNOWN = 5.0  # the evidence that a sequence takes over from the one before, in draft tokens


@dataclass
class DraftLength:
    """The draft length of one sequence, from its recent acceptance (goodput as in Liu et al., 2024, arXiv:2406.14066,
    with costs that are assumed and not measured: outputs must not depend on a clock).

    With a share `rate` of right tokens, the n-th draft token counts with probability rate**n. If the rate is too low,
    nothing is drafted for a while, longer each time; then a draft is tried again.
    """

    most: int
    hits: float = 0.6 * KNOWN  # draft tokens that were right, weighted by age
    trials: float = KNOWN  # draft tokens that were reached, weighted by age
    wait: int = 0  # steps until the next draft
    pause: int = FIRST_PAUSE  # steps to wait the next time
    idle: int = 0  # steps to wait after the last search, if it found nothing

    @property
    def rate(self) -> float:
        """Return the share of draft tokens that were right."""
        return self.hits / self.trials

    def next(self, num_sequences: int = 1) -> int:
        """Return how many tokens to draft for the coming step, in which `num_sequences` decode and pay for all rows."""
        if self.wait > 0:
            self.wait -= 1
            return 0
        cost, rate = ROW_COST * num_sequences, min(max(self.rate, 0.1), 0.99)
        if cost >= 1:
            return 0
        return min(self.most, int(math.log(cost) / math.log(rate)))

    def is_idle(self, num_sequences: int) -> bool:
        """Return whether `next` will return 0, whatever token the step before draws."""
        return self.wait > 0 or ROW_COST * num_sequences >= 1

    def skip_step(self) -> None:
        """Count a step that began without asking for a draft, because `is_idle`."""
        self.wait = max(0, self.wait - 1)

    def searched(self, found: bool) -> None:
        """Note whether a search for drafts found any. A search has a price if the engine could run ahead otherwise:
        after each one that finds nothing the next one comes later."""
        self.idle = 0 if found else min(2 * self.idle or 1, LONGEST_REST)
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
        """Return where another sequence of the same kind begins: it keeps the rate with little evidence, and goes on
        waiting, but not for long."""
        return replace(self, hits=KNOWN * self.rate, trials=KNOWN, wait=min(self.wait, LONGEST_START))
