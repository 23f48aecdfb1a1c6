"""Choosing tokens: the largest logit, or a draw after temperature, min-p, top-k and top-p, by one uniform number a row.

Every filter is a threshold on the scaled logit, so tokens of equal logit stay or go together, and a row's outcome
depends neither on the order in which a sort leaves ties nor on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_blend.ops import cuda_sampling
from vllm_blend.ops.host_copy import to_device

# In place of a token: the row's largest logit is NaN or infinite; it is so only after the logits were changed
BROKEN, NONE_LEFT = -1, -2
MAX_ELEMENTS_AT_ONCE = 2**24  # of logits: bounds the temporary memory of long prompts and large batches


@dataclass(frozen=True)
class DrawSettings:
    """How the rows of a batch choose their tokens. Made once for as long as the batch stays the same."""

    values: torch.Tensor  # [rows, 4] float64 on the host: temperature (0: greedy), log of min_p, top_k, top_p
    on_device: torch.Tensor
    random_rows: torch.Tensor  # [n] int64 on the host, ascending
    any_filtered: bool  # whether a random row has min-p, top-k or top-p
    any_unfiltered: bool  # whether another row has none, or is greedy

    @classmethod
    def make(cls, values: NDArray[np.float64], vocab_size: int, device: torch.device) -> DrawSettings:
        """values [rows, 4]: temperature, log of min_p, top_k, top_p; -inf, infinity and 2 turn the filters off."""
        random = values[:, 0] > 0
        filtered = random & ((values[:, 1] > -np.inf) | (values[:, 2] < vocab_size) | (values[:, 3] < 1.0))
        host = torch.from_numpy(values)
        indices = torch.from_numpy(random.nonzero()[0])
        return cls(host, to_device(host, device), indices, bool(filtered.any()), not bool(filtered.all()))


def sample_tokens(logits: torch.Tensor, settings: DrawSettings, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Return tokens [rows] int64 of logits [rows, vocabulary]; `BROKEN` for a row whose largest logit is NaN or
    infinite.

    A random row's token inverts its cumulative distribution at its number in `uniforms` [rows] float64, in [0, 1), on
    the logits' device (None when all rows are greedy). The first of several largest logits is the greedy token.
    """
    if cuda_sampling.accepts(logits):
        kinds = (settings.any_filtered, settings.any_unfiltered)
        return cuda_sampling.sample_tokens(logits, settings.on_device, uniforms, *kinds)
    return sample_tokens_reference(logits, settings, uniforms)


def sample_tokens_reference(
    logits: torch.Tensor, settings: DrawSettings, uniforms: torch.Tensor | None
) -> torch.Tensor:
    best = logits.max(dim=-1)  # NaN and +inf win, so the maximum tells whether the row is usable
    usable = best.values.isfinite()
    tokens = best.indices
    for group in _groups(settings.random_rows, logits.shape[-1]):
        assert uniforms is not None
        rows = group.to(logits.device)
        tokens[rows] = _draw(logits[rows].float(), settings.values[group], uniforms[rows])
    return torch.where(usable, tokens, BROKEN)


def resample_tokens(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    changed: torch.Tensor,
    settings: DrawSettings,
    uniforms: torch.Tensor | None,
) -> None:
    """Replace the tokens of `rows` [n] int64, in place, by those of `changed` [n, vocabulary], as `sample_tokens` does.

    `tokens` and `uniforms` are those of the whole batch. A row that is `BROKEN` stays so; `NONE_LEFT` is for one whose
    changed logits allow no token.
    """
    if cuda_sampling.accepts(changed):
        kinds = (settings.any_filtered, settings.any_unfiltered)
        cuda_sampling.sample_tokens(changed, settings.on_device, uniforms, *kinds, tokens, rows)
    else:
        resample_tokens_reference(tokens, rows, changed, settings, uniforms)


def resample_tokens_reference(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    changed: torch.Tensor,
    settings: DrawSettings,
    uniforms: torch.Tensor | None,
) -> None:
    chosen = sample_tokens_reference(changed, settings, None if uniforms is None else uniforms[rows])
    chosen = torch.where(chosen == BROKEN, NONE_LEFT, chosen)
    tokens[rows] = torch.where(tokens[rows] == BROKEN, BROKEN, chosen)


def _groups(rows: torch.Tensor, vocab_size: int) -> Iterator[torch.Tensor]:
    """Return `rows` in groups whose logits stay below the bound on temporary memory."""
    return iter(rows.split(max(1, MAX_ELEMENTS_AT_ONCE // vocab_size)) if len(rows) else ())


def _draw(logits: torch.Tensor, settings: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return tokens of random rows: float32 logits, settings [rows, 4] on the host. A row without a finite logit gives
    any."""
    temperature, log_min_p, top_k, top_p = settings.to(logits.device, non_blocking=True).unbind(1)
    # a tiny temperature must not turn the best logit into inf: take the maximum off first
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.float().unsqueeze(1)
    floor = log_min_p.float()  # the best scaled logit is 0
    sorted_rows = [r for r, (_, _, k, p) in enumerate(settings.tolist()) if k < logits.shape[-1] or p < 1.0]
    if sorted_rows:
        rows = torch.tensor(sorted_rows).to(logits.device, non_blocking=True)
        most = min(settings[sorted_rows, 2].max().item(), logits.shape[-1])
        floor[rows] = _threshold(_descending(scaled[rows], int(most)), floor[rows], top_k[rows], top_p[rows])
    scaled.masked_fill_(scaled < floor.unsqueeze(1), -torch.inf)
    cumulative = scaled.exp_().cumsum(-1, dtype=torch.float64)
    # NOTE: a float64 below 1 times the total rounds to less than the total, so the last likely token is never overshot
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _descending(scaled: torch.Tensor, num_values: int) -> torch.Tensor:
    """Return the largest `num_values` of each row, largest first."""
    if num_values < scaled.shape[-1]:
        return scaled.topk(num_values, dim=-1).values
    return scaled.sort(dim=-1, descending=True).values


def _threshold(values: torch.Tensor, floor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the least scaled logit kept in each row [rows], of `values` [rows, n] in descending order.

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
