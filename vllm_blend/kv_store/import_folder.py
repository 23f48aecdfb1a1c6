"""Puts the pipeline's `.pt` folders (format.py) into a disk store, where engines find them by `chunk_store_path`.

    python -m vllm_blend.kv_store.import_folder results/kv_caches /var/cache/chunks
    python -m vllm_blend.kv_store.import_folder --key-file secret results/exported /var/cache/chunks

With the secret of a signed store (the engine's chunk_store_key_file), folders must be signed with it, as exported ones
are. The pipeline does not sign its folders: --trust-unsigned takes them, too, so give it for folders of your own alone.

The other way round: export_folder.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.format import METADATA, ChunkMiss, load_chunk, read_identity
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.store_config import DiskStoreConfig

logger = logging.getLogger(__name__)

NO_MODEL = "0" * 32

T = TypeVar("T")


def import_folder(source: Path, config: DiskStoreConfig, trust_unsigned: bool = False) -> Counter[str]:
    """Store every chunk below `source`, of any model (`config.model` does not count), signed if there is a
    `config.signer`. Returns how many were stored, and how many not, by reason: what does not hold what it says is left
    out with a warning, and so is what the signer has not signed, unless `trust_unsigned` says otherwise.

    Raises ValueError if there is no chunk, and OSError or sqlite3.Error if the store cannot be used.
    """
    walk = os.walk(source)  # unlike a glob, it also shows what is no file
    folders = sorted(Path(folder) for folder, subfolders, files in walk if METADATA in (*subfolders, *files))
    if not folders:
        raise ValueError(
            f"{source} holds no chunk ({METADATA}): give the folder that stage 2 of the pipeline has written"
        )
    counts = Counter({"stored": 0})
    signer = None if trust_unsigned else config.signer
    by_model: defaultdict[ModelFingerprint, list[Path]] = defaultdict(list)
    for folder in folders:
        identity = _read(folder, read_identity, counts)
        if identity is not None:
            by_model[identity[1]].append(folder)
    for model, own in by_model.items():  # one store at a time, however many models the folders name
        with DiskChunkStore(replace(config, model=model.digest, fingerprint=model)) as store:
            for folder in own:
                found = _read(folder, partial(_load, signer=signer), counts)
                if found is not None:
                    chunk, kv = found
                    store.put(chunk.key, kv.with_content(chunk))
            counts["stored"] += store.stats.num_stored
            counts.update(store.stats.refused)
    return counts


def _load(folder: Path, signer: ChunkSigner | None) -> tuple[ChunkId, ChunkKV]:
    chunk, model = read_identity(folder)
    return chunk, load_chunk(folder, chunk, model, signer)


def _read(folder: Path, read: Callable[[Path], T], counts: Counter[str]) -> T | None:
    """Return what `read` returns for a folder; None, with a warning and a count, where it holds something else."""
    try:
        return read(folder)
    except ChunkMiss as miss:
        logger.warning("not imported: %s", miss)
        counts[miss.kind] += 1
        return None


def read_signer(parser: argparse.ArgumentParser, path: str | None) -> ChunkSigner | None:
    """Return what signs with the secret in a file; None without a file. Ends the program if it cannot be used."""
    try:
        return None if path is None else ChunkSigner.from_file(path)
    except (OSError, ValueError) as error:
        parser.error(f"--key-file {path} cannot be used: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of .pt folders")
    parser.add_argument("path", type=Path, help="folder of the disk store: the engine's chunk_store_path")
    parser.add_argument("--gib", type=float, default=32.0, help="the engine's chunk_store_gib")
    parser.add_argument("--format", default="auto", choices=["auto", "fp8", "int8"])
    parser.add_argument("--key-file", help="file with the secret of a signed store: the engine's chunk_store_key_file")
    parser.add_argument("--trust-unsigned", action="store_true", help="with --key-file: take unsigned folders, too")
    args = parser.parse_args()
    signer = read_signer(parser, args.key_file)
    if not args.gib > 0:
        parser.error(f"--gib={args.gib} must be positive")
    try:
        config = DiskStoreConfig(args.path, int(args.gib * 2**30), NO_MODEL, args.format, signer=signer)
        counts = import_folder(args.source, config, args.trust_unsigned)
    except ValueError as error:
        parser.error(str(error))
    except (OSError, sqlite3.Error) as error:
        parser.exit(1, f"{parser.prog}: error: the store in {args.path} cannot be used: {error}\n")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
