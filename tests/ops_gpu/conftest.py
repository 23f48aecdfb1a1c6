from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ops_gpu import cases

# Plain torch, which the kernels are compared with, then attends by other kernels: racecheck reports hazards in cuDNN's.
torch.backends.cuda.enable_cudnn_sdp(False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    left_out = set(own) - set(cases.spread(own))
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
