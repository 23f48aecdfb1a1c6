"""Token embedding and the language-model head; several ranks share the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm_blend import ops
from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.distributed.sharding import Layout, Share, padded_share, row_layout


class Embedding(nn.Module):
    """Token ids [T] int64 -> vectors [T, hidden_size]; its memory is not initialised until the loader fills it.

    A matrix that stays in a file's blocks is in `blocks`, and the weight has no rows.
    """

    blocks: ops.BlockMatrix | None = None

    def __init__(self, vocab_size: int, hidden_size: int, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self.ranks, self.share = ranks, padded_share(vocab_size, ranks)
        self.weight = _new_weight(self.share, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.blocks is not None:
            return ops.blocks_rows(input_ids, self.blocks, self.weight.dtype)
        if self.ranks.size == 1:
            return F.embedding(input_ids, self.weight)
        ids = input_ids - self.share.start
        is_elsewhere = (ids < 0) | (ids >= self.share.count)
        own = F.embedding(ids.masked_fill(is_elsewhere, 0), self.weight)
        return self.ranks.sum(own.masked_fill(is_elsewhere[:, None], 0))

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of the weight, if this is one rank's share of it."""
        return _layouts(self.share, self.weight)


class LMHead(nn.Module):
    """Hidden states [n, hidden_size] -> logits [n, vocab_size]; they come together on rank 0, others have [n, 0].

    The logits are float32 on a CPU and in the weight's dtype on a GPU, where a float32 copy of a large batch costs more
    than choosing its tokens. With `tied_to` the head shares that embedding's weight. A matrix that stays in a file's
    blocks is in `blocks`, and the weight has no rows.
    """

    blocks: ops.BlockMatrix | None = None

    def __init__(
        self, vocab_size: int, hidden_size: int, tied_to: Embedding | None = None, ranks: Ranks = ONE_RANK
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.ranks, self.share = ranks, padded_share(vocab_size, ranks)
        self.weight = _new_weight(self.share, hidden_size) if tied_to is None else tied_to.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        blocks = self.blocks
        logits = ops.linear(hidden, self.weight) if blocks is None else ops.blocks_linear(hidden, blocks)
        if self.ranks.size > 1:
            logits = self.ranks.gather_columns(logits)[:, : self.share.total]
        return logits if logits.is_cuda else logits.float()

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of the weight, if this is one rank's share of it."""
        return _layouts(self.share, self.weight)


def keep_blocks(matrix: ops.BlockMatrix, *layers: Embedding | LMHead) -> None:
    """Have an embedding, a head, or both that are tied, use a matrix in blocks instead of their weight."""
    for layer in layers:
        layer.blocks = matrix
        layer.weight = nn.Parameter(layer.weight.new_empty(0, layer.weight.shape[1]), requires_grad=False)


def _new_weight(share: Share, hidden_size: int) -> nn.Parameter:
    weight = torch.empty(share.count, hidden_size)
    weight[share.num_real :] = 0  # padding, which no checkpoint fills
    return nn.Parameter(weight, requires_grad=False)


def _layouts(share: Share, weight: torch.Tensor) -> dict[str, Layout]:
    if share.is_whole:
        return {}
    return {"weight": row_layout([share], weight.detach(), Share.whole(weight.shape[1]))}
