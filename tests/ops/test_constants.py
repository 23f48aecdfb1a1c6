"""Constants that CUDA graphs read by address are never freed, replaced or changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_blend.ops import constants

CPU = torch.device("cpu")


def test_a_range_stays_where_it_is_after_any_number_of_others() -> None:
    first = constants.arange(4, CPU)
    others = [constants.arange(1 << bits, CPU) for bits in range(21)]
    again = constants.arange(4, CPU)
    assert again.data_ptr() == first.data_ptr() and again.tolist() == [0, 1, 2, 3]
    for bits, other in enumerate(others):
        assert other.dtype == torch.int64 and torch.equal(other, torch.arange(1 << bits))
        assert other.data_ptr() == constants.arange(1 << bits, CPU).data_ptr()


def test_all_threads_get_the_same_tensor() -> None:
    with ThreadPoolExecutor(8) as pool:
        addresses = set(pool.map(lambda _: constants.arange(3 << 20, CPU).data_ptr(), range(64)))
        addresses |= set(pool.map(lambda _: constants.one(CPU).data_ptr(), range(64)))
    assert len(addresses) == 2
    assert constants.one(CPU).item() == 1.0
