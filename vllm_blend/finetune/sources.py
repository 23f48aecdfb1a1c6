"""Where training rows come from: synthetic worlds that processes make during training, or data sets, read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_blend.finetune.replicas import ALONE, Replicas
from vllm_blend.finetune.rows import LENGTH_MULTIPLE, Row, RowPool, RowPools, Rows, pad_rows
from vllm_blend.finetune.samples import Asked, file_rows
from vllm_blend.finetune.worlds import ROWS_PER_SEED, WorldRows, development_rows, run_seeds, share_out, world_shards


@dataclass(frozen=True)
class Source:
    """Rows to come: their lengths in tokens and how many at most of each, the share of batches of each length, and a
    context manager that yields them. `development` holds rows of the same lengths; none if training does not ask
    them."""

    lengths: Sequence[int]
    capacities: Sequence[int]
    shares: Sequence[float]
    shards: AbstractContextManager[Iterator[Rows]]
    development: Sequence[Rows]

    def pools(self, batch_size: int, device: torch.device, seed: int) -> RowPools:
        """Return empty pools for the rows."""
        sizes = zip(self.lengths, self.capacities, strict=True)
        return RowPools([RowPool(n, length, device, seed) for length, n in sizes], self.shares, batch_size, seed)


@dataclass(frozen=True)
class WorldOptions:
    """The worlds to train on: the lengths of rows and the share of batches of each, how many rows there are in all, the
    seed of the run, the number of processes that make them, how many development rows of each length are asked,
    how many rows a paused run has received before, and the replicas that share the worlds out."""

    lengths: Sequence[int]
    shares: Sequence[float]
    prompts: int
    seed: int
    workers: int
    development: int
    received: int = 0
    replicas: Replicas = ALONE

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.lengths):
            raise ValueError(f"--length-shares has {len(self.shares)} numbers and --lengths {len(self.lengths)}")
        if not all(share > 0 for share in self.shares):
            raise ValueError(f"--length-shares {self.shares}: each must be a number above 0")
        if len(set(self.lengths)) < len(self.lengths) or any(length % LENGTH_MULTIPLE for length in self.lengths):
            raise ValueError(f"--lengths {self.lengths}: use different multiples of {LENGTH_MULTIPLE}")
        if self.workers < 0:
            raise ValueError(f"--workers is {self.workers}: use 0 or more processes")
        if self.development < 0:
            raise ValueError(f"--development-rows is {self.development}: use 0 for none, or a number such as 64")


def world_source(options: WorldOptions, tokenizer_json: str, bos: int | None, padding: int) -> Source:
    """Return a source of worlds. A shorter length makes as many more rows as they are shorter, so that every length is
    used up alike. Raises ValueError if worlds do not fit the rows."""
    makers = [WorldRows(tokenizer_json, bos, padding, length) for length in options.lengths]
    for maker in makers:
        maker.check()
    seeds = run_seeds(options.seed, options.prompts)[options.replicas.rank :: options.replicas.size]
    rows = [share / length for share, length in zip(options.shares, options.lengths, strict=True)]
    jobs = share_out(seeds, rows)
    capacities = [sum(number == i for number, _ in jobs) * ROWS_PER_SEED for i in range(len(makers))]
    if len(makers) == 1:
        capacities = [min(options.prompts, len(seeds) * ROWS_PER_SEED)]
    if not all(capacities):
        raise ValueError(f"--prompts {options.prompts} are too few for {len(makers)} lengths: use more")
    done = options.received // ROWS_PER_SEED % len(jobs)
    development = [development_rows(maker, options.development) for maker in makers if options.development]
    shards = world_shards(makers, jobs[done:] + jobs[:done], options.workers)
    return Source(options.lengths, capacities, options.shares, shards, development)


def dataset_source(
    files: Sequence[Path],
    development: Sequence[Path],
    asked: Asked,
    say: Callable[[str], None],
    replicas: Replicas = ALONE,
) -> Source:
    """Return a source of the samples of data sets that fit a row, of which each replica gets its part. `development`
    are data sets too; there may be none. Raises ValueError if a replica would get none."""

    def read(paths: Sequence[Path]) -> list[Row]:
        rows, left_out = file_rows(paths, asked)
        if left_out:
            say(f"{len(left_out)} samples are left out as longer than {asked.length} tokens")
        return rows

    rows, held_out = read(files), read(development) if development else []
    if len(rows) < replicas.size:
        raise ValueError(
            f"--dataset has {len(rows)} samples of at most {asked.length} tokens for {replicas.size} processes"
        )
    length = -(-max(map(len, rows + held_out)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    padding = pad_token(asked.tokenizer)
    asked_rows = [pad_rows(held_out, length, padding)] if held_out else []
    rows = rows[replicas.rank :: replicas.size]
    return Source([length], [len(rows)], [1.0], nullcontext(iter([pad_rows(rows, length, padding)])), asked_rows)


def pad_token(tokenizer: Any) -> int:
    """Return the token that rows are filled up with; it weighs nothing."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def leading_bos(tokenizer: Any) -> int | None:
    """Return the BOS that the tokenizer puts before a text, or None if it puts none."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer.encode("", add_special_tokens=True))[:1] == [bos] else None
