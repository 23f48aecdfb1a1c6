"""Draw the pictures of docs/concepts.md that need no model: docs/images/{step,mask,placing,parts,tiers,heads}.svg.

python scripts/draw_concepts.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from svg import BLUE, EMPTY, GREEN, IMAGES, ORANGE, PALE, RED, SLATE, VIOLET, Picture

CELL, GAP = 16, 2
PITCH = CELL + GAP
REUSED, COMPUTED = PALE, 1.0


def draw_step() -> Picture:
    """Draw one step as a set of (request, position) tokens: what is in the cache, and what the step computes."""
    blended = {3, 4, 11, 12, 13, 20, 21, 22, 23}
    rows = [  # label, positions in the cache or computed now, positions computed now
        ("full prefill", 14, set(range(14))),
        ("chunked prefill", 18, set(range(10, 18))),
        ("prefix-cache hit", 17, set(range(12, 17))),
        ("blend", 24, blended),
        ("decode", 20, {19}),
        ("speculative verify", 19, {15, 16, 17, 18}),
    ]
    picture, left = Picture(600, 60 + 28 * len(rows)), 140
    for row, (label, stop, computed) in enumerate(rows):
        y = 14 + 28 * row
        picture.words(left - 10, y + 12, label, "end")
        for at in range(24):
            fill, opacity = (BLUE, COMPUTED) if at in computed else (SLATE, 0.35) if at < stop else (EMPTY, 0.4)
            picture.box(left + at * PITCH, y, CELL, CELL, fill, opacity)
    y = 14 + 28 * len(rows)
    picture.words(left, y + 6, "position 0, 1, 2, ...")
    legend = [(BLUE, COMPUTED, "computed in this step"), (SLATE, 0.35, "K and V in the cache"), (EMPTY, 0.4, "empty")]
    picture.legend(left, y + 32, legend)
    return picture


def draw_mask() -> Picture:
    """Draw which keys scattered queries see by the exact mask, and by a bottom-right causal one."""
    keys, queries = 16, [2, 3, 8, 12, 13, 14, 15]
    picture = Picture(2 * keys * PITCH + 190, 44 + len(queries) * PITCH + 50)
    for side, title in enumerate(("key position <= query position (exact)", "bottom-right causal (wrong)")):
        left = 90 + side * (keys * PITCH + 60)
        picture.words(left, 16, title, "title")
        for row, position in enumerate(queries):
            y = 40 + row * PITCH
            picture.words(left - 6, y + 12, f"{position}", "end")
            last = position if side == 0 else keys - len(queries) + row
            for key in range(keys):
                seen, future = key <= last, key > position
                fill = RED if seen and future else GREEN if seen else EMPTY
                picture.box(left + key * PITCH, y, CELL, CELL, fill, 1.0 if seen else 0.4)
    picture.words(4, 16, "query at")
    picture.words(4, 30, "position")
    y = 40 + len(queries) * PITCH
    picture.words(90, y + 14, "keys, by position")
    picture.legend(
        90,
        y + 38,
        [(GREEN, 1.0, "seen, as it should be"), (RED, 1.0, "seen, but in the future"), (EMPTY, 0.4, "not seen")],
    )
    return picture


def draw_placing() -> Picture:
    """Draw a chunk that is encoded once and placed into prompts, where recomputed tokens overwrite what was placed."""
    picture, size = Picture(830, 262), 14
    pitch = size + 2

    def strip(x: float, y: float, pieces: list[tuple[str, int, set[int]]]) -> None:
        for fill, count, computed in pieces:
            for at in range(count):
                picture.box(x + at * pitch, y, size, 22, fill, COMPUTED if at in computed else REUSED)
            x += count * pitch + 5

    picture.words(10, 20, "1  Encode once", "title")
    picture.words(10, 36, "a forward of the passage behind a fixed context")
    strip(10, 46, [(SLATE, 3, {0, 1, 2}), (GREEN, 7, set(range(7)))])
    picture.arrow(200, 57, 385, 57)
    picture.words(400, 20, "2  Store", "title")
    picture.words(400, 36, "K before RoPE, and V, of all layers; the key is the content")
    strip(400, 46, [(GREEN, 7, set())])
    picture.words(10, 104, "3  Place", "title")
    picture.words(10, 120, "K is rotated to the positions where it stands, written into pages of the request's own")
    picture.words(10, 176, "4  Recompute", "title")
    picture.words(10, 192, "the tokens that a rule chooses are computed in place, and overwrite K and V in these pages")
    suffix = {0, 1, 2, 3}
    for y, chosen in ((128, False), (200, True)):
        first = [(SLATE, 3, set()), (BLUE, 8, {5, 6} if chosen else set()), (GREEN, 7, {0, 1, 4} if chosen else set())]
        second = [(SLATE, 3, set()), (GREEN, 7, set()), (ORANGE, 6, {2, 3} if chosen else set())]
        strip(10, y, [*first, (VIOLET, 4, suffix if chosen else set())])
        strip(400, y, [*second, (VIOLET, 4, suffix if chosen else set())])
    legend = [
        (GREEN, COMPUTED, "computed"),
        (GREEN, REUSED, "reused"),
        (VIOLET, COMPUTED, "the question: always computed"),
    ]
    picture.legend(10, 250, legend)
    return picture


def draw_parts() -> Picture:
    """Draw a blend of more rows than a step takes, which is computed in parts while running requests decode."""
    picture, left, width = Picture(720, 170), 110, 110
    for step in range(5):
        x = left + step * (width + 10)
        picture.words(x + width / 2, 16, f"step {step + 1}", "middle")
        picture.box(x, 24, width, 96, EMPTY, 0.35)
        for row in range(3):
            picture.box(x + 6, 30 + 16 * row, 12, 12, ORANGE)
        if 0 < step < 4:
            count = (32, 32, 20)[step - 1]
            for at in range(count):
                picture.box(x + 26 + (at % 8) * 10, 30 + (at // 8) * 10, 8, 8, BLUE)
            if step == 3:
                for at in range(4):
                    picture.box(x + 26 + at * 10, 60, 8, 8, VIOLET)
        if step == 4:
            picture.box(x + 6, 78, 12, 12, VIOLET)
    picture.words(8, 50, "running requests")
    picture.words(8, 66, "get a token a step")
    picture.words(8, 96, "a long blend")
    picture.legend(
        8,
        152,
        [
            (ORANGE, 1.0, "decode"),
            (BLUE, 1.0, "chosen tokens, in order of position"),
            (VIOLET, 1.0, "question, answer"),
        ],
    )
    return picture


def draw_tiers() -> Picture:
    """Draw the places where a chunk can lie, from fast and small to slow and large."""
    tiers = [
        ("device", "blend_chunk_cache_gib", BLUE),
        ("host", "pinned; layer by layer", GREEN),
        ("disk", "chunk_store_path", ORANGE),
        ("server", "chunk_store_url", VIOLET),
    ]
    picture = Picture(760, 150)
    for index, (name, what, fill) in enumerate(tiers):
        x = 10 + index * 190
        picture.box(x, 20, 150, 56, fill, PALE, line=fill)
        picture.words(x + 75, 44, name, "title middle")
        picture.words(x + 75, 62, what, "middle")
        if index:
            picture.arrow(x - 38, 48, x - 2, 48, both=True)
    picture.words(10, 104, "fast, small")
    picture.words(730, 104, "slow, large, shared", "end")
    picture.arrow(80, 100, 610, 100)
    picture.words(10, 132, "A chunk that is missing, damaged or too late is computed instead.")
    return picture


def draw_heads() -> Picture:
    """Draw what KV-Compress leaves: every head keeps as many KVs as it needs, in pages of its own."""
    picture, pages, page = Picture(640, 190), 6, 4
    kept = (6, 2, 4, 1)
    for side, title in enumerate(("before", "after eviction")):
        left = 70 + side * 300
        picture.words(left, 18, title, "title")
        for head, count in enumerate(kept):
            y = 30 + head * 30
            if side == 0:
                picture.words(left - 8, y + 14, f"head {head}", "end")
            for number in range(pages):
                held = side == 0 or number < count
                x = left + number * 42
                picture.box(x, y, 38, 20, BLUE if held else EMPTY, PALE if held else 0.3, line=BLUE if held else "none")
                tokens = page if side == 0 or number < count - 1 else page - head % 3 if held else 0
                for at in range(tokens):
                    picture.box(x + 3 + at * 9, y + 5, 6, 10, BLUE)
    picture.legend(
        70, 172, [(BLUE, PALE, "page of one head"), (BLUE, 1.0, "KV of a token"), (EMPTY, 0.3, "page given back")]
    )
    return picture


PICTURES = {
    "step.svg": draw_step,
    "mask.svg": draw_mask,
    "placing.svg": draw_placing,
    "parts.svg": draw_parts,
    "tiers.svg": draw_tiers,
    "heads.svg": draw_heads,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, draw in PICTURES.items():
        path: Path = draw().save(name)
        print(path.relative_to(IMAGES.parents[1]))


if __name__ == "__main__":
    main()
