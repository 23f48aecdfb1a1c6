from __future__ import annotations

import pytest

from tests.core.test_scheduler import SIZE, Arrival, request_of
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.scheduler import Scheduler


@pytest.mark.parametrize("is_sent_back", [False, True])
def test_a_step_that_is_read_publishes_nothing_of_a_request_whose_pages_are_gone(is_sent_back: bool) -> None:
    blocks = BlockManager(10, SIZE)
    scheduler = Scheduler(blocks, 4, 64)
    request = request_of(0, Arrival(0, [0, 1, 1], 5, "plain"))
    scheduler.add(request)
    scheduler.advance(scheduler.schedule())
    request.output_token_ids.append(0)
    output = scheduler.schedule()
    [item] = output.scheduled
    assert (item.start, item.stop) == (3, 4), "its token fills a block"
    request.num_computed_tokens = item.stop  # as `advance` leaves it where the token was not known
    if is_sent_back:
        scheduler.send_back([request])
    scheduler.settle(output)
    assert len(blocks.published) == (1 if is_sent_back else 2)
