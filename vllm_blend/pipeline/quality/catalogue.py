"""The settings of the sweep: rules, then levers, each with its paper. To sweep another one, add a `Setting` to a list.

A lever on the choice is text of `blend_selector` (see blend/selectors/spec.py). One that changes what is stored has
arguments of the engine: an engine is started for each combination of those, and all chunks are encoded again.
"""

from __future__ import annotations

from typing import Any

from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.quality.settings import Setting

RATIOS = (0.0, 0.02, 0.05, 0.08, 0.10, 0.15, 0.20, 0.30, 1.0)
QUICK_RATIOS = (0.0, 0.08, 0.15, 1.0)
GOALS = (0.08, 0.15)  # where levers are compared


def pages(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Say of every passage which earlier one of its page it goes on from, where the data set knows pages."""
    last: dict[str, int] = {}
    continues: list[int | None] = []
    for index, passage in enumerate(sample.passages):
        continues.append(None if passage.page_id is None else last.get(passage.page_id))
        if passage.page_id is not None:
            last[passage.page_id] = index
    return prompt | {"continues": continues}


def _rule(selector: str, paper: str, **engine: Any) -> Setting:
    return Setting(selector, {"blend_selector": selector}, engine, paper=paper)


def _choice(selector: str, paper: str, *ratios: float) -> Setting:
    return Setting(selector, {"blend_selector": selector}, paper=paper, ratios=ratios or GOALS)


def _encoded(after: str, paper: str) -> Setting:
    engine = {"blend_encoding_context": after}
    prompt = {"blend_selector": "question_attention"}
    arrange = pages if "page" in after else None
    return Setting(f"question_attention, after {after}", prompt, engine, arrange, paper, ratios=(0.0, *GOALS))


CACHEBLEND = _rule("value_deviation", "CacheBlend (Yao et al., arXiv:2405.16444), section 4.3")

RULES = [
    CACHEBLEND,
    _rule("key_deviation", "LMCache's variant of CacheBlend's rule"),
    _rule("gradual", "CacheBlend, section 4.3: gradual filtering, layers 1 to 4", blend_check_layers=[1, 2, 3, 4]),
    _rule("question_attention", "ProphetKV"),
    _rule("first_tokens", "EPIC (arXiv:2410.15332), LegoLink"),
    _rule("random", "a uniform choice"),
]

LEVERS = [
    _choice("question_attention(layer_share=1)", "ProphetKV, looking on every layer"),
    _choice("question_attention(layer_share=0.5)", "early stop: the question looks on half of the layers"),
    _choice("question_attention(first_layer=0.25)", "without the first quarter of the layers"),
    _choice("question_attention(tokens=8)", "the question's last eight tokens look"),
    _choice("question_attention(over_tokens=max)", "the most that any token of the question looks"),
    _choice("question_attention(over_heads=max)", "the most of any head"),
    _choice("question_attention(over_layers=max)", "the most of any layer"),
    _choice("question_attention(first_round=0.5)", "two rounds: half is recomputed, then the question looks again"),
    _choice("question_attention+smoothing(window=7)", "SnapKV's pooling (arXiv:2404.14469), section 4"),
    _choice("question_attention+chunk_heads(tokens=2)", "EPIC's chunk heads as a floor"),
    _choice("question_attention+chunk_minimum(tokens=2)", "a minimum for every chunk"),
    _choice("question_attention+coverage(share=0.6)", "stop at a share of the attention", 0.15, 0.30),
    _choice("question_attention+mean_shift", "AgentKVShift: the other tokens of a chunk move as those recomputed do"),
    _choice("value_deviation+mean_shift", "the same after CacheBlend's choice"),
    _encoded("bos", "Prompt Cache (Gim et al., MLSys 2024), section 3.4: no instruction before a chunk"),
    _encoded("page", "after the passages it goes on from on its page"),
    _encoded("neighbour", "FusionRAG's enrichment, by the passage before it in the prompt"),
    _encoded("ordinal", "after as many filler passages as will stand before it"),
    _encoded("ordinal_page", "the same, its page's passages in place of the last ones"),
    _encoded("ordinal_neighbour", "the same, the passage before it in the prompt in place of the last one"),
]

SETTINGS = RULES + LEVERS
