"""Settings of the pipeline: one dataclass per stage holds the defaults, a YAML file and flags may change them.

    cfg = load_config("configs/musique.yaml")
    cfg["retrieval"]["model_id"]

The bash scripts pass only what the environment sets, so the defaults below are the only ones.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from vllm_blend.pipeline.files import check_file_name

BACKENDS = ("bm25", "colbert")
PASSAGES = ("retrieved", "all")
OFFLOAD_MODES = ("exact", "resident", "none")
SCOPES = ("sample", "corpus")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}{_close_match(value, choices)}")


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True)
class RetrievalConfig:
    """Which passages of which data set are looked up, how, and under which keys a sample holds what.

    A page is a run of neighbouring passages that belong together. As a field of a passage, `page_id_key` says which one
    it is from; as a field of a sample, it lists the indices of the passages that may be retrieved.
    """

    model_id: str = _option(
        "colbert-ir/colbertv2.0", "ColBERT checkpoint, a directory or a hub id (colbert backend only)"
    )
    dataset_name: str = _option("musique_s", "name of the data set, in output files and for its prompts")
    r_text_index_key: str = _option(
        "r_text_index", "sample key that receives the path of its index (colbert backend only)"
    )
    doc_key: str = _option("doc_id", "sample key with the name of its passage collection, used to name its index")
    question_key: str = _option("question", "sample key of the query")
    retrieved_key: str = _option("retrieved_indices", 'sample key for the hits\' indices; scores go to "<key>_score"')
    page_id_key: str = _option("page_id", "key of a passage's page, or of a sample's list of allowed passages")
    top_k: int = _option(5, "passages to retrieve for a question")
    backend: str = _option("bm25", f"one of {', '.join(BACKENDS)}")
    scope: str = _option("sample", "look in the sample's own passages (sample) or in those of all samples (corpus)")
    include_neighbors: bool = _option(False, "let the passages beside a hit on its page take the next of the k places")
    dataset_path: str = _option("", "data set file; by default inputs/<dataset_name>.json")
    output_dir: str = _option("results/retrieval", "folder for <dataset_name>_rag_both_k<top_k>.json")
    index_dir: str = _option("results/retrieval/indexes", "folder for indexes (colbert backend only)")
    max_samples: int = _option(0, "use only the first samples; 0 for all")

    def __post_init__(self) -> None:
        _require_choice("backend", self.backend, BACKENDS)
        _require_choice("scope", self.scope, SCOPES)
        check_file_name("dataset_name", self.dataset_name)
        _require_at_least("top_k", self.top_k, 1)
        _require_at_least("max_samples", self.max_samples, 0)
        if self.retrieved_key in ("ctxs", "question", "answers", "retrieved"):
            raise ValueError(f"retrieved_key {self.retrieved_key!r} would overwrite that field; choose another name")

    @property
    def input_path(self) -> Path:
        return Path(self.dataset_path or f"inputs/{self.dataset_name}.json")

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir) / f"{self.dataset_name}_rag_both_k{self.top_k}.json"


@dataclass(frozen=True)
class PrefillConfig:
    """Which model computes the KV of all chunks, and how many chunks of a sample are marked for the GPU."""

    model_id: str = _option("inputs/demo-model", "model directory or hub id")
    dtype: str = _option("auto", f"one of {', '.join(DTYPES)}")
    device: str = _option("auto", "auto, cpu or cuda")
    retrieval_json: str = _option("", "output of the retrieval stage; by default where that stage writes it")
    top_k_gpu: int = _option(5, "best chunks of a sample that go to the GPU; the rest are CPU placeholders")
    max_samples: int = _option(0, "use only the first samples; 0 for all")
    output_dir: str = _option("results/kv_caches", "folder for the chunks' KV and the summary")

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, DTYPES)
        _require_at_least("top_k_gpu", self.top_k_gpu, 0)
        _require_at_least("max_samples", self.max_samples, 0)

    def summary_path(self, dataset_name: str) -> Path:
        return Path(self.output_dir) / f"{dataset_name}_kv_top{self.top_k_gpu}.json"


@dataclass(frozen=True)
class DecodeConfig:
    """How the answers are decoded over the chunks' KV."""

    model_id: str = _option("inputs/demo-model", "model directory or hub id")
    dtype: str = _option("auto", f"one of {', '.join(DTYPES)}")
    device: str = _option("auto", "auto, cpu or cuda")
    retrieval_json: str = _option("", "output of the retrieval stage; by default where that stage writes it")
    load_cache_dir: str = _option("results/kv_caches", "folder with the chunks' KV")
    passages: str = _option("all", "answer over all passages of a sample, or over the retrieved ones alone")
    blend_selector: str = _option("question_attention", "rule that chooses the tokens to recompute")
    blend_recompute_ratio: float = _option(
        0.15, "share of the tokens to recompute, 0 to 1; none and full have their own"
    )
    offload_mode: str = _option(
        "exact", "chunks off the GPU are attended on the CPU (exact), not seen (resident), or there are none (none)"
    )
    offload_predictor: str = _option("query_digest", "rule that chooses the chunks to promote")
    resident_chunks: int = _option(0, "chunks of a prompt on the GPU at a time; 0 for as many as stage 2 marked")
    bytes_per_step: int = _option(64 << 20, "the most that promotions and evictions of a step may copy")
    draft_tokens: int = _option(0, "longest draft of speculative decoding; 0 for one token a step")
    enable_kvc: bool = _option(False, "evict KV by head while decoding (KV-Compress); needs offload_mode none")
    target_compression_rate: float = _option(0.0, "share of a prompt's KV that is kept with enable_kvc; 0 for all")
    max_cache_tokens: int = _option(0, "the same as a number of tokens; 0 for all")
    kvc_metric: str = _option("kv_compress", "rule that says what a KV is worth")
    max_tokens: int = _option(0, "longest answer in tokens; 0 for what the data set's answers need")
    max_samples: int = _option(0, "use only the first samples; 0 for all")
    output: str = _option("results/decoding/speculative_trace.json", "trace to write")
    timeline: bool = _option(False, "draw the trace too, into a .png beside it (needs matplotlib)")

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("passages", self.passages, PASSAGES)
        _require_choice("offload_mode", self.offload_mode, OFFLOAD_MODES)
        _require_at_least("resident_chunks", self.resident_chunks, 0)
        _require_at_least("bytes_per_step", self.bytes_per_step, 1)
        _require_at_least("draft_tokens", self.draft_tokens, 0)
        _require_at_least("max_tokens", self.max_tokens, 0)
        _require_at_least("max_samples", self.max_samples, 0)
        if not 0 <= self.blend_recompute_ratio <= 1:
            raise ValueError(f"blend_recompute_ratio must be from 0 to 1, not {self.blend_recompute_ratio}")
        if not 0 <= self.target_compression_rate <= 1:
            raise ValueError(f"target_compression_rate must be from 0 to 1, not {self.target_compression_rate}")
        _require_at_least("max_cache_tokens", self.max_cache_tokens, 0)
        for name in ("target_compression_rate", "max_cache_tokens"):
            if getattr(self, name) and not self.enable_kvc:
                raise ValueError(f"{name} is a setting of enable_kvc: set that to true, or leave it out")
        if self.enable_kvc and self.offload_mode != "none":
            raise ValueError(
                f"enable_kvc needs offload_mode none, not {self.offload_mode}: pages of single heads do not move"
            )
        if self.enable_kvc and self.draft_tokens:
            raise ValueError(
                f"enable_kvc and draft_tokens={self.draft_tokens} exclude each other: leave one of them out"
            )


SECTIONS: dict[str, type] = {"retrieval": RetrievalConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
Section = TypeVar("Section")


def load_config(path: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """{"retrieval": {...}, "prefill": {...}, "decode": {...}} with every key, from a YAML file over the defaults.

    Raises FileNotFoundError, or ValueError naming the file, the section and the key, with the closest known one.
    """
    given: Any = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"pipeline configuration not found: {path} (relative to {Path.cwd()}); check the path"
            )
        try:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        given = {} if given is None else given
    try:
        if not isinstance(given, dict):
            raise ValueError(f"expected sections {', '.join(SECTIONS)}, not {type(given).__name__}")
        for name in given:
            if name not in SECTIONS:
                raise ValueError(
                    f"unknown section {name!r}{_close_match(name, SECTIONS)}; known: {', '.join(SECTIONS)}"
                )
        return {name: asdict(make_section(cls, name, given.get(name) or {})) for name, cls in SECTIONS.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from error


def make_section(cls: type[Section], name: str, values: Any) -> Section:
    """A section from a mapping of some of its keys. ValueError names an unknown key or a value of the wrong type."""
    if not isinstance(values, Mapping):
        raise ValueError(f"section {name} must map keys to values, not {type(values).__name__}")
    defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
    checked = {}
    for key, value in values.items():
        if key not in defaults:
            raise ValueError(
                f"{name}.{key} is not a setting{_close_match(key, defaults)}; known: {', '.join(defaults)}"
            )
        kind = type(defaults[key])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{name}.{key} must be {kind.__name__}, not {type(value).__name__} ({value!r})")
        checked[key] = value
    try:
        return cls(**checked)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def add_section_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add --some-key for every setting of a section, and --config. Flags not given stay out of the namespace."""
    parser.add_argument("--config", default=argparse.SUPPRESS, help="YAML file with this section; flags override it")
    for setting in fields(cls):
        kind = type(setting.default)
        flag, help = f"--{setting.name.replace('_', '-')}", f"{setting.metadata['help']} (default: {setting.default!r})"
        if kind is bool:
            parser.add_argument(flag, nargs="?", const=True, type=_parse_bool, default=argparse.SUPPRESS, help=help)
        else:
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=help)


def section_from_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> Any:
    """The section `name`: defaults, then --config, then flags. Mistakes end the program with a message."""
    given = {f.name: getattr(args, f.name) for f in fields(SECTIONS[name]) if hasattr(args, f.name)}
    try:
        return make_section(SECTIONS[name], name, {**load_config(getattr(args, "config", None))[name], **given})
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")


def _close_match(word: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
