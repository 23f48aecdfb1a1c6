from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import settings
from vllm_blend import ops
from vllm_blend.ops.token_masks import words_for

DEVICE = settings.current().torch_device


@given(st.integers(1, 130), st.integers(1, 5), st.randoms(use_true_random=False))
def test_tokens_that_a_mask_forbids_are_excluded_and_nothing_else_changes(
    vocab_size: int, num_rows: int, chance: object
) -> None:
    generator = torch.Generator().manual_seed(chance.getrandbits(32))  # type: ignore[attr-defined]
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(DEVICE)
    masked = torch.rand(num_rows, generator=generator) < 0.6
    masked[0] = True
    allowed = torch.rand(num_rows, words_for(vocab_size) * 32, generator=generator) < 0.5
    rows = masked.nonzero().flatten()
    words = torch.tensor([[_word(bits) for bits in row.split(32)] for row in allowed[rows]], dtype=torch.int64).to(
        torch.int32
    )
    expected = logits.clone()
    for row in rows.tolist():
        for token in range(vocab_size):
            if not allowed[row, token]:
                expected[row, token] = -torch.inf
    ops.keep_allowed(logits, rows.to(DEVICE), words.to(DEVICE))
    assert torch.equal(logits, expected)


def _word(bits: torch.Tensor) -> int:
    word = sum(1 << place for place, bit in enumerate(bits.tolist()) if bit)
    return word - (word >= 1 << 31) * (1 << 32)
