"""An exchange on a CPU ends when another rank is out of reach, though its sockets for tensors do not say so."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch

from tests.distributed.ranks import on_ranks
from vllm_blend.distributed import ranks
from vllm_blend.distributed.ranks import RankLostError, Ranks

pytestmark = pytest.mark.cpu_only


def test_an_exchange_ends_with_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank takes part no more, and its end of the connection is closed."""
    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=40))
    heard = threading.Event()

    def work(own: Ranks) -> str:
        assert float(own.sum(torch.ones(1))) == 2
        if own.rank == 1:
            own.links[0].close()
            heard.wait(60)
            return ""
        with pytest.raises(RankLostError) as error:
            own.sum(torch.ones(1))
        heard.set()
        return str(error.value)

    said, _ = on_ranks(2, work)
    assert said == "the connection to another rank has ended in the middle of an exchange"
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "lost-exchange":  # which ends with the sockets of the other rank
            thread.join(60)
            assert not thread.is_alive()


def test_an_exchange_waits_for_a_rank_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than it takes to look at the connections, several times."""
    monkeypatch.setattr(ranks, "LOOK", timedelta(seconds=0.2))

    def work(own: Ranks) -> float:
        if own.rank == 1:
            threading.Event().wait(1)
        return float(own.sum(torch.ones(1)))

    assert on_ranks(2, work) == [2, 2]
