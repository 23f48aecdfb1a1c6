"""Draw what the demo model reuses and what it computes, token by token: docs/images/passages.svg and rules.svg.

    python scripts/draw_reuse.py

The first picture asks twice over the same passages, the second time in another order. The second one shows what some
rules choose for one question of `inputs/musique_s.json`, which is synthetic.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

from svg import BLUE, GREEN, IMAGES, ORANGE, PALE, SLATE, VIOLET, Picture

from vllm_blend import LLM, ChunkedPrompt, SamplingParams
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "Answer the question from the passages.\n\n"
PASSAGES = {
    "A": "Tulmaris Works makes lenses. It was founded in Jorholm.\n\n",
    "B": "Jorholm is the capital of Brianfour, and its largest town.\n\n",
    "C": "Brianfour is known for its lenses and for its rivers.\n\n",
}
QUESTION = "Question: What does Tulmaris Works make?\nAnswer:"
COLOURS = {"prefix": SLATE, "A": BLUE, "B": GREEN, "C": ORANGE, "question": VIOLET}
CELL, GAP, LEFT, ROW = 8, 1, 110, 74
DATASET, NUMBER = ROOT / "inputs/musique_s.json", 4
RULES = ["none", "first_tokens", "value_deviation", "question_attention"]
ONE = SamplingParams(temperature=0, max_tokens=1)


def computed_positions(llm: LLM, order: str) -> tuple[list[tuple[str, int]], set[int]]:
    """Ask over the passages in this order; return the pieces with their numbers of tokens, and what was computed."""
    chunks = [PASSAGES[name] for name in order]
    prompt: ChunkedPrompt = {"prefix": PREFIX, "chunks": chunks, "suffix": QUESTION}
    [output] = llm.generate(prompt, ONE, use_tqdm=False)
    pieces = list(zip(["prefix", *order, "question"], sizes(llm, prompt, len(output.prompt_token_ids)), strict=True))
    if output.num_cached_tokens == 0:
        return pieces, set(range(len(output.prompt_token_ids)))
    return pieces, set(llm.llm_engine.decoder.cache_fuse_metadata["imp_indices"].tolist())


def sizes(llm: LLM, prompt: ChunkedPrompt, total: int) -> list[int]:
    """Return the numbers of tokens of the prefix, each chunk and the suffix of a prompt of `total` tokens."""
    tokenizer = llm.get_tokenizer()
    pieces = (prompt["prefix"], *prompt["chunks"], prompt["suffix"])
    counts = [len(tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces]
    counts[0] += total - sum(counts)  # BOS
    return counts


def draw_orders(llm: LLM) -> Picture:
    """Draw two prompts with the same passages in another order."""
    prompts = [computed_positions(llm, order) for order in ("ABC", "CAB")]
    width = LEFT + max(sum(size for _, size in pieces) for pieces, _ in prompts) * (CELL + GAP) + 40
    picture = Picture(width, 28 + 2 * ROW)
    for number, (title, (pieces, computed)) in enumerate(zip(("First prompt", "Next prompt"), prompts, strict=True)):
        top, position, left = 16 + number * ROW, 0, LEFT
        picture.words(8, top + 22, title, "title")
        picture.words(8, top + 38, f"{len(computed)} computed")
        for name, size in pieces:
            span = size * (CELL + GAP)
            picture.words(left + span / 2, top + 6, name, "middle")
            for at in range(size):
                x, opacity = left + at * (CELL + GAP), 1 if position + at in computed else PALE
                picture.box(x, top + 14, CELL, 28, COLOURS[name], opacity)
            position, left = position + size, left + span + 6
    legend = "Dark tokens are computed, pale ones are reused: a passage keeps its KV, wherever it stands."
    picture.words(LEFT, 16 + 2 * ROW, legend)
    return picture


def draw_rules(llm: LLM) -> Picture:
    """Draw one prompt under several rules: a row for each, where a token is 1.7 pixels wide."""
    sample = normalize_sample(load_dataset(DATASET)[NUMBER], NUMBER)
    gold = sample.gold or ()
    prompt = build_qa_prompt(sample, DATASET)
    llm.generate([prompt], ONE, use_tqdm=False)  # stores the chunks
    rows = []
    for rule in RULES:
        asked = prompt | {"blend_selector": rule} | ({"blend_recompute_ratio": 0.15} if rule != "none" else {})
        [output] = llm.generate([asked], ONE, use_tqdm=False)
        assert output.blend is not None
        rows.append((rule, output.blend.token_kinds))
    counts = sizes(llm, prompt, len(rows[0][1]))
    cell, left = 1.7, 150
    picture = Picture(round(left + sum(counts) * cell + 2.0 * len(counts) + 20), 92 + 30 * len(rows))
    picture.words(8, 16, f"“{sample.question}”", "title")
    for index, (rule, kinds) in enumerate(rows):
        y, x, position = 46 + 30 * index, float(left), 0
        picture.words(left - 10, y + 14, "none (plain reuse)" if rule == "none" else rule, "end")
        for piece, count in enumerate(counts):
            is_gold = 0 < piece <= len(sample.passages) and piece - 1 in gold
            if index == 0 and is_gold:
                picture.box(x, y - 8, count * cell, 3, ORANGE)
            for kind, run in groupby(kinds[position : position + count]):
                width = len(list(run)) * cell
                fill = VIOLET if piece == len(counts) - 1 else BLUE if kind == "c" else SLATE
                picture.box(x, y, width, 20, fill, 1.0 if kind == "c" else 0.25)
                x += width
            x, position = x + 2, position + count
    entries = [(BLUE, 1.0, "computed in place"), (SLATE, 0.25, "reused"), (VIOLET, 1.0, "the question")]
    picture.legend(left, 46 + 30 * len(rows) + 24, [*entries, (ORANGE, 1.0, "passages that hold the answer")])
    return picture


def demo_llm() -> LLM:
    return LLM(str(ROOT / "inputs/demo-model"), enable_blending=True, device="cpu", dtype="float32")


PICTURES = {"passages.svg": draw_orders, "rules.svg": draw_rules}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    llm = demo_llm()
    for name, draw in PICTURES.items():
        print(draw(llm).save(name).relative_to(IMAGES.parents[1]))


if __name__ == "__main__":
    main()
