"""What goes with chunks that are stored compressed, and what does not."""

from __future__ import annotations

from vllm_blend.blend.selectors import LooksAt, Selector
from vllm_blend.blend.selectors.spec import Composed


def check_selector(selector: Selector, num_layers: int) -> None:
    """Raise ValueError naming both options unless a rule can choose among the tokens of compressed chunks."""
    reason = _reason_against(selector, num_layers)
    if reason is not None:
        raise ValueError(
            f"blend_selector={selector.name!r} and blend_chunk_kept_share exclude each other, as {reason}: use "
            "question_attention, or another rule that compares nothing with what is stored, or leave one of them out"
        )


def _reason_against(selector: Selector, num_layers: int) -> str | None:
    if selector.looks_at not in (LooksAt.POSITIONS, LooksAt.QUESTION):
        return "the rule compares stored KV with computed KV, of which heads have kept different parts"
    corrects = selector.mean_shift() or selector.temperature()
    if isinstance(selector, Composed) or corrects:
        return "levers are for chunks that are whole"
    if selector.looks_at is LooksAt.QUESTION:
        if selector.first_share():
            return "the question looks once at such chunks (first_round)"
        if not selector.look(num_layers).is_plain:
            return "means are taken of how the question looks at such chunks (over_tokens, over_heads, over_layers)"
    return None
