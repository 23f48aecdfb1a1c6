"""The options of an engine that say where chunk KV is kept besides memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_blend.checks import not_empty, positive, require
from vllm_blend.options import OptionGroup, option

ChunkFormat = Literal["auto", "fp8", "int8"]


@dataclass(frozen=True)
class ChunkStoreConfig(OptionGroup):
    """The places that keep chunk KV besides memory: a disk for other processes, a server for other machines."""

    title: ClassVar[str] = "Chunk store"
    prefix: ClassVar[str] = "chunk_store_"

    path: str | None = option(
        None,
        "folder on a local disk in which chunk KV is kept after the process has ended",
        check=not_empty("name a folder, or leave it out"),
    )
    gib: float = option(32.0, "disk space for chunk KV, in GiB", check=positive)
    format: ChunkFormat = option(
        "auto", "how KV is stored on the disk and the server: auto (in the model's dtype, bit for bit), fp8 or int8"
    )
    url: str | None = option(  # it may hold a password
        None,
        "server that keeps chunk KV: redis://, valkey://, s3:// or any other protocol of fsspec",
        check=not_empty("give a URL, or leave it out"),
        shown=False,
    )
    key_file: str | None = option(
        None,
        "file with the secret that signs chunks on the disk and the server; all other chunks are not used",
        check=not_empty("name a file of at least 32 bytes, or leave it out"),
    )
    admit_on_second_use: bool = option(False, "store a chunk on the disk only when it is computed for the second time")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.format == "auto" or self.is_used,
            f"chunk_store_format={self.format!r} is that of a disk or a server: give chunk_store_path or "
            "chunk_store_url too",
        )
        require(
            self.key_file is None or self.is_used,
            f"chunk_store_key_file={self.key_file!r} signs what is on a disk or a server: give chunk_store_path or "
            "chunk_store_url too",
        )
        require(
            not self.admit_on_second_use or self.path is not None,
            "chunk_store_admit_on_second_use is a rule of the disk: give chunk_store_path too",
        )

    @property
    def is_used(self) -> bool:
        return self.path is not None or self.url is not None
