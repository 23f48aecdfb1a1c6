"""kill -9 at any moment: the next process finds right chunks, all the space and no leftovers."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.kv_store.disk_processes import Child, check_after_a_crash, churn, die_at_step
from tests.kv_store.stored_chunks import chunk, key, memory_folder, sized
from tests.waiting import DEADLINE

pytestmark = pytest.mark.slow

BUDGET = 150  # pages: some 20 of the 60 chunks
MOST_ROUNDS = 25  # that a process has done before it is killed


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    """30 times with each seed. What is left by the last process is what the next one starts with."""
    choose, most = random.Random(seed), 0
    for number in range(30):
        rounds = choose.randrange(MOST_ROUNDS)
        with Child(churn, tmp_path, BUDGET, 1000 * seed + number, says=rounds) as child:
            assert child.receive() == rounds
            time.sleep(choose.uniform(0.0, 0.02))
            assert child.kill() == -signal.SIGKILL
        most = max(most, check_after_a_crash(tmp_path, BUDGET, lambda name: [chunk(name)]))
    assert most > 10  # they did work


def test_killed_next_to_others_that_go_on(tmp_path: Path) -> None:
    """Three processes, of which one at a time is killed and replaced, 30 times; a fourth is never killed."""
    choose = random.Random(9)
    with Child(churn, tmp_path, BUDGET, 1, 400) as witness:
        children = [Child(churn, tmp_path, BUDGET, seed, says=5) for seed in range(2, 5)]
        try:
            for seed in range(5, 35):
                at = choose.randrange(len(children))
                children[at].receive()
                time.sleep(choose.uniform(0.0, 0.05))
                assert children[at].kill() == -signal.SIGKILL
                children[at] = Child(churn, tmp_path, BUDGET, seed, says=choose.randrange(MOST_ROUNDS // 2))
            wrong, hits = witness.receive()
            assert not wrong and hits > 10
        finally:
            for child in children:
                child.kill()
    # However many there are: the last kill may come between what left for a batch and the batch.
    check_after_a_crash(tmp_path, BUDGET, lambda name: [chunk(name)])


def test_killed_before_every_single_step() -> None:
    """Every statement for the index and every call for a file, while chunks are put, evicted, replaced and removed."""
    with memory_folder() as parent:
        with Child(die_at_step, parent / "whole", None) as child:
            steps = child.receive()
        assert steps > 100
        contents = {key(number): [sized(3)] for number in range(5)} | {key(3): [sized(3), sized(2)], key(5): [sized(9)]}
        contents |= {key(number): [sized(2)] for number in (6, 7)}
        counts = set()
        for step in range(1, steps + 1):
            with Child(die_at_step, parent / str(step), step) as child:
                child.process.join(DEADLINE)
                assert child.process.exitcode == -signal.SIGKILL
            counts.add(check_after_a_crash(parent / str(step), 12, contents.__getitem__))
            shutil.rmtree(parent / str(step))
        assert counts >= {0, 1, 2, 3, 4}
