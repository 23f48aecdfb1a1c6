"""Drawing tokens: temperature, min-p, top-k and top-p, then one uniform number a row.

Every filter is a threshold on the scaled logit, so tokens of equal logit stay or go together, and a row's outcome
depends neither on the order in which a sort leaves ties nor on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vllm_blend.sampling_params import SamplingParams


def draw_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [rows] int64 drawn from logits [rows, vocabulary] float32 by inverting each row's cumulative distribution.

    `uniforms` [rows] float64 in [0, 1) are on the host. Rows without a finite logit give an undefined token.
    """
    device = logits.device
    host = torch.tensor([(p.temperature, *_limits(p, logits.shape[-1])) for p in params], dtype=torch.float64)
    settings = torch.cat([host, uniforms.unsqueeze(1)], dim=1).to(device, non_blocking=True)
    temperature, log_min_p, top_k, top_p, uniform = settings.unbind(1)
    # a tiny temperature must not turn the best logit into inf: take the maximum off first
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.float().unsqueeze(1)
    floor = log_min_p.float()  # the best scaled logit is 0
    sorted_rows = [r for r, (_, _, k, p) in enumerate(host.tolist()) if k < logits.shape[-1] or p < 1.0]
    if sorted_rows:
        rows = torch.tensor(sorted_rows).to(device, non_blocking=True)
        values = _descending(scaled[rows], int(host[sorted_rows, 2].max()))
        floor[rows] = _threshold(values, floor[rows], top_k[rows], top_p[rows])
    scaled.masked_fill_(scaled < floor.unsqueeze(1), -torch.inf)
    cumulative = scaled.exp_().cumsum(-1, dtype=torch.float64)
    # NOTE: a float64 below 1 times the total rounds to less than the total, so the last likely token is never overshot
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _limits(params: SamplingParams, vocab_size: int) -> tuple[float, float, float]:
    """(log of min_p, top_k, top_p) with values that keep everything where a filter is off."""
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    return log_min_p, top_k, params.top_p if params.top_p < 1.0 else 2.0  # 2: out of reach of rounding


def _descending(scaled: torch.Tensor, num_values: int) -> torch.Tensor:
    """The largest `num_values` of each row, largest first."""
    if num_values < scaled.shape[-1]:
        return scaled.topk(num_values, dim=-1).values
    return scaled.sort(dim=-1, descending=True).values


def _threshold(values: torch.Tensor, floor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least scaled logit kept in each row [rows], of `values` [rows, n] in descending order.

    First min-p (`floor`), then the `top_k` best, then the fewest of these that hold a share `top_p` of their mass
    (nucleus sampling, Holtzman et al., ICLR 2020).
    """
    ranks = torch.arange(values.shape[-1], device=values.device)
    kept = (ranks < top_k.unsqueeze(1)) & (values >= floor.unsqueeze(1))
    weights = values.exp().masked_fill_(~kept, 0.0).double()
    cumulative = weights.cumsum(-1)
    kept &= cumulative - weights < top_p.unsqueeze(1) * cumulative[:, -1:]
    last = kept.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return values.gather(1, last).squeeze(1)
