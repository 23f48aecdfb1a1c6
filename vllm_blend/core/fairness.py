"""What keeps one tenant, or one call of many prompts, from holding up others: whose running request gives up its place,
and how a step's prefill is divided.

Both look at tenants, and where only one has requests at its calls; a call of another tenant is never counted against a
tenant's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm_blend.core.waiting_queue import WaitingQueue
from vllm_blend.request import Request

LARGE_CALL = 8  # a call gives up something only if it has more than this part of all: 1 / LARGE_CALL
MIN_SHARE = 128  # tokens of a step's prefill: smaller parts would cost more than they give


def find_victim(
    queue: WaitingQueue,
    asking: Request,
    running: Sequence[Request],
    size_of: Callable[[Request], int],
    total: int,
    needed: int,
) -> Request | None:
    """Return the running request that gives up its place for one that waits; None if no one has to.

    `size_of` says what a running request takes of `total`, of which `asking` needs `needed`. Tenants have parts by
    their weights, and calls equal ones. Those that have less may have their part, and only those give up that have
    more and got more service. So no request is preempted that would be scheduled again at once.
    """
    tenant = queue.tenants[asking.tenant]
    sizes: dict[str, int] = dict.fromkeys(queue.tenants, 0)
    own: dict[str, int] = dict.fromkeys(tenant.calls, 0)
    for request in running:
        sizes[request.tenant] += size_of(request)
        if request.tenant == asking.tenant:
            own[request.call] += size_of(request)
    served = {name: each.served for name, each in queue.tenants.items()}
    weights = sum(each.weight for each in queue.tenants.values())
    parts = {name: max(1, int(total * each.weight / weights)) for name, each in queue.tenants.items()}
    largest = _largest(sizes, served, asking.tenant, parts, needed)
    if largest is not None:
        return _last(running, asking, lambda request: request.tenant == largest)
    served = {name: each.served for name, each in tenant.calls.items()}
    part = max(1, parts[asking.tenant] // len(own))
    spared = parts[asking.tenant] // LARGE_CALL
    largest = _largest(own, served, asking.call, dict.fromkeys(own, part), needed, spared)
    if largest is None:
        return None
    return _last(running, asking, lambda request: (request.tenant, request.call) == (asking.tenant, largest))


def divide_prefill(needs: Mapping[str, int], total: int) -> dict[str, int]:
    """Return how many of `total` tokens each gets that needs so many. The first in `needs` count most: not all get
    something if the parts would be small. What one leaves, others get."""
    names = list(needs)[: max(1, total // MIN_SHARE)]
    shares = dict.fromkeys(needs, 0)
    left = total
    for number, name in enumerate(sorted(names, key=lambda name: needs[name])):
        shares[name] = min(needs[name], left // (len(names) - number))
        left -= shares[name]
    for name, need in needs.items():
        more = min(left, need - shares[name])
        shares[name] += more
        left -= more
    return shares


def _largest(
    sizes: Mapping[str, int],
    served: Mapping[str, float],
    asking: str,
    parts: Mapping[str, int],
    needed: int,
    spared: int = 0,
) -> str | None:
    """Return who has most of those that have to give up something, if `asking` may have what it needs. Who has at most
    `spared` gives up nothing."""
    if len(sizes) < 2 or sizes[asking] + needed > parts[asking]:
        return None
    over = [name for name, size in sizes.items() if size > max(parts[name], spared) and served[name] > served[asking]]
    return max(over, key=lambda name: sizes[name], default=None)


def _last(running: Sequence[Request], asking: Request, belongs: Callable[[Request], bool]) -> Request | None:
    """Return the request that started last of those that belong, but for one of a lower priority number."""
    found = (request for request in reversed(running) if belongs(request))
    return next((request for request in found if request.priority >= asking.priority), None)
