"""What an FP8 cache changes is compared with the same method in the model's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fp8_cache_quality import main, page
from tests.quality.small import MODEL, write_small
from vllm_blend.pipeline.files import read_json

pytestmark = pytest.mark.cpu_only


def test_the_table_has_every_method_in_both_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = write_small(tmp_path, 2), tmp_path / "fp8"
    flags = ["--dtype", "float32", "--rules", "none", "--name", "Demo", "--output", str(output)]
    main([MODEL, "--data", str(data), *flags])
    found = read_json(output.with_suffix(".json"), "table")
    assert page(found) == output.with_suffix(".md").read_text() == capsys.readouterr().out.removesuffix("\n")
    assert found["bytes"] == {"auto": 12288, "again": 12288, "fp8": 3072}
    full, reuse = found["methods"]["full prefill"], found["methods"]["none 0%"]
    assert full["again"]["agreement"] == [True, True] and max(full["again"]["kl"]) < 1e-6
    assert all(kl > 0 for kl in [*full["fp8"]["kl"], *reuse["fp8"]["kl"]]) and "again" not in reuse
    assert full["auto"]["f1"] == full["again"]["f1"] and len(reuse["fp8"]["f1"]) == 2
