"""The key that the pages of a blended context are retained under, and where its chunks stand in them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, is_dataclass

import numpy as np

from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import LooksAt
from vllm_blend.inputs import ParsedPrompt, StoredPiece
from vllm_blend.kv_store.keys import ModelFingerprint


@dataclass(frozen=True)
class RetentionKey:
    """The key that the pages of a blended context are retained under, which covers the model, the context's tokens, its
    chunks and how it is blended. The context has `num_tokens` tokens, so the suffix starts there."""

    key: bytes
    num_tokens: int
    pieces: tuple[StoredPiece, ...] = ()


def retention_key(model: ModelFingerprint, parsed: ParsedPrompt, asked: BlendPlan) -> RetentionKey | None:
    """Return what the pages of a prompt's blended context are retained under: the model, the salt, the context's
    tokens, which of them are stored and what they were encoded after, and how it is blended. The question is no part of
    it.

    None if they are not. Unless the prompt says so, a context that was repaired for one question is not taken for
    another: what question attention repairs serves its own question alone.
    """
    selector = asked.selector
    by_question = selector.looks_at is LooksAt.QUESTION and 0 < asked.shares[-1] < 1
    retain = not by_question if parsed.retain is None else parsed.retain
    if not retain:
        return None
    context = parsed.token_ids[: asked.suffix_start]
    settings = {
        "model": model.digest,
        "salt": parsed.salt.hex(),
        "pieces": [(piece.start, piece.id.key) for piece in parsed.pieces],
        "bounds": parsed.chunk_bounds,
        "selector": [selector.name, repr(asdict(selector)) if is_dataclass(selector) else ""],
        "shares": asked.shares,
        "layers": asked.check_layers,
    }
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    digest.update(np.asarray(context, np.int64).tobytes())
    return RetentionKey(digest.digest(), len(context), parsed.pieces)
