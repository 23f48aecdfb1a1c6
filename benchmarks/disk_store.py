"""Measure how fast the disk store reads chunks, and how fast `dd` with O_DIRECT does: `python -m
benchmarks.disk_store`.

Both read the same files, in turns, past the page cache. The store reads as it does for an engine: the chunks of a
prompt together, and those of the next prompts in the meantime, into memory that is ready; it checks the checksum of
every layer. Prints the rate of each in GB/s, and the ratio of the medians; the same for writing, where both return when
the bytes are on the disk.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.host_memory import Arena, aligned_empty
from vllm_blend.kv_store.layout import ChunkLayout, StoredFormat
from vllm_blend.kv_store.store_config import DiskStoreConfig

MODEL = "00" * 16
PROMPT = 16  # chunks that are asked for together
AHEAD_BYTES, MIN_AHEAD, MAX_AHEAD = 64 << 20, 2, 4  # prompts in flight while one is used
DTYPE = torch.bfloat16
FROM_DISK = ["bs=4M", "iflag=direct"]


def key(number: int) -> str:
    return f"{number:032x}"


def dd(*arguments: str) -> object:
    return subprocess.run(["dd", *arguments], check=True, capture_output=True)


def read_all(store: DiskChunkStore, batches: list[list[str]], ahead: int, arena: Arena) -> None:
    """Read every chunk, in order; the arena has room for the batches in flight, and one more."""
    pending = deque(store.read_many(batch, arena.allocate) for batch in batches[:ahead])
    for number in range(len(batches)):
        for chunk in pending.popleft():
            assert chunk is not None and chunk.wait() is not None
        del chunk
        if number + ahead < len(batches):
            pending.append(store.read_many(batches[number + ahead], arena.allocate))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def report(what: str, num_bytes: int, store: list[float], plain: list[float]) -> None:
    rates = [[num_bytes / each / 1e9 for each in times] for times in (store, plain)]
    ratio = median(rates[0]) / median(rates[1])
    shown = ["  ".join(f"{rate:5.2f}" for rate in each) for each in rates]
    print(f"{what}: store {shown[0]} | dd {shown[1]} GB/s | ratio of medians {ratio:.2f}")


def measure(folder: Path, shape: tuple[int, int, int, int], how: StoredFormat, num_bytes: int, rounds: int) -> None:
    k, v = torch.randn(2, *shape).to(DTYPE)
    chunk = ChunkKV(k, v)
    layout = ChunkLayout.from_kv(chunk, how)
    count = num_bytes // layout.payload_bytes
    together = max(1, min(PROMPT, AHEAD_BYTES // 2 // layout.payload_bytes))
    ahead = min(max(AHEAD_BYTES // (together * layout.payload_bytes), MIN_AHEAD), MAX_AHEAD)
    keys = [key(number) for number in range(count)]
    batches = [keys[at : at + together] for at in range(0, count, together)]
    total = count * layout.payload_bytes
    room = (ahead + 1) * together
    config = DiskStoreConfig(folder, total, MODEL, how, staging_bytes=room * layout.payload_bytes)
    arena = Arena(aligned_empty(room * layout.kv_bytes).zero_().numpy())
    print(f"{list(shape)} {how}: {count} chunks of {layout.payload_bytes / 2**20:.2f} MiB, {total / 2**30:.2f} GiB")
    with DiskChunkStore(config) as store:

        def put_all() -> None:
            size = max(1, DiskChunkStore.max_bytes_at_once // chunk.nbytes)
            for at in range(0, count, size):
                store.put_many([(name, chunk) for name in keys[at : at + size]])

        plain = folder / "plain"
        blocks = f"count={max(1, total >> 22)}"
        to_disk = ["if=/dev/zero", f"of={plain}", "bs=4M", blocks, "oflag=direct", "conv=fdatasync"]
        times: dict[str, list[float]] = {"store": [], "dd": []}
        for _ in range(rounds):
            store.clear()
            times["store"].append(seconds(put_all))
            assert len(store) == count, store.stats.refused
            times["dd"].append(seconds(lambda: dd(*to_disk)))
            plain.unlink()
        report("  write", total, times["store"], times["dd"])
        segments = sorted(folder.glob("v1/*.segment"))
        times = {"store": [], "dd": []}
        for _ in range(rounds):
            times["dd"].append(seconds(lambda: [dd(f"if={each}", "of=/dev/null", *FROM_DISK) for each in segments]))
            times["store"].append(seconds(lambda: read_all(store, batches, ahead, arena)))
        assert store.stats.num_hits == rounds * count and store.stats.num_misses == 0
        report("  read ", total, times["store"], times["dd"])
        if not store.space.files.direct:
            print("  (this file system takes no O_DIRECT: these are rates of the page cache)")
        store.clear()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the chunks, for each shape and format")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    cases: list[tuple[tuple[int, int, int, int], StoredFormat]] = [
        ((32, 256, 8, 128), "auto"),  # Mistral-7B: a layer is 1 MiB
        ((28, 128, 8, 128), "auto"),  # Qwen3-0.6B: 0.5 MiB
        ((12, 41, 2, 64), "auto"),  # the demo model: a chunk is 0.24 MiB, and one read
        ((32, 256, 8, 128), "int8"),  # decoded by the reading threads
    ]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for shape, how in cases:
            size = arguments.gib if shape[0] > 12 else arguments.gib / 8
            measure(Path(folder), shape, how, int(size * 2**30), arguments.rounds)


if __name__ == "__main__":
    main()
