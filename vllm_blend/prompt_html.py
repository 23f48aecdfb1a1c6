"""A prompt as HTML for notebooks: each token on the colour of what was done for it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

MAX_SHOWN_TOKENS = 4000  # a notebook keeps every output in its file
# Letters of `BlendStats.token_kinds`, with their meaning and colour: transparent, to be readable on dark pages too.
KINDS = {
    "e": ("exact: found where it was encoded", "rgba(46, 160, 67, 0.30)"),
    "r": ("reused: found, and placed here", "rgba(56, 139, 253, 0.28)"),
    "n": ("encoded for this prompt, then reused", "rgba(140, 140, 140, 0.25)"),
    "c": ("computed in place", "rgba(247, 129, 2, 0.45)"),
}


def prompt_html(title: str, kinds: str, texts: Sequence[str], answers: Sequence[tuple[str, str]]) -> str:
    """Return a `<div>`: the title and a legend, the prompt, and the answers, each with why it ended.

    `kinds` has a letter, a key of `KINDS`, for every token of the prompt; `texts` the text of each of the first tokens.
    Everything is escaped.
    """
    legend = " ".join(_on_colour(kind, f"{kinds.count(kind)} {KINDS[kind][0]}") for kind in KINDS if kind in kinds)
    tokens = zip(kinds, texts, strict=False)
    spans = [
        _on_colour(kind, "".join(text for _, text in run)) for kind, run in groupby(tokens, key=lambda pair: pair[0])
    ]
    left = f" … and {len(kinds) - len(texts)} more tokens" if len(texts) < len(kinds) else ""
    ends = "".join(f"<br><b>{escape(text)}</b> <small>({escape(end)})</small>" for text, end in answers)
    return (
        f"<div><small>{escape(title)}: {legend}</small>"
        f'<div style="white-space:pre-wrap;font-family:monospace;line-height:1.5">{"".join(spans)}{left}</div>'
        f"{ends}</div>"
    )


def _on_colour(kind: str, text: str) -> str:
    return f'<span style="background:{KINDS[kind][1]}" title="{KINDS[kind][0]}">{escape(text)}</span>'
