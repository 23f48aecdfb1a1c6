"""A sweep in a file: what its tables and its picture show, as JSON with a line for each row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.files import read_json, write_text
from vllm_blend.quality.picture import check_rows
from vllm_blend.quality.rows import ALL, shortened
from vllm_blend.quality.settings import Setting

# `score` is the one that the row's `metric` names. Rows of one kind of question end with it.
KIND_COLUMNS = ("dataset", "kind", "setting", "ratio", "samples", "metric", "token_layers", "same_as", "score")
COLUMNS = (
    *KIND_COLUMNS,
    *("score_low", "score_high", "exact_match", "kept", "recovered", "recovered_low", "recovered_high"),
    *("over_cacheblend", "over_cacheblend_low", "over_cacheblend_high", "same_answer", "kl"),
)


def write_sweep(path: Path, about: dict[str, Any], settings: Sequence[Setting], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of `make_rows`, without what nothing shows."""
    described = [{"name": s.name, "paper": s.paper, "prompt": s.prompt, "engine": s.engine} for s in settings]
    shown = [_values(row) for row in shortened(rows) if row["kind"] == ALL or not row["same_as"]]
    parts = {"about": _dump(about), "settings": _lines(described), "columns": _dump(COLUMNS), "rows": _lines(shown)}
    write_text(path, "{\n" + ",\n".join(f' "{name}": {text}' for name, text in parts.items()) + "\n}\n")


def read_sweep(path: Path) -> tuple[dict[str, Any], list[Setting], list[dict[str, Any]]]:
    """Return what `write_sweep` was given, as far as tables and the picture need it.

    Raises FileNotFoundError, or ValueError if the file holds anything else.
    """
    data = read_json(path, "rows")
    try:
        rows = [_row(dict(zip(data["columns"], values, strict=False))) for values in data["rows"]]
        about, settings = dict(data["about"]), [Setting(**one) for one in data["settings"]]
    except (KeyError, TypeError, ValueError):
        about, settings, rows = {}, [], []
    check_rows(rows, path)
    return about, settings, rows


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(values: Sequence[Any]) -> str:
    return "[\n  " + ",\n  ".join(map(_dump, values)) + "\n ]"


def _values(row: dict[str, Any]) -> list[Any]:
    scores = {f"score{end}": row[f"{row['metric']}{end}"] for end in ("", "_low", "_high")}
    return [(row | scores)[name] for name in (COLUMNS if row["kind"] == ALL else KIND_COLUMNS)]


def _row(values: dict[str, Any]) -> dict[str, Any]:
    scores = {f"{values['metric']}{end}": values.get(f"score{end}") for end in ("", "_low", "_high")}
    return dict.fromkeys(COLUMNS) | values | scores
