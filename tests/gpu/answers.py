"""Two answers to one prompt whose log-probabilities rounding may change."""

from __future__ import annotations

from vllm_blend.outputs import CompletionOutput


def differences(left: CompletionOutput, right: CompletionOutput) -> list[list[float]]:
    """Return by how much the log-probabilities differ of tokens that both report, for each position up to the one where
    the answers part: what follows has another context."""
    assert left.logprobs is not None and right.logprobs is not None
    found = []
    for mine, theirs, x, y in zip(left.logprobs, right.logprobs, left.token_ids, right.token_ids, strict=True):
        shared = mine.keys() & theirs.keys()
        assert shared
        found.append([mine[token].logprob - theirs[token].logprob for token in shared])
        if x != y:
            break
    return found
