from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_blend.blend.plan import make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.chunks.retention import RetentionKey, retention_key
from vllm_blend.inputs import ParsedPrompt, StoredPiece
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint

MODEL = ModelFingerprint("model", "main", "w", "float32", "rope", "t", num_layers=3, num_kv_heads=1, head_dim=2)
IDS = list(range(12))


def piece(start: int, stop: int, context: tuple[int, ...] = (0,)) -> StoredPiece:
    return StoredPiece(start, ChunkId.from_tokens(MODEL, context, IDS[start:stop]), context)


def key_of(
    parsed: ParsedPrompt,
    rule: str = "value_deviation",
    ratio: float = 0.5,
    layers: tuple[int, ...] = (1,),
    suffix_start: int = 10,
    model: ModelFingerprint = MODEL,
) -> RetentionKey | None:
    asked = make_plan([], parsed.token_ids, suffix_start, make_selector(rule), ratio, layers, None, MODEL.num_layers)
    return retention_key(model, parsed, asked)


PROMPT = ParsedPrompt(IDS, chunk_bounds=((2, 6), (6, 10)), pieces=(piece(2, 6), piece(6, 10)), retain=None)


def test_whatever_changes_the_pages_changes_the_key() -> None:
    keys = [
        key_of(PROMPT),
        key_of(PROMPT, model=replace(MODEL, weights="other")),
        key_of(replace(PROMPT, token_ids=[7, *IDS[1:]])),
        key_of(replace(PROMPT, salt=b"salt")),
        key_of(replace(PROMPT, pieces=PROMPT.pieces[:1])),
        key_of(replace(PROMPT, pieces=(piece(2, 6), piece(6, 10, (0, 1))))),
        key_of(replace(PROMPT, chunk_bounds=((2, 10),))),
        key_of(PROMPT, suffix_start=9),
        key_of(PROMPT, "first_tokens"),
        key_of(replace(PROMPT, retain=True), "question_attention"),
        key_of(replace(PROMPT, retain=True), "question_attention(mean_shift=0)"),
        key_of(PROMPT, "random"),
        key_of(PROMPT, "random(seed=5)"),
        key_of(PROMPT, ratio=0.25),
        key_of(PROMPT, layers=(2,)),
    ]
    assert None not in keys and len({key.key for key in keys if key is not None}) == len(keys)


def test_the_question_does_not_change_the_key() -> None:
    key = key_of(PROMPT)
    assert key is not None and (key.num_tokens, key.pieces) == (10, PROMPT.pieces)
    assert key == key_of(replace(PROMPT, token_ids=[*IDS[:10], 3, 4, 5]))


@pytest.mark.parametrize("rule", ["question_attention", "question_attention(mean_shift=0)", "auto"])
def test_what_is_repaired_for_a_question_is_retained_only_if_asked_for(rule: str) -> None:
    assert key_of(PROMPT, rule) is None
    assert key_of(replace(PROMPT, retain=False), rule) is None
    assert key_of(replace(PROMPT, retain=True), rule) is not None
    assert all(key_of(PROMPT, rule, ratio) is not None for ratio in (0.0, 1.0))
