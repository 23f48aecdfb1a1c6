"""Draw what a blend computes and what it reuses, token by token: docs/images/passages.svg.

    python scripts/draw_reuse.py

It asks the demo model twice over the same passages, the second time in another order, and draws a cell for each token:
what was computed is dark, what was reused is pale in its passage's colour.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

from vllm_blend import LLM, ChunkedPrompt, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "Answer the question from the passages.\n\n"
PASSAGES = {
    "A": "Tulmaris Works makes lenses. It was founded in Jorholm.\n\n",
    "B": "Jorholm is the capital of Brianfour, and its largest town.\n\n",
    "C": "Brianfour is known for its lenses and for its rivers.\n\n",
}
QUESTION = "Question: What does Tulmaris Works make?\nAnswer:"
COLOURS = {"prefix": "#64748b", "A": "#2563eb", "B": "#059669", "C": "#d97706", "question": "#7c3aed"}
CELL, GAP, LEFT, ROW = 8, 1, 110, 74


def computed_positions(llm: LLM, order: str) -> tuple[list[tuple[str, int]], set[int]]:
    """Ask over the passages in this order; return the pieces with their numbers of tokens, and what was computed."""
    chunks = [PASSAGES[name] for name in order]
    prompt: ChunkedPrompt = {"prefix": PREFIX, "chunks": chunks, "suffix": QUESTION}
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    sizes = [len(tokenizer.encode(piece, add_special_tokens=False)) for piece in (PREFIX, *chunks, QUESTION)]
    sizes[0] += len(output.prompt_token_ids) - sum(sizes)  # BOS
    pieces = list(zip(["prefix", *order, "question"], sizes, strict=True))
    if output.num_cached_tokens == 0:
        return pieces, set(range(sum(sizes)))
    return pieces, set(llm.llm_engine.decoder.cache_fuse_metadata["imp_indices"].tolist())


def draw(title: str, top: int, pieces: list[tuple[str, int]], computed: set[int]) -> list[str]:
    """Return the SVG of one prompt."""
    shapes = [f'<text x="8" y="{top + 22}" class="title">{escape(title)}</text>']
    shapes.append(f'<text x="8" y="{top + 38}" class="count">{len(computed)} computed</text>')
    position, left = 0, LEFT
    for name, size in pieces:
        width = size * (CELL + GAP)
        shapes.append(f'<text x="{left + width / 2:.1f}" y="{top + 6}" class="name">{escape(name)}</text>')
        for at in range(position, position + size):
            opacity = 1 if at in computed else 0.18
            x = left + (at - position) * (CELL + GAP)
            shapes.append(
                f'<rect x="{x}" y="{top + 14}" width="{CELL}" height="28" fill="{COLOURS[name]}" opacity="{opacity}"/>'
            )
        position, left = position + size, left + width + 6
    return shapes


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    llm = LLM(str(ROOT / "inputs/demo-model"), enable_blending=True, device="cpu")
    prompts = [computed_positions(llm, order) for order in ("ABC", "CAB")]
    width = LEFT + max(sum(size for _, size in pieces) for pieces, _ in prompts) * (CELL + GAP) + 40
    style = (
        "text{font-family:sans-serif;fill:#334155}.title{font-size:13px;font-weight:600}"
        ".count{font-size:11px}.name{font-size:11px;text-anchor:middle}"
    )
    shapes = [f"<style>{style}</style>", '<rect width="100%" height="100%" fill="white"/>']
    for number, (title, (pieces, computed)) in enumerate(zip(("First prompt", "Next prompt"), prompts, strict=True)):
        shapes += draw(title, 16 + number * ROW, pieces, computed)
    legend = "Dark tokens are computed, pale ones are reused: a passage keeps its KV, wherever it stands."
    shapes.append(f'<text x="{LEFT}" y="{16 + 2 * ROW}" class="count">{escape(legend)}</text>')
    path = ROOT / "docs/images/passages.svg"
    path.parent.mkdir(exist_ok=True)
    body = "\n".join(shapes)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{28 + 2 * ROW}">\n{body}\n</svg>\n', "utf-8"
    )
    print(f"{path.relative_to(ROOT)}: {[len(computed) for _, computed in prompts]} tokens computed")


if __name__ == "__main__":
    main()
