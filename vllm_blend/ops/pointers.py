"""What the pointers that kernels take point to: a type for each role.

The types exist for the type checker alone. At run time each is `torch.Tensor.data_ptr`: `Query(q)` is `q.data_ptr()`,
an integer, and costs the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import torch

Role = TypeVar("Role")


class Pointer(Generic[Role]):
    """The address of the data of a tensor that has this role in a call."""

    def __init__(self, tensor: torch.Tensor) -> None: ...

    def __add__(self, size: int) -> Self:
        raise NotImplementedError("only integers are added")

    if not TYPE_CHECKING:

        def __class_getitem__(cls, role: Any) -> Any:
            return torch.Tensor.data_ptr


Address = Pointer[Literal["address"]]
Bias = Pointer[Literal["bias"]]
BlockTables = Pointer[Literal["block_tables"]]
Cached = Pointer[Literal["cached"]]
Changes = Pointer[Literal["changes"]]
ColumnScales = Pointer[Literal["column_scales"]]
Cos = Pointer[Literal["cos"]]
Deviation = Pointer[Literal["deviation"]]
Ended = Pointer[Literal["ended"]]
FirstLogSumExp = Pointer[Literal["first_log_sum_exp"]]
FirstOut = Pointer[Literal["first_out"]]
FirstRows = Pointer[Literal["first_rows"]]
GateUp = Pointer[Literal["gate_up"]]
Handle = Pointer[Literal["handle"]]
Input = Pointer[Literal["input"]]
Key = Pointer[Literal["key"]]
KeyCache = Pointer[Literal["key_cache"]]
KeyCaches = Pointer[Literal["key_caches"]]
KeyOut = Pointer[Literal["key_out"]]
KeyPositions = Pointer[Literal["key_positions"]]
KeyWeight = Pointer[Literal["key_weight"]]
LastRows = Pointer[Literal["last_rows"]]
LogSumExp = Pointer[Literal["log_sum_exp"]]
Logits = Pointer[Literal["logits"]]
Mass = Pointer[Literal["mass"]]
Memories = Pointer[Literal["memories"]]
Metric = Pointer[Literal["metric"]]
Offsets = Pointer[Literal["offsets"]]
Out = Pointer[Literal["out"]]
Penalties = Pointer[Literal["penalties"]]
Places = Pointer[Literal["places"]]
Positions = Pointer[Literal["positions"]]
Query = Pointer[Literal["query"]]
QueryOut = Pointer[Literal["query_out"]]
QueryStarts = Pointer[Literal["query_starts"]]
QueryWeight = Pointer[Literal["query_weight"]]
Requests = Pointer[Literal["requests"]]
Residual = Pointer[Literal["residual"]]
RowScales = Pointer[Literal["row_scales"]]
Rows = Pointer[Literal["rows"]]
Scales = Pointer[Literal["scales"]]
SecondLogSumExp = Pointer[Literal["second_log_sum_exp"]]
SecondOut = Pointer[Literal["second_out"]]
Segments = Pointer[Literal["segments"]]
SeqLens = Pointer[Literal["seq_lens"]]
Settings = Pointer[Literal["settings"]]
Shift = Pointer[Literal["shift"]]
Sin = Pointer[Literal["sin"]]
Sinks = Pointer[Literal["sinks"]]
Slots = Pointer[Literal["slots"]]
Stats = Pointer[Literal["stats"]]
Sum = Pointer[Literal["sum"]]
Sums = Pointer[Literal["sums"]]
TableSizes = Pointer[Literal["table_sizes"]]
Tables = Pointer[Literal["tables"]]
Tiles = Pointer[Literal["tiles"]]
Tokens = Pointer[Literal["tokens"]]
Uniforms = Pointer[Literal["uniforms"]]
Value = Pointer[Literal["value"]]
ValueCache = Pointer[Literal["value_cache"]]
ValueCaches = Pointer[Literal["value_caches"]]
Weight = Pointer[Literal["weight"]]
Workspace = Pointer[Literal["workspace"]]
ZeroPoints = Pointer[Literal["zero_points"]]

ROLES = frozenset(name for name, value in globals().items() if value is torch.Tensor.data_ptr)
