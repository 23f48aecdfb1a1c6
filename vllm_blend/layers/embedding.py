"""Token embedding and the language-model head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm_blend import ops


class Embedding(nn.Module):
    """Token ids [T] int64 -> vectors [T, hidden_size]; its memory is not initialised until the loader fills it."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


class LMHead(nn.Module):
    """Hidden states [n, hidden_size] -> logits [n, vocab_size].

    The logits are float32 on a CPU and in the weight's dtype on a GPU, where a float32 copy of a large batch costs more
    than choosing its tokens. With `tied_to` the head shares that embedding's weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: Embedding | None = None) -> None:
        super().__init__()
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight
        else:
            self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = ops.linear(hidden, self.weight)
        return logits if logits.is_cuda else logits.float()
