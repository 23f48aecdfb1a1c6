"""Write neutral passages, which stand for others while a chunk is encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

Encode = Callable[[str], "list[int]"]

COUNT = 320  # of different passages


def _words(text: str) -> list[str]:
    return text.split()


_STARTS = _words("Al Ber Cor Dan El Far Gal Hol Ing Jor Kal Lin Mar Nor Ost Pel Quin Ros Sal Tor Ul Ver Wes Yar Zel")
_ENDS = _words("bert dale den field gard ham holm ia ion land ley lin mar mond more na ra rick sen stead ton vale wick")
_TRADES = _words("baker carpenter doctor editor farmer gardener judge librarian miller painter pilot singer teacher")
_GOODS = _words("bricks buttons cables chairs cheese cloth coal hats ink knives maps paint ropes soap tea wire")
_THINGS = _words("bridge church clock tower garden harbour library market mill museum school station theatre")
_TEXTS = (
    "{a} {b} was a {trade} from {c}. {b} was born in {year}. The work was steady and the days were long.",
    "{a} is a town near {b}. The {thing} was built in {year}. Its mayor is {c} {d}.",
    "{a} and Sons sells {goods}. The shop opened in {year} in {b}. It is run by {c} {d}.",
    "{a} {b}, a {trade}, lived in {c} for many years. Later {b} married {d} {e}. Their house still stands.",
    "The {thing} of {a} dates from {year}. It was designed by {b} {c}. Many people visit it every summer.",
    "{a} is a village in {b}. The people there make {goods}. The river {c} is not far away.",
    "{a} {b} wrote a book about {goods}. It was printed in {c} in {year}. Few copies are left.",
    "The firm of {a} was founded by {b} {c} in {year}. It made {goods} until a fire. It has {number} workers today.",
    "Every year a fair is held in {a}. It began in {year}. People come from {b} and from {c} to buy {goods}.",
    "{a} {b} and {c} {b} were brother and sister. One became a {trade}. The other stayed in {d}.",
)


@dataclass(frozen=True)
class Filler:
    """Short passages about made-up people, places and firms.

    They name about as many entities as passages of an encyclopaedia do, and state no fact that a question could ask
    for.
    """

    encode: Encode = field(repr=False)
    separator: str = "\n\n"  # after each passage

    @cached_property
    def _all(self) -> list[tuple[int, ...]]:
        rng = Random(0)
        return [tuple(self.encode(self.text(number, rng) + self.separator)) for number in range(COUNT)]

    def text(self, number: int, rng: Random) -> str:
        """Return the text of passage `number`."""
        return _fill(_TEXTS[number % len(_TEXTS)], rng)

    def passages(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Return the token ids of `count` passages (at most COUNT), chosen by the seed."""
        return [self._all[i] for i in Random(seed).sample(range(COUNT), min(count, COUNT))]


def _fill(text: str, rng: Random) -> str:
    names = {letter: rng.choice(_STARTS) + rng.choice(_ENDS) for letter in "abcde"}
    words = {"trade": rng.choice(_TRADES), "goods": rng.choice(_GOODS), "thing": rng.choice(_THINGS)}
    return text.format(**names, **words, year=rng.randint(1790, 1990), number=rng.randint(2, 90) * 10)
