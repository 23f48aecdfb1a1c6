"""The seeds of synthetic worlds that are for training, for development and for the test.

- **Training**: what models are trained on. `inputs/demo-model` had seeds 1,000 to 1,059, `finetune/worlds.py`
  gives seeds from 100,000 on. A training seed begins a stream of worlds, which one `Random` draws one after the other,
  so all that a split can promise is that no other split begins at this seed. Full names of people
  have four syllables out of so many that streams do not meet by chance either (`tests/quality/test_splits.py` looks at
  a sample); names of one word may.
- **Development**: everything that is looked at to choose a rule, a setting, or when to stop training. New questions
  have seeds from 3,000,000 on. The files in `inputs` (seeds from 1,100,000, 1,200,000 and 1,300,000 on) belong here
  too: rules were chosen on them, and the training of `inputs/demo-model-reuse` was stopped by them.
- **Test**: the numbers in README.md and in docs. It is run once for each claim, and nothing is chosen by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Split:
    """The seeds of one purpose. `first` is the seed of world 0; seeds before it were given out otherwise."""

    name: str
    seeds: range
    first: int

    def checked(self, seed: int) -> int:
        """Return `seed`. Raises ValueError if it is not one of this split."""
        if seed not in self.seeds:
            raise ValueError(
                f"seed {seed:,} is not in the {self.name} split, which has seeds {self.seeds.start:,} to "
                f"{self.seeds.stop - 1:,}{_place(seed)}"
            )
        return seed

    def seed(self, index: int) -> int:
        """Return the seed of world `index`. Raises ValueError if the split has no such world."""
        worlds = self.seeds.stop - self.first
        if not 0 <= index < worlds:
            raise ValueError(f"world {index:,} is not in the {self.name} split: use 0 to {worlds - 1:,}")
        return self.first + index

    def random(self, index: int) -> Random:
        """Return the generator that makes world `index`. Raises ValueError if the split has no such world."""
        return Random(self.seed(index))


TRAINING = Split("training", range(1_000_000), first=100_000)
DEVELOPMENT = Split("development", range(1_000_000, 4_000_000), first=3_000_000)
TEST = Split("test", range(5_000_000, 10_000_000), first=5_000_000)
SPLITS = {split.name: split for split in (TRAINING, DEVELOPMENT, TEST)}


def split_of(seed: int) -> Split | None:
    """Return the split that a seed belongs to; None if it belongs to none."""
    return next((split for split in SPLITS.values() if seed in split.seeds), None)


def _place(seed: int) -> str:
    other = split_of(seed)
    return f": it is in the {other.name} split" if other else " and is in no other split"
