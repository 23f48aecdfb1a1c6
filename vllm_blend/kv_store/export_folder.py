"""Writes the chunks of a disk store as the pipeline's `.pt` folders (format.py), one folder a chunk, named by its key.

    python -m vllm_blend.kv_store.export_folder /var/cache/chunks results/exported
    python -m vllm_blend.kv_store.export_folder --key-file secret /var/cache/chunks results/exported

The store may be in use, and keeps what it has. The chunks of a signed store are checked with its secret (the engine's
chunk_store_key_file), and the folders are signed with it. fp8 and int8 chunks are written as they are read: in the
model's dtype, rounded. Chunks that were stored by a version that kept no token ids cannot be exported: these are
counted as `unnamed`.
"""

from __future__ import annotations

import argparse
import logging
import sqlite3
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from vllm_blend.kv_store.chunk_kv import ExpectedChunk
from vllm_blend.kv_store.disk import VERSION, DiskChunkStore
from vllm_blend.kv_store.format import write_chunk
from vllm_blend.kv_store.import_folder import NO_MODEL, read_signer
from vllm_blend.kv_store.layout import ChunkFault
from vllm_blend.kv_store.serialization import ChunkHeader
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.store_config import DiskStoreConfig

logger = logging.getLogger(__name__)


def export_folder(path: Path, target: Path, signer: ChunkSigner | None = None) -> Counter[str]:
    """Write every chunk of the store in `path`, of any model, below `target`; with a signer, those that it has signed,
    signed again. Returns how many were written, and how many not, by reason: what cannot be read is left out with a
    warning.

    Raises ValueError if there is no store, and OSError or sqlite3.Error if one of the two cannot be used.
    """
    if not (path / VERSION).is_dir():
        raise ValueError(f"{path} holds no chunk store: give the folder that is an engine's chunk_store_path")
    counts: Counter[str] = Counter()
    config = DiskStoreConfig(
        path, sys.maxsize, NO_MODEL, signer=signer
    )  # nothing is to leave for having been looked at
    stores: dict[str, DiskChunkStore] = {}
    try:
        with DiskChunkStore(config) as index:
            for entry in index.space.index.live():
                name = index.space.index.name(entry)
                if name is None:
                    counts["unnamed"] += 1
                    continue
                chunk, model = name
                try:  # a store drops what it cannot use, which another process may well use
                    ChunkHeader.decode(entry.header, chunk.key, model.digest, signer=signer)
                except ChunkFault as fault:
                    logger.warning("not exported: %s: %s", chunk.key, fault)
                    counts[fault.kind] += 1
                    continue
                if model.digest not in stores:
                    stores[model.digest] = DiskChunkStore(replace(config, model=model.digest, fingerprint=model))
                kv = stores[model.digest].get(chunk.key, expected=ExpectedChunk(model, chunk))
                if kv is not None:
                    write_chunk(target / chunk.key, chunk, kv, model, signer)
                    counts["written"] += 1
        for store in stores.values():
            counts.update(store.stats.misses)
    finally:
        for store in stores.values():
            store.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of the disk store: the engine's chunk_store_path")
    parser.add_argument("target", type=Path, help="folder for the .pt folders")
    parser.add_argument("--key-file", help="file with the secret of a signed store: the engine's chunk_store_key_file")
    args = parser.parse_args()
    signer = read_signer(parser, args.key_file)
    try:
        counts = export_folder(args.path, args.target, signer)
    except ValueError as error:
        parser.error(str(error))
    except (OSError, sqlite3.Error) as error:
        parser.exit(1, f"{parser.prog}: error: {args.path} cannot be read or {args.target} not written: {error}\n")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "the store is empty")


if __name__ == "__main__":
    main()
