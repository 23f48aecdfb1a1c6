"""A few questions of the demo data set, taken through the stages in a folder of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.build_kv_cache import build_kv_cache
from vllm_blend.pipeline.config import DecodeConfig, PrefillConfig, RetrievalConfig
from vllm_blend.pipeline.datasets import load_dataset
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.retrieval import run_retrieval
from vllm_blend.pipeline.speculative_decode import speculative_decode

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "inputs/demo-model")


@dataclass(frozen=True)
class Stages:
    """The stages' settings, with everything below `root`."""

    root: Path
    top_k: int = 3

    @classmethod
    def over(cls, root: Path, samples: list[dict[str, Any]]) -> Stages:
        """Write the data set and run the retrieval."""
        stages = cls(root)
        write_json(root / "musique_t.json", samples)
        run_retrieval(stages.retrieval)
        return stages

    @property
    def retrieval(self) -> RetrievalConfig:
        return RetrievalConfig(
            dataset_name="musique_t",
            dataset_path=str(self.root / "musique_t.json"),
            output_dir=str(self.root / "retrieval"),
            top_k=self.top_k,
        )

    @property
    def chunks(self) -> Path:
        return self.root / "kv_caches"

    def build(self, **changes: Any) -> dict[str, Any]:
        config: dict[str, Any] = {"model_id": MODEL, "top_k_gpu": 2, "output_dir": str(self.chunks)} | changes
        return build_kv_cache(PrefillConfig(**config), self.retrieval)

    def decode(self, **changes: Any) -> dict[str, Any]:
        """Over the retrieved passages, unless `changes` say otherwise."""
        output = str(self.root / "trace.json")
        config: dict[str, Any] = {"model_id": MODEL, "load_cache_dir": str(self.chunks), "output": output}
        return speculative_decode(DecodeConfig(**config | {"passages": "retrieved"} | changes), self.retrieval)


def demo_samples(count: int) -> list[dict[str, Any]]:
    return load_dataset(ROOT / "inputs/musique_s.json")[:count]
