"""Attention over the paged cache by explicit query positions (the contract of `vllm_blend.attention.metadata`)."""

from __future__ import annotations

import torch

from vllm_blend.ops import cpu
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import CACHE_CODES, DTYPE_CODES, kernels_for, raise_status
from vllm_blend.ops.e4m3 import gathered, widened
from vllm_blend.ops.paged_kv import PagedKV


def paged_attention(
    q: torch.Tensor,
    kv: PagedKV,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of q [tokens, heads, head_dim] over a paged cache, like q.

    Rows query_start_loc[r]:query_start_loc[r + 1] ([requests + 1] int64) are request r's queries, at `positions`
    [tokens] int64, in any order and with any holes; the keys of request r are the first seq_lens[r] ([requests] int64)
    slots of the blocks block_tables[r] ([requests, max_blocks] int32). A key at position p is seen from position t iff
    p <= t and, with a sliding window w, p > t - w. `sinks` [heads] are scores that take part in each softmax and belong
    to no key. Raises IndexError for a block or position out of range, ValueError for tensors that do not fit together.
    """
    _check(q, kv, positions, block_tables, sliding_window)
    expect(query_start_loc, "query_start_loc", torch.int64, (len(block_tables) + 1,))
    expect(seq_lens, "seq_lens", torch.int64, (len(block_tables),))
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have a score for each of the {q.shape[1]} heads, not shape {tuple(sinks.shape)}")
    kernels = kernels_for(q)
    if kernels is None or not cpu.accepts_attention(q, kv):
        return paged_attention_reference(
            q, kv, positions, block_tables, query_start_loc, seq_lens, scale, sliding_window, sinks
        )
    sinks = None if sinks is None else sinks.float().contiguous()
    q, q_stride = cpu.token_rows(q)
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=cpu.CONTIGUOUS)
    status = kernels.paged_attention(
        to.Out(out), to.Query(q), kv.key_address, kv.value_address, to.Positions(positions),
        to.BlockTables(block_tables), to.QueryStarts(query_start_loc), to.SeqLens(seq_lens),
        None if sinks is None else to.Sinks(sinks), tokens, seq_lens.shape[0], block_tables.shape[1], kv.num_blocks,
        kv.block_size, heads, kv.kv_heads, head_dim, q_stride, sliding_window or 0, scale, DTYPE_CODES[q.dtype],
        CACHE_CODES[kv.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "paged_attention")
    return out


def attention_mass(
    q: torch.Tensor,
    kv: PagedKV,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_rows: list[slice],
    seq_lens: list[int],
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the attention probability that each key position receives, per request: [seq_len] float32, summed over the
    rows query_rows[r] of q [tokens, heads, head_dim] and averaged over heads. An empty slice gives zeros. Tensors as in
    `paged_attention`; with sinks it runs in plain torch.
    """
    _check(q, kv, positions, block_tables, sliding_window)
    if not len(query_rows) == len(seq_lens) == len(block_tables):
        raise ValueError(
            f"query_rows ({len(query_rows)}), seq_lens ({len(seq_lens)}) and block_tables ({len(block_tables)}) "
            "must have an entry for each request"
        )
    for request, rows in enumerate(query_rows):
        if not 0 <= rows.start <= rows.stop <= len(q) or rows.step not in (None, 1):
            raise ValueError(f"query_rows[{request}] is {rows}, but must be a plain slice of the {len(q)} rows of q")
    kernels = kernels_for(q)
    if kernels is None or sinks is not None or not cpu.accepts_attention(q, kv):
        return attention_mass_reference(
            q, kv, positions, block_tables, query_rows, seq_lens, scale, sliding_window, sinks
        )
    q, q_stride = cpu.token_rows(q)
    _, heads, head_dim = q.shape
    lengths = torch.tensor(seq_lens, dtype=torch.int64)
    first = torch.tensor([rows.start for rows in query_rows], dtype=torch.int64)
    last = torch.tensor([rows.stop for rows in query_rows], dtype=torch.int64)
    offsets = torch.zeros(len(seq_lens) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    mass = torch.empty(sum(seq_lens), dtype=torch.float32)
    status = kernels.attention_mass(
        to.Mass(mass), to.Query(q), kv.key_address, to.Positions(positions), to.BlockTables(block_tables),
        to.FirstRows(first), to.LastRows(last), to.SeqLens(lengths), to.Offsets(offsets), len(seq_lens),
        block_tables.shape[1], kv.num_blocks, kv.block_size, heads, kv.kv_heads, head_dim, q_stride,
        sliding_window or 0, scale, DTYPE_CODES[q.dtype], CACHE_CODES[kv.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "attention_mass")
    return list(mass.split(seq_lens))


def paged_attention_reference(
    q: torch.Tensor,
    kv: PagedKV,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the plain torch twin of `paged_attention`: the whole matrix of probabilities, in float32 or, for float64 q,
    float64.
    """
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for request, n in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        probabilities = _probabilities(
            q[rows], _keys(kv.key, block_tables[request], n), positions[rows], scale, sliding_window, sinks
        )
        v = widened(_keys(kv.value, block_tables[request], n), probabilities.dtype)  # [n, kv_heads, head_dim]
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hmn,nhd->mhd", probabilities, v).to(q.dtype)
    return out


def attention_mass_reference(
    q: torch.Tensor,
    kv: PagedKV,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_rows: list[slice],
    seq_lens: list[int],
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Run the plain torch twin of `attention_mass`; float64 q gives float64 results. `sinks` [heads] are scores that
    take part in each softmax and belong to no key."""
    masses = []
    for request, (rows, n) in enumerate(zip(query_rows, seq_lens, strict=True)):
        probabilities = _probabilities(
            q[rows], _keys(kv.key, block_tables[request], n), positions[rows], scale, sliding_window, sinks
        )
        masses.append(probabilities.sum(1).mean(0))
    return masses


def _keys(cache: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    """Return the first n slots of a request, in order of position: [n, kv_heads, head_dim]."""
    return gathered(cache, table[: -(-n // cache.shape[1])]).flatten(0, 1)[:n]


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return probabilities [heads, queries, keys] for q [queries, heads, head_dim] and k [keys, kv_heads, head_dim]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    by_kv_head = q.to(dtype).unflatten(1, (k.shape[1], -1))  # no copy of K for each query head
    scores = torch.einsum("mkgd,nkd->kgmn", by_kv_head, widened(k, dtype)).flatten(0, 1) * scale
    keys = torch.arange(len(k), device=q.device)
    hidden = keys[None] > positions[:, None]
    if window is not None:
        hidden |= keys[None] <= positions[:, None] - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def expect(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a kernel may take the tensor by its bare pointer."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {shape}, not {tensor.dtype} {tuple(tensor.shape)}"
        )


def _check(
    q: torch.Tensor, kv: PagedKV, positions: torch.Tensor, block_tables: torch.Tensor, window: int | None
) -> None:
    """Check what both ops need to be true: kernels get bare pointers."""
    heads, head_dim = q.shape[1:]
    if head_dim != kv.head_dim or heads % kv.kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache of {kv.kv_heads} KV heads of {kv.head_dim}")
    if window is not None and window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {window}")
    expect(positions, "positions", torch.int64, (q.shape[0],))
    expect(block_tables, "block_tables", torch.int32, tuple(block_tables.shape))
