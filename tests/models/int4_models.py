"""Tiny models whose linear layers have the 4-bit weights of their checkpoint, or do not, and what they answer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import CPU
from tests.models.tiny import CONTEXT, PagedRunner, prompt
from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.layers.linear import Linear
from vllm_blend.models.loader import load_hf_config, load_model

LENGTH = 40
WIDE: dict[str, Any] = {"intermediate_size": 96}  # a multiple of 32, so that every layer fits the kernels


def load(folder: Path, keeps_int4: bool = True, dtype: torch.dtype = torch.float32, ranks: Ranks = ONE_RANK) -> Any:
    config = load_hf_config(str(folder))
    return load_model(config, str(folder), dtype, CPU, max_position=CONTEXT, keeps_int4=keeps_int4, ranks=ranks)


def logits(model: Any) -> torch.Tensor:
    return PagedRunner(model).run(prompt(LENGTH), [LENGTH - 3, 1, 1, 1])


def linear_layers(model: Any) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
