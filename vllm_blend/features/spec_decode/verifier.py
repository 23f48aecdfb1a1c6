"""Decide which draft tokens are kept.

A step computes the logits after the last token and after each draft token, and draws a token from each row just as
plain decoding would, with the history that the row has if all drafts before it are right. Drafts are kept as long as
they equal what was drawn; the first draw that differs takes its draft's place, and one more follows the last draft.

This is rejection sampling (Leviathan et al., ICML 2023; Chen et al., 2023) with a draft that is certain of its token: a
draft d is kept with probability p(d), and a draw that is not d has the distribution p without d, renormalised. So the
output has plain decoding's distribution whatever changes or filters the logits, and for greedy requests it is the same
output. With one random number per row, in order, it is the same output for seeded requests too, if the numbers of rows
that did not count are used again.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_kept(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many of the `drawn` tokens (one per draft and one more) count: 1 + the drafts that agree with them.

    A row without a token (negative) agrees with nothing.
    """
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"{len(drawn)} tokens were drawn for {len(drafts)} drafts: one each and one more are needed")
    for index, (draft, token) in enumerate(zip(drafts, drawn, strict=False)):
        if draft != token:
            return index + 1
    return len(drawn)
