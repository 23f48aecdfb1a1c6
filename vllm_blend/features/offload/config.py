"""The options of offloading: which chunks of running requests leave the device while they decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_blend.checks import not_negative, positive, require
from vllm_blend.config import FeatureConfig
from vllm_blend.options import option

OffloadMode = Literal["resident", "exact"]


def _check_fraction(name: str, value: float) -> None:
    require(0 <= value <= 1, f"{name}={value} is a share of a request's chunks: use a value in [0, 1]")


@dataclass(frozen=True)
class OffloadConfig(FeatureConfig):
    """Chunks of running requests on the host while they decode, promoted to the device when they are needed.

    In `mode` "resident" a request attends to what is on the device: promotions change what it sees. In "exact" the rest
    is attended where it is, on the host, so placement never changes an answer beyond rounding; steps in which a chunk
    is missing then run without CUDA graphs. A request keeps `resident_chunks` of its chunks on the device, or by
    default the share `device_fraction` of them. All moves of a step copy at most `bytes_per_step`.
    """

    title: ClassVar[str] = "Offload of chunks while decoding"
    prefix: ClassVar[str] = "offload_"
    name: ClassVar[str] = "offload_mode"
    extension: ClassVar[str | None] = "vllm_blend.features.offload.extension:make_offload"
    worker_extension: ClassVar[str | None] = "vllm_blend.features.offload.passes:OffloadPasses"
    divides_blends: ClassVar[bool] = False

    mode: OffloadMode | None = option(
        None,
        "keep only some chunks of a request on the device while it is decoded; the others are not seen (resident), or "
        "attended on the host (exact)",
    )
    resident_chunks: int | None = option(None, "how many chunks of a request stay on the device", check=not_negative)
    device_fraction: float = option(
        0.2, "share of a request's chunks that stays on the device, if no number is given", check=_check_fraction
    )
    predictor: str = option(
        "query_digest", "rule that guesses which chunks the next tokens need: query_digest, retrieval_rank or your own"
    )
    bytes_per_step: int = option(64 << 20, "how many bytes a step may copy to and from the device", check=positive)
    host_gib: float = option(4.0, "host memory for chunks off the device, in GiB", check=positive)

    @property
    def is_on(self) -> bool:
        return self.mode is not None
