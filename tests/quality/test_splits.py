"""Training, development and test share no seed and no world."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from vllm_blend.finetune.worlds import TRAINING_SEEDS, run_seeds
from vllm_blend.quality.make_datasets import (
    MUSIQUE_SAMPLES,
    MUSIQUE_SEED,
    SAMSUM_SAMPLES,
    SAMSUM_SEED,
    WIKIMQA_SAMPLES,
    WIKIMQA_SEED,
)
from vllm_blend.quality.splits import DEVELOPMENT, SPLITS, TEST, TRAINING, split_of
from vllm_blend.quality.world_facts import World, make_world

DEMO_README = Path(__file__).parents[2] / "inputs" / "demo-model" / "README.md"
SHIPPED = {MUSIQUE_SEED: MUSIQUE_SAMPLES, WIKIMQA_SEED: WIKIMQA_SAMPLES, SAMSUM_SEED: SAMSUM_SAMPLES}


def people_in(world: World) -> set[str]:
    """Return all names of people, on a page of their own or not."""
    named = {person.name for person in world.people} | {person.spouse for person in world.people}
    return named | {city.mayor for city in world.cities} | {company.director for company in world.companies}


def test_no_seed_is_in_two_splits() -> None:
    for one, other in combinations(SPLITS.values(), 2):
        assert one.seeds.stop <= other.seeds.start or other.seeds.stop <= one.seeds.start
    for split in SPLITS.values():
        assert split_of(split.seed(0)) is split_of(split.seeds.start) is split_of(split.seeds.stop - 1) is split
    assert split_of(4_500_000) is None


def test_every_generator_stays_in_its_split() -> None:
    for seed in (TRAINING_SEEDS.start, TRAINING_SEEDS.stop - 1, run_seeds(0, 1)[0], run_seeds(89, 2_560_000)[-1]):
        assert TRAINING.checked(seed) == seed
    for first, samples in SHIPPED.items():
        assert first + samples <= DEVELOPMENT.first and split_of(first) is split_of(first + samples) is DEVELOPMENT


def test_the_demo_model_was_trained_on_seeds_of_training() -> None:
    stated = re.search(r"worlds from seeds (\d+) to (\d+)", " ".join(DEMO_README.read_text().split()))
    assert stated is not None
    first, last = map(int, stated.groups())
    assert first < last < TRAINING.first and split_of(first) is split_of(last) is TRAINING


def test_a_seed_of_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed 3,000,000 is not in the test split.*it is in the development split"):
        TEST.checked(3_000_000)
    with pytest.raises(ValueError, match=r"seed 4,000,000 is not in the development split.*in no other"):
        DEVELOPMENT.checked(4_000_000)
    with pytest.raises(ValueError, match="world 1,000,000 is not in the development split: use 0 to 999,999"):
        DEVELOPMENT.seed(1_000_000)
    with pytest.raises(ValueError, match="world -1 is not in the test split"):
        TEST.random(-1)
    assert DEVELOPMENT.random(7).random() == Random(3_000_007).random()


def test_no_person_of_the_test_lives_in_another_split() -> None:
    tested, others = set[str](), set[str]()
    for index in range(100):
        tested |= people_in(make_world(TEST.random(index), 8))
        others |= people_in(make_world(DEVELOPMENT.random(index), 8))
    for shard in range(10):
        stream = TRAINING.random(shard)  # training draws many worlds from one seed
        for _ in range(30):
            others |= people_in(make_world(stream, 3))
    assert len(tested) > 3000 and len(others) > 6000
    assert not tested & others
