"""Encode a chunk in company: after neutral passages, the same for all chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from vllm_blend.blend.encoding_contexts.base import Tokens
from vllm_blend.blend.encoding_contexts.related import AfterPage

Encode = Callable[[str], "list[int]"]

COUNT = 2  # docs/selection.md has the others that were tried
SEPARATOR = "\n\n"  # after each passage

# Written for this purpose. They read like an encyclopaedia, but what they are about does not exist, so that they cannot
# answer a question. Changing one changes the keys of all chunks that are encoded after it.
PASSAGES = (
    "The harbour town of Kerrin lies at the mouth of the river Aldo. It has about twelve thousand inhabitants, most of "
    "whom work in fishing, trade and shipbuilding. The town hall was built in 1884 and burned down twice. Every autumn "
    "a market is held on the main square, and visitors come from the neighbouring valleys to buy wool, cheese and "
    "tools.",
    "Margaret Ellison (12 March 1871 - 4 June 1946) was an English botanist and illustrator. She was born in Leeds, "
    "studied at Owens College and later taught in Bristol. Her best known work is a guide to the mosses of northern "
    "Europe, published in 1909 with more than three hundred drawings. A species of liverwort is named after her.",
    "The Corliss Building is an office building in the centre of Dunmore. It was designed by the firm of Hale and "
    "Whitcomb and finished in 1927. The building has fourteen floors and a limestone facade with reliefs of ships. "
    "Since 1988 it has been listed as a protected monument, and the ground floor houses a small museum of printing.",
    "Silver Roads is the third studio album by the Canadian folk group The Lanterns, released in October 2003. It was "
    "recorded in Halifax over a period of six weeks and contains eleven songs. Critics praised the arrangements for "
    "strings. The album reached number nineteen in the national charts and was followed by a tour of forty concerts.",
    "Photometry is the measurement of light as it is perceived by the human eye. It differs from radiometry, which "
    "measures radiant energy in absolute terms. In photometry the power at each wavelength is weighted by a luminosity "
    "function that models the sensitivity of the eye. The standard was agreed on in 1924 and has been revised several "
    "times.",
    "The 1958 regional elections were held in the province of Tarrow on 18 May. The Farmers' Union won 31 of 60 seats "
    "and formed a government under Thomas Brandt, who had led the party since 1951. Turnout was 74 percent. The main "
    "questions of the campaign were the price of grain, the new railway and the reform of the schools.",
    "The northern grey warbler is a small bird of the family Acanthizidae. It lives in forests and gardens from sea "
    "level to about 1,500 metres and feeds on insects, which it takes from leaves and in flight. The nest is closed "
    "and hangs from thin branches. Two broods a year are common, and cuckoos often lay their eggs in the nests.",
    "The battle of Ostrava Pass was fought on 9 September 1762 between the armies of two coalitions. General Lindner "
    "held the heights with eight thousand men while the cavalry crossed the river further south. The fighting lasted "
    "six hours and ended when reinforcements arrived from the east. Both sides claimed victory, and peace was signed "
    "the next spring.",
    "Hollis Manufacturing was an American maker of bicycles and later of typewriters, based in Springfield. The "
    "company was founded in 1891 by the brothers George and Henry Hollis. At its height it employed two thousand "
    "people. After the war the market changed, and in 1953 the plant was sold to a competitor and closed two years "
    "later.",
    "Lake Varna is a freshwater lake in the south of the country, about forty kilometres long and up to nine "
    "kilometres wide. It was formed at the end of the last glacial period. Three rivers flow into it, and the outflow "
    "feeds a hydroelectric station. The lake is known for trout, for sailing and for thin ice in late winter.",
)


@dataclass(frozen=True)
class AfterFiller(AfterPage):
    """Encode a chunk after the prefix, the first `count` of `PASSAGES`, and those passages of its own page that it
    continues and the prompt has. Chunks that are alone in a prompt (one, or one page) are encoded as they stand,
    without filler, and are exact; and so is the first chunk of a prompt without a prefix, which may be the
    instruction.

    A chunk that was encoded alone has KV of a kind that no full prefill gives its tokens: it is the first text after
    the instruction. With other passages before it, the KV is of the right kind, though they are the wrong ones. Feng
    and Steinhardt ("How do Language Models Bind Entities in Context?", ICLR 2024) describe a part of this: an ordinal
    by which a model tells entities apart. All chunks share the same passages, so these are computed once for a prefix.
    """

    name: ClassVar[str] = "filler"

    encode: Encode = field(repr=False)
    count: int = COUNT

    def __post_init__(self) -> None:
        if not 1 <= self.count <= len(PASSAGES):
            raise ValueError(
                f"blend_encoding_context='filler({self.count})': there are 1 to {len(PASSAGES)} filler passages; "
                "without any, it is 'page'"
            )

    def company(self, is_alone: bool) -> Tokens:
        return () if is_alone else self._filler

    @cached_property
    def _filler(self) -> Tokens:
        return tuple(self.encode("".join(text + SEPARATOR for text in PASSAGES[: self.count])))
