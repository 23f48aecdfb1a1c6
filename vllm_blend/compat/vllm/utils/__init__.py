"""`vllm.utils`: the helpers that scripts use."""

from __future__ import annotations

import uuid

from .argparse_utils import FlexibleArgumentParser
from .network_utils import get_open_port

__all__ = ["FlexibleArgumentParser", "get_open_port", "random_uuid"]


def random_uuid() -> str:
    return uuid.uuid4().hex
