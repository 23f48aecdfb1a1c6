"""The compiled CPU kernels on torch tensors. What cannot go to a kernel never gets here: the ops decide that, by
`takes_*`.

A call costs a few microseconds of Python, and a decode step of a small model makes a hundred of them: hence plain code,
no helper objects, and sizes read once.
"""

from __future__ import annotations

import torch

from vllm_blend.ops.bindings import DTYPE_CODES, CPUKernels, raise_status

CONTIGUOUS = torch.contiguous_format  # outputs are allocated by empty_like: torch.empty(shape) costs 2 us more a call
MAX_HEAD_DIM = 256  # of the attention kernels, in steps of 16: MAX_HEAD_DIM of csrc/cpu/attention.h


def rms_norm(
    kernels: CPUKernels, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rms_norm(x + residual), x + residual), the second None without a residual."""
    n = x.shape[-1]
    if x.dim() == 2 and x.stride(1) == 1:
        stride = x.stride(0)
    else:
        x, stride = x.contiguous(), n
    out = torch.empty_like(x, memory_format=CONTIGUOUS)
    total = None
    total_pointer = residual_pointer = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x, memory_format=CONTIGUOUS)
        total_pointer, residual_pointer = total.data_ptr(), residual.data_ptr()
    status = kernels.rms_norm(
        out.data_ptr(), total_pointer, x.data_ptr(), residual_pointer, weight.data_ptr(), x.numel() // n if n else 0,
        n, stride, eps, DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "rms_norm")
    return out, total


def silu_and_mul(kernels: CPUKernels, gate_up: torch.Tensor) -> torch.Tensor:
    n = gate_up.shape[-1] // 2
    if gate_up.dim() == 2 and gate_up.stride(1) == 1:
        stride = gate_up.stride(0)
    else:
        gate_up, stride = gate_up.contiguous(), 2 * n
    out = gate_up.new_empty(*gate_up.shape[:-1], n)
    status = kernels.silu_and_mul(
        out.data_ptr(), gate_up.data_ptr(), out.numel() // n if n else 0, n, stride, DTYPE_CODES[gate_up.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "silu_and_mul")
    return out


def _token_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [tokens, heads, head_dim] with every token's heads contiguous, and the distance between tokens."""
    _, heads, head_dim = x.shape
    stride = x.stride()
    if stride[2] == 1 and (stride[1] == head_dim or heads == 1):
        return x, stride[0]
    return x.contiguous(), heads * head_dim


def rotary(
    kernels: CPUKernels, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [tokens, heads, head_dim] and, unless None, k [tokens, kv_heads, head_dim], rotated."""
    q, q_stride = _token_rows(q)
    tokens, heads, head_dim = q.shape
    q_out = torch.empty_like(q, memory_format=CONTIGUOUS)
    k_out = k_out_pointer = k_pointer = None
    kv_heads = k_stride = 0
    if k is not None:
        k, k_stride = _token_rows(k)
        k_out = torch.empty_like(k, memory_format=CONTIGUOUS)
        kv_heads, k_pointer, k_out_pointer = k.shape[1], k.data_ptr(), k_out.data_ptr()
    status = kernels.rope(
        q_out.data_ptr(), k_out_pointer, q.data_ptr(), k_pointer, None, cos.data_ptr(), sin.data_ptr(), None, None,
        None, tokens, heads, kv_heads, head_dim, cos.shape[1], q_stride, k_stride, 0, 0, DTYPE_CODES[q.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "rotary_embedding")
    return q_out, k_out


def rotary_and_cache(
    kernels: CPUKernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    q, q_stride = _token_rows(q)
    k, k_stride = _token_rows(k)
    v, v_stride = _token_rows(v)
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=CONTIGUOUS)
    status = kernels.rope(
        out.data_ptr(), None, q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(), tokens, heads, k.shape[1], head_dim,
        cos.shape[1], q_stride, k_stride, v_stride, key_cache.shape[0] * key_cache.shape[1], DTYPE_CODES[q.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "rotary_and_cache")
    return out


def reshape_and_cache(
    kernels: CPUKernels,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    k, k_stride = _token_rows(k)
    v, v_stride = _token_rows(v)
    tokens, kv_heads, head_dim = k.shape
    status = kernels.reshape_and_cache(
        k.data_ptr(), v.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(), tokens,
        kv_heads * head_dim, k_stride, v_stride, key_cache.shape[0] * key_cache.shape[1], DTYPE_CODES[k.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "reshape_and_cache")


def place_chunk(
    kernels: CPUKernels,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    layers, tokens, kv_heads, head_dim = k.shape
    status = kernels.place_chunk(
        k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        slot_mapping.data_ptr(), layers, tokens, kv_heads, head_dim, cos.shape[1], k.stride(0), v.stride(0),
        key_cache.stride(0), value_cache.stride(0), key_cache.shape[1] * key_cache.shape[2], DTYPE_CODES[k.dtype],
        DTYPE_CODES[key_cache.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "place_chunk")


def takes_cache(x: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether kernels can work on these caches [..., block_size, kv_heads, head_dim] together with x."""
    return x.dtype == key_cache.dtype == value_cache.dtype and key_cache.is_contiguous() and value_cache.is_contiguous()


def takes_attention(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether the attention kernels can work on q [tokens, heads, head_dim] and these caches."""
    head_dim = q.shape[2]
    return head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and takes_cache(q, key_cache, value_cache)


def paged_attention(
    kernels: CPUKernels,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    q, q_stride = _token_rows(q)
    tokens, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    out = torch.empty_like(q, memory_format=CONTIGUOUS)
    status = kernels.paged_attention(
        out.data_ptr(), q.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), positions.data_ptr(),
        block_tables.data_ptr(), query_start_loc.data_ptr(), seq_lens.data_ptr(), tokens, seq_lens.shape[0],
        block_tables.shape[1], num_blocks, block_size, heads, kv_heads, head_dim, q_stride, sliding_window or 0,
        scale, DTYPE_CODES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "paged_attention")
    return out


def takes_states(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether `attention_states` can work on q [tokens, heads, head_dim] and these caches: their blocks are in one
    piece each, and the distances between them are a multiple of a block."""
    head_dim, stride = q.shape[2], key_cache.stride()
    _, size, kv_heads, _ = key_cache.shape
    return (
        head_dim % 16 == 0
        and head_dim <= MAX_HEAD_DIM
        and q.dtype == key_cache.dtype == value_cache.dtype
        and stride == value_cache.stride()
        and stride[1:] == (kv_heads * head_dim, head_dim, 1)
        and stride[0] % (size * stride[1]) == 0
    )


def attention_states(
    kernels: CPUKernels,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row is a request of its own for the kernel, and a cache with gaps one of more blocks, of which the tables
    name some."""
    q, q_stride = _token_rows(q)
    tokens, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    step = key_cache.stride(0) // (block_size * kv_heads * head_dim)
    lengths, tables = torch.tensor(seq_lens), (block_tables * step).to(torch.int32)
    if query_start_loc != list(range(tokens + 1)):
        counts = torch.tensor(query_start_loc).diff()
        lengths, tables = lengths.repeat_interleave(counts), tables.repeat_interleave(counts, 0)
    positions, tables = torch.minimum(positions, lengths - 1), tables.contiguous()
    starts = torch.arange(tokens + 1)
    out = torch.empty_like(q, memory_format=CONTIGUOUS)
    lse = torch.empty(tokens, heads)
    status = kernels.attention_states(
        out.data_ptr(), lse.data_ptr(), q.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        positions.data_ptr(), tables.data_ptr(), starts.data_ptr(), lengths.data_ptr(), tokens, tables.shape[1],
        (num_blocks - 1) * step + 1, block_size, heads, kv_heads, head_dim, q_stride, scale, DTYPE_CODES[q.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "attention_states")
    return out, lse


def attention_mass(
    kernels: CPUKernels,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_rows: list[slice],
    seq_lens: list[int],
    scale: float,
    sliding_window: int | None,
) -> list[torch.Tensor]:
    q, q_stride = _token_rows(q)
    _, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    lengths = torch.tensor(seq_lens, dtype=torch.int64)
    first = torch.tensor([rows.start for rows in query_rows], dtype=torch.int64)
    last = torch.tensor([rows.stop for rows in query_rows], dtype=torch.int64)
    offsets = torch.zeros(len(seq_lens) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    mass = torch.empty(sum(seq_lens), dtype=torch.float32)
    status = kernels.attention_mass(
        mass.data_ptr(), q.data_ptr(), key_cache.data_ptr(), positions.data_ptr(), block_tables.data_ptr(),
        first.data_ptr(), last.data_ptr(), lengths.data_ptr(), offsets.data_ptr(), len(seq_lens),
        block_tables.shape[1], num_blocks, block_size, heads, kv_heads, head_dim, q_stride, sliding_window or 0,
        scale, DTYPE_CODES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "attention_mass")
    return list(mass.split(seq_lens))


def window_sums(
    kernels: CPUKernels,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    n: int,
    query_positions: torch.Tensor,
    scale: float,
    power: int,
    buffer: int,
) -> torch.Tensor:
    q, q_stride = _token_rows(q)
    queries, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    sums = torch.empty(heads, n, dtype=torch.float32)
    status = kernels.window_sums(
        sums.data_ptr(), q.data_ptr(), key_cache.data_ptr(), query_positions.data_ptr(), block_table.data_ptr(),
        queries, n, len(block_table), num_blocks, block_size, heads, kv_heads, head_dim, q_stride, buffer, scale, power,
        DTYPE_CODES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "window_sums")
    return sums


def accumulate_sums(
    kernels: CPUKernels,
    metric: torch.Tensor,
    q: torch.Tensor,
    head_keys: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    key_positions: torch.Tensor,
    query_positions: torch.Tensor,
    scale: float,
    power: int,
    buffer: int,
) -> None:
    q, q_stride = _token_rows(q)
    rows, group, head_dim = q.shape
    pages, block_size = metric.shape
    status = kernels.accumulate_sums(
        metric.data_ptr(), q.data_ptr(), head_keys.data_ptr(), tables.data_ptr(), lengths.data_ptr(),
        key_positions.data_ptr(), query_positions.data_ptr(), rows, tables.shape[1], tables.stride(0), pages,
        block_size, group, head_dim, q_stride, buffer, scale, power, DTYPE_CODES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "accumulate_sums")


def takes_linear(kernels: CPUKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the linear kernel can multiply x [rows, in] with this weight [out, in]."""
    features, size = weight.shape
    return (
        x.dtype in kernels.linear_dtypes
        and weight.dtype == x.dtype
        and size == x.shape[1]
        and size % 32 == 0
        and features % 16 == 0
        and weight.is_contiguous()
        and x.stride(1) == 1
        and not weight.requires_grad
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def linear(kernels: CPUKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows, size = x.shape
    features = weight.shape[0]
    out = x.new_empty(rows, features)
    status = kernels.linear(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), rows, size,
        features, x.stride(0), DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "linear")
    return out
