"""The engines of a test run use one device, one dtype and one attention backend, given by options of pytest.

    python -m pytest --device cuda --dtype bfloat16 --attention-backend cuda tests/engine tests/blend

`tests/conftest.py` reads the options before any test file is imported, so a file may use `current()` at its top level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_blend import devices


@dataclass(frozen=True)
class Settings:
    """The options of the run, and what follows from them for the models and engines that tests make."""

    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "auto"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]

    @property
    def exact(self) -> bool:
        """Return whether rounding is too small to change a greedy token or a chosen position."""
        return self.dtype == "float32"

    @property
    def _any_shape(self) -> bool:
        """Return whether attention takes heads and pages of any size: the CPU's kernels and plain torch do."""
        return self.device == "cpu" or self.attention_backend == "torch_native"

    @property
    def head_dim(self) -> int:
        """The head size of tiny models: the smallest that the backend takes."""
        return 16 if self._any_shape else 64

    @property
    def block_size(self) -> int:
        """Tokens of a small page: the fewest that the backend takes."""
        return 8 if self._any_shape else 16

    @property
    def backends(self) -> list[str]:
        """The backends that a test of every backend goes through: those of the CPU, or the one that was asked for."""
        return ["cpu", "torch_native"] if self == Settings() else [self.attention_backend]

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of every engine. On a GPU it takes few pages and captures few graphs: many engines share it."""
        own = {"device": self.device, "dtype": self.dtype, "attention_backend": self.attention_backend}
        return own | ({} if self.device == "cpu" else {"max_num_seqs": 16, "num_gpu_blocks_override": 1024})


_current = Settings()


def current() -> Settings:
    return _current


def use(settings: Settings) -> None:
    """Called once, before test files are imported: what they make at their top level depends on it."""
    global _current
    _current = settings


def run_as_without_bfloat16() -> None:
    """Have dtype="auto" be float32 on every CPU: greedy answers are compared. It does not reach programs of their own
    that tests start."""
    devices.multiplies_bfloat16 = lambda: False
