"""One step as the scheduler plans it: which tokens of which requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_blend.request import Request


@dataclass(frozen=True)
class BlendPart:
    """Rows first .. stop - 1 of a blend that several steps share: its chosen positions, in order of position."""

    first: int
    stop: int
    is_last: bool


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Positions start .. start + num_tokens - 1 of a request. A blend covers all of them and computes the chosen
    ones, or a `part` of these. The last positions hold `drafts`, guesses that the step verifies.

    Nothing changes one. It is not frozen because a step makes one for each request, and a frozen one takes three times
    as long to make.
    """

    request: Request
    start: int
    num_tokens: int
    is_blend: bool = False
    drafts: tuple[int, ...] = ()
    part: BlendPart | None = None

    @property
    def starts_blend(self) -> bool:
        """Return whether this is a blend, or the first part of one: its stored KV is still to be put in place."""
        return self.is_blend and (self.part is None or self.part.first == 0)

    @property
    def completes(self) -> bool:
        """Return whether its positions are all in the cache after this step: those of a blend are after its last
        part."""
        return self.part is None or self.part.is_last

    @property
    def ends_prefill(self) -> bool:
        """Return whether the request's known tokens are all computed with this step."""
        return self.completes and self.known_stop >= self.request.num_tokens

    @property
    def num_rows(self) -> int:
        """Return how many tokens the step computes for it, at most."""
        if self.part is not None:
            return self.part.stop - self.part.first
        return blend_rows(self.request) if self.is_blend else self.num_tokens

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def known_stop(self) -> int:
        """Return the position after the last token that is not a guess."""
        return self.stop - len(self.drafts)

    @property
    def is_prefill(self) -> bool:
        """Return whether it computes several tokens of which none is a guess."""
        return self.num_tokens - len(self.drafts) > 1

    @property
    def is_decode(self) -> bool:
        """Return whether this is the next token of a request that has begun to answer."""
        request = self.request
        answers = request.output_token_ids or request.num_in_flight
        return self.num_tokens == 1 and bool(answers) and self.samples

    @property
    def samples(self) -> bool:
        """Return whether this step computes the request's last known token, so that the next one can be sampled."""
        if self.part is not None and not self.part.is_last:
            return False
        return self.known_stop == self.request.num_tokens and self.request.params is not None


def all_decode(items: Sequence[ScheduledRequest]) -> bool:
    """Return whether each item is the next token of a request that has begun to answer, or has drafts."""
    for item in items:  # noqa: SIM110 - a generator would double the time of what every step asks
        if not item.drafts and (item.num_tokens != 1 or not item.is_decode):
            return False
    return True


@dataclass
class SchedulerOutput:
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # of those, the ones that run for the first time
    preempted: list[Request] = field(default_factory=list)
    # (from, to): blocks whose content is to be copied before anything of the step is computed
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


def blend_rows(request: Request) -> int:
    """Return how many tokens a blend computes at most, in all its steps. Tokens generated before a preemption are
    computed with it."""
    assert request.blend is not None
    return request.blend.num_scheduled_tokens + len(request.output_token_ids)


def is_complete(request: Request, num_tokens: int) -> bool:
    """Return whether a step in flight computes the rest of a request with this many tokens, or draws its last one."""
    longest = request.max_num_tokens
    return request.num_computed_tokens == num_tokens or (longest is not None and num_tokens >= longest)
