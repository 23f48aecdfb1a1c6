"""The settings of the sweep: selectors, then levers, each with its paper. To sweep another one, add a `Setting` to a
list.

A lever on the choice is a part of `blend_selector` (see blend/selectors/spec.py). A setting that changes what is stored
has arguments of the engine: an engine is started for each combination of those, and all chunks are encoded again.
Selectors, levers and encoding contexts that are registered and not listed here are swept with their defaults.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vllm_blend.blend.encoding_contexts import ENCODING_CONTEXTS
from vllm_blend.blend.selectors import AUTO, BEST, SELECTORS
from vllm_blend.blend.selectors.levers import LEVERS as SELECTOR_LEVERS
from vllm_blend.blend.selectors.relevant_passages import RelevantPassages
from vllm_blend.quality.arrangements import nearest_passage, relevant_first, with_pages
from vllm_blend.quality.only_chosen import keep_chosen_pages, keep_gold_passages, keep_ranked_pages
from vllm_blend.quality.oracle_sentences import (
    rank_gold_first_sentences,
    rank_gold_names_then_sentences,
    rank_gold_sentences,
)
from vllm_blend.quality.oracles import (
    gold_relevance,
    rank_answer_passages,
    rank_attended_passages,
    rank_gold_names,
    rank_gold_passages,
    rank_gold_then_attention,
    rank_true_attention,
)
from vllm_blend.quality.settings import Arrange, Rank, Setting

RATIOS = (0.0, 0.02, 0.05, 0.08, 0.10, 0.15, 0.20, 0.30, 1.0)
QUICK_RATIOS = (0.0, 0.08, 0.15, 1.0)
RELEVANT_PASSAGES = "relevant_passages"  # the selector of sentences in relevant passages
GOALS = (0.02, 0.08, 0.15)  # levers are compared at these: about 8, 14 and 21% of the token-layers, in all


def _rule(selector: str, paper: str, **engine: Any) -> Setting:
    return Setting(selector, {"blend_selector": selector}, engine, paper=paper)


def _choice(selector: str, paper: str, *ratios: float) -> Setting:
    return Setting(selector, {"blend_selector": selector}, paper=paper, ratios=ratios or GOALS)


def _encoded(after: str, paper: str, arrange: Arrange | None = None, selector: str = "question_attention") -> Setting:
    engine, prompt = {"blend_encoding_context": after}, {"blend_selector": selector}
    return Setting(f"{selector}, after {after}", prompt, engine, arrange, paper, ratios=(0.0, *GOALS))


CACHEBLEND = _rule("value_deviation", "CacheBlend (Yao et al., arXiv:2405.16444), section 4.3")

RULES = [
    CACHEBLEND,
    _rule("key_deviation", "LMCache's variant of CacheBlend's rule"),
    _rule("gradual", "CacheBlend, section 4.3: gradual filtering, layers 1 to 4", blend_check_layers=[1, 2, 3, 4]),
    _rule("question_attention", "ProphetKV"),
    _rule("late_attention", "ProphetKV, looking on the last third of the layers"),
    _rule(BEST, "`auto`: with AgentKVShift's correction"),
    _rule(RELEVANT_PASSAGES, "sentences of the passages that the question's words lead to"),
    _rule("first_tokens", "EPIC (arXiv:2410.15332), LegoLink"),
    _rule("attention_deviation", "question attention times CacheBlend's deviation"),
    _rule("random", "a uniform choice"),
]

LEVERS = [
    _choice("question_attention(layer_share=1)", "ProphetKV, looking on every layer"),
    _choice("question_attention(layer_share=0.5)", "early stop: the question looks on half of the layers"),
    _choice("question_attention(first_layer=0.25)", "without the first quarter of the layers"),
    _choice("question_attention(tokens=8)", "the question's last eight tokens look"),
    _choice("question_attention(over_tokens=max)", "the maximum over the question's tokens"),
    _choice("question_attention(over_heads=max)", "the maximum over heads"),
    _choice("question_attention(over_layers=max)", "the maximum over layers"),
    _choice("question_attention(first_round=0.5)", "two rounds: half is recomputed, then the question looks again"),
    _choice("question_attention+smoothing(window=7)", "SnapKV's pooling (arXiv:2404.14469), section 4"),
    _choice("question_attention+chunk_heads(tokens=2)", "EPIC's chunk heads as a floor"),
    _choice("question_attention+chunk_minimum(tokens=2)", "a minimum for every chunk"),
    _choice("question_attention+coverage(share=0.6)", "stop at a share of the attention", 0.15, 0.30),
    _choice("question_attention+mean_shift", "AgentKVShift: the other tokens of a chunk move as those recomputed do"),
    _choice("value_deviation+mean_shift", "the same after CacheBlend's choice"),
    _choice(
        "late_attention(over_tokens=max, over_heads=max, over_layers=max)+mean_shift",
        "the maximum over tokens, heads and layers in place of the mean",
    ),
    *(
        _encoded(after, "both together", with_pages, selector)
        for selector in ("question_attention+mean_shift", BEST)
        for after in ("page", "ordinal_page")
    ),
    Setting(
        "question_attention, relevant pages first",
        {"blend_selector": "question_attention"},
        arrange=relevant_first,
        paper="BM25's best pages first, where chunks are exact",
        ratios=(0.0, *GOALS),
    ),
    _choice(f"{RELEVANT_PASSAGES}+mean_shift", "with AgentKVShift's correction of chunks that are computed in part"),
    *(
        Setting(
            f"{selector}, order free",
            {"blend_selector": selector, "order": "free"},
            arrange=with_pages,
            paper="the pages that the question's words lead to first, where they are exact; 100% is full prefill so",
            ratios=(0.0, *GOALS, 1.0),
        )
        for selector in (RELEVANT_PASSAGES, AUTO)
    ),
    _encoded("bos", "Prompt Cache (Gim et al., MLSys 2024), section 3.4: no instruction before a chunk"),
    _encoded("page", "after the passages that it continues on its page", with_pages),
    _encoded("page", "the same, and the rule sees which passages are a page", with_pages, RELEVANT_PASSAGES),
    _encoded("neighbour", "after the passage before it in the prompt"),
    _encoded("given", "FusionRAG's enrichment: after the passage that BM25 finds nearest", nearest_passage),
    _encoded("ordinal", "after as many filler passages as will stand before it"),
    _encoded("ordinal_page", "the same, its page's passages in place of the last ones", with_pages),
    _encoded("ordinal_neighbour", "the same, the passage before it in the prompt in place of the last one"),
]


def _first_sentence(kind: type[Any]) -> str:
    """Return the first sentence of a class's docstring, on one line."""
    return " ".join((kind.__doc__ or "").split(". ")[0].split()).rstrip(".")


def _is_listed(name: str) -> bool:
    listed = [*RULES, *LEVERS]
    texts = [str(value) for setting in listed for value in (*setting.prompt.values(), *setting.engine.values())]
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)


RULES += [
    _rule(name, _first_sentence(rule))
    for name, rule in SELECTORS.items()
    if rule.fixed_ratio is None and not _is_listed(name)
]
LEVERS += [
    _choice(f"question_attention+{name}", _first_sentence(lever))
    for name, lever in SELECTOR_LEVERS.items()
    if not _is_listed(name)
]
LEVERS += [
    _encoded(name, _first_sentence(context))
    for name, context in ENCODING_CONTEXTS.items()
    if name != "prefix" and not _is_listed(name)
]
SETTINGS = RULES + LEVERS

_GOLD = "oracle: gold passages"
_DAMPING = RelevantPassages().damping


def _oracle(name: str, rank: Rank, paper: str) -> list[Setting]:
    """Return an oracle, and the same with damping."""
    plain = Setting(name, paper=paper, rank=rank)
    damped = "the same, and the keys of passages of which nothing is computed are damped as by the rule"
    return [plain, replace(plain, name=f"{name}, others damped", paper=damped, damping=_DAMPING)]


# The ceilings of all rules: measured by `held_out` beside them, and no part of `SETTINGS`.
ORACLES = [
    Setting(
        "oracle: answer's passages", paper="whole, with those that their page continues from", rank=rank_answer_passages
    ),
    *_oracle(_GOLD, rank_gold_passages, "also those that lead to the answer's"),
    *_oracle(
        "oracle: gold sentences", rank_gold_sentences, "the same, what matters most first, then the rest of their pages"
    ),
    *_oracle("oracle: first sentences of gold passages", rank_gold_first_sentences, "and no others"),
    *_oracle("oracle: names in gold passages", rank_gold_names, "names, numbers and the answer"),
    *_oracle(
        "oracle: names, then gold sentences",
        rank_gold_names_then_sentences,
        "the same, and what is left of the budget as for gold sentences",
    ),
    Setting(
        f"{_GOLD}+mean_shift",
        paper="the same, and the other tokens of their chunks move as AgentKVShift says",
        rank=rank_gold_passages,
        levers="+mean_shift",
    ),
    *_oracle(
        f"{_GOLD}, then true attention",
        rank_gold_then_attention,
        "what is left of the budget goes to the tokens that the question looks at",
    ),
    *_oracle("oracle: true attention", rank_true_attention, "question attention in full prefill"),
    *_oracle("oracle: attended passages", rank_attended_passages, "the same, summed per passage"),
    Setting("only gold passages", paper="a prompt of the gold passages alone, in full", keep=keep_gold_passages),
]
# What competes with rules that damp, also beside them.
ONLY_CHOSEN = [
    Setting(
        "only chosen pages",
        paper=f"a prompt of the pages of which `{RELEVANT_PASSAGES}` would compute anything, in full",
        keep=keep_chosen_pages,
    ),
    Setting(
        "only ranked pages",
        paper=f"a prompt of the pages that `{RELEVANT_PASSAGES}` ranks first and the budget holds, in full",
        keep=keep_ranked_pages,
    ),
]
if RELEVANT_PASSAGES in SELECTORS:
    ORACLES.append(
        Setting(
            f"{RELEVANT_PASSAGES}, gold given",
            {"blend_selector": RELEVANT_PASSAGES},
            arrange=gold_relevance,
            paper="the rule itself, with relevance 1 for the gold passages and 0 for others",
        )
    )
