"""The queries of a step as requests that a library with bottom-right causal masks, or explicit ones, computes exactly.

Adjacent positions a .. b of a request are a request of their own whose keys end at b: there, bottom-right causal is the
contract. What is too scattered for that goes into tiles of sorted queries, each with its keys up to its own largest
position and an explicit mask. Backends that divide the work also find here some requests of a step as a step of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.ops.host_copy import to_device


@dataclass(frozen=True)
class Queries:
    """Rows of a step, cut into n requests for a library. Keys `first_key .. first_key + num_keys - 1` of `request`
    are all that the rows of an entry may see; `first_key` is the start of a block."""

    rows: np.ndarray  # ascending rows of the step, entry after entry
    lengths: np.ndarray  # [n] rows of each entry
    request: np.ndarray  # [n] of the step
    first_key: np.ndarray  # [n]
    num_keys: np.ndarray  # [n]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """Return [n + 1]: entry i has rows[offsets[i]:offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


@dataclass(frozen=True)
class SplitStep:
    """A step cut by what its queries need; any part may be empty."""

    single: Queries  # requests with one row
    causal: Queries  # adjacent positions: bottom-right causal
    tiles: Queries  # the rest: explicit masks


def row_index(rows: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Return ascending rows as an index of a step's tensors: a slice, which copies nothing, if they are adjacent."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else to_device(rows, device)


def split_step(
    metadata: AttentionMetadata, block_size: int, window: int | None, long_run: int, tile_rows: int
) -> SplitStep:
    """Cut a step. A run of adjacent positions is causal when it is all a request has, or has `long_run` rows."""
    positions = np.asarray(metadata.host_positions, np.int64)
    counts = np.diff(metadata.query_start_loc)
    request_of_row = np.repeat(np.arange(len(counts)), counts)
    new_run = np.ones(len(positions), bool)
    new_run[1:] = (np.diff(positions) != 1) | (np.diff(request_of_row) != 0)
    run_of_row = np.cumsum(new_run) - 1
    run_lengths = np.bincount(run_of_row, minlength=0)
    whole = run_lengths[run_of_row] == counts[request_of_row]  # the run is all of its request
    single = whole & (counts[request_of_row] == 1)
    causal = (whole | (run_lengths[run_of_row] >= long_run)) & ~single
    tiled = ~(single | causal)
    # Among the rows left, a tile ends with its request and after tile_rows.
    order = np.cumsum(tiled) - 1
    first_of_request = np.searchsorted(request_of_row[tiled], request_of_row)
    tile = (order - first_of_request) // tile_rows

    def cut(chosen: np.ndarray, *keys: np.ndarray) -> Queries:
        rows = np.flatnonzero(chosen)
        changes = np.zeros(len(rows), bool)
        changes[:1] = True
        for key in (request_of_row, *keys):
            changes[1:] |= np.diff(key[rows]) != 0
        starts = np.flatnonzero(changes)
        stops = np.append(starts[1:], len(rows))[: len(starts)]
        low, high = positions[rows[starts]], positions[rows[stops - 1]]
        first = np.zeros_like(low) if window is None else np.maximum(0, low - window + 1) // block_size * block_size
        return Queries(rows, stops - starts, request_of_row[rows[starts]], first, high + 1 - first)

    return SplitStep(cut(single), cut(causal, run_of_row), cut(tiled, tile))


def page_indices(queries: Queries, block_tables: torch.Tensor, block_size: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return the pages of each entry's keys: offsets [n + 1] on the host, and block numbers int32 on the tables'
    device."""
    pages = -(-queries.num_keys // block_size)
    offsets = np.concatenate([[0], np.cumsum(pages)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], pages)
    flat = np.repeat(queries.request * block_tables.shape[1] + queries.first_key // block_size, pages) + within
    return offsets, block_tables.reshape(-1)[to_device(flat, block_tables.device)]


def tile_masks(queries: Queries, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return which keys each row sees, [sum of lengths * num_keys] bool: entry after entry, row after row.

    positions: of the step's rows ([tokens] int64, on any device). Nothing is read back to the host.
    """
    device = positions.device
    widths = np.repeat(queries.num_keys, queries.lengths)
    starts = np.concatenate([[0], np.cumsum(widths)])
    host = np.stack([queries.rows, starts[:-1], np.repeat(queries.first_key, queries.lengths)])
    rows, start, first_key = to_device(host, device)
    visible = positions[rows] - first_key  # within the entry's keys
    # Each row is a stretch of ones: mark where it begins and where it is over, then sum up.
    begin = torch.zeros_like(visible) if window is None else (visible - window + 1).clamp_(min=0)
    mask = torch.zeros(int(starts[-1]) + 1, dtype=torch.int8, device=device)
    ones = torch.ones(len(rows), dtype=torch.int8, device=device)
    mask.index_add_(0, start + begin, ones)
    mask.index_add_(0, start + visible + 1, ones, alpha=-1)
    return mask.cumsum(0, dtype=torch.int8)[:-1].view(torch.bool)


def mask_pieces(queries: Queries, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return `tile_masks` as one [rows, keys] view per entry."""
    sizes = np.concatenate([[0], np.cumsum(queries.lengths * queries.num_keys)])
    bounds = pairwise(sizes.tolist())
    return [mask[a:b].view(int(n), -1) for (a, b), n in zip(bounds, queries.lengths, strict=True)]


class StepPart(NamedTuple):
    """Rows of a step, and the step of these rows alone, to attend with (see `LayerStep.part`)."""

    rows: slice | torch.Tensor
    metadata: AttentionMetadata


def part_of(requests: list[int], metadata: AttentionMetadata) -> StepPart:
    """Return the part of a step that these requests are; all of them are the step itself."""
    if len(requests) == metadata.num_requests:
        return StepPart(slice(0, metadata.num_tokens), metadata)
    device = metadata.positions.device
    spans = [metadata.rows(request) for request in requests]
    rows = row_index(np.concatenate([np.arange(span.start, span.stop) for span in spans]), device)
    part = replace(
        metadata,
        positions=metadata.positions[rows],
        slot_mapping=metadata.slot_mapping[rows],
        block_tables=metadata.block_tables[to_device(np.array(requests), device)],
        query_start_loc=[0, *accumulate(span.stop - span.start for span in spans)],
        seq_lens=[metadata.seq_lens[request] for request in requests],
        at_end=None if metadata.at_end is None else tuple(metadata.at_end[request] for request in requests),
        device_query_start_loc=None,
        rope_positions=None,  # queries are rotated by then
    )
    return StepPart(rows, part)
