"""The settings of the pipeline: one dataclass per stage holds the defaults; a YAML file and flags may change them.

    cfg = load_config("configs/musique.yaml")
    cfg["retrieval"]["model_id"]

The bash scripts pass only what the environment sets, so there are no defaults but those below.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from vllm_blend.checks import at_least, check_ratio, closest, positive, require
from vllm_blend.config import BlendConfig
from vllm_blend.options import OptionGroup, check_options, option
from vllm_blend.pipeline.files import check_file_name
from vllm_blend.pipeline.prompts import check_template, check_text

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _check_retrieved_key(name: str, key: str) -> None:
    require(
        key not in ("ctxs", "question", "answers", "retrieved"),
        f"{name} {key!r} would overwrite that field; choose another name",
    )


@dataclass(frozen=True)
class Section(OptionGroup):
    """Base of the stages' settings, which are checked by their types and by checks of their own."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class RetrievalConfig(Section):
    """The data set, the way its passages are searched, and the keys of its samples.

    A page is a run of neighbouring passages that belong together. As a field of a passage, `page_id_key` names its
    page; as a field of a sample, it lists the indices of the passages that may be retrieved.
    """

    model_id: str = option(
        "colbert-ir/colbertv2.0", "ColBERT checkpoint, a directory or a hub id (colbert backend only)"
    )
    dataset_name: str = option(
        "musique_s", "name of the data set, in output files and for its prompts", check=check_file_name
    )
    dataset_style: Literal["", "musique", "wikimqa", "samsum", "by-name"] = option(
        "",
        "ask in the words of musique, wikimqa, samsum or by-name, as the data set is called; by default by the model's "
        "chat template, or by-name if it has none",
    )
    instruction: str = option("", "what stands before the passages, in place of the usual words", check=check_text)
    template: str = option(
        "",
        "what stands after the passages, with {question} in it, in place of the usual words",
        check=check_template,
    )
    r_text_index_key: str = option(
        "r_text_index", "sample key that receives the path of its index (colbert backend only)"
    )
    doc_key: str = option("doc_id", "sample key with the name of its passage collection, used to name its index")
    question_key: str = option("question", "sample key of the query")
    retrieved_key: str = option(
        "retrieved_indices",
        'sample key for the hits\' indices; scores go to "<key>_score"',
        check=_check_retrieved_key,
    )
    page_id_key: str = option("page_id", "key of a passage's page, or of a sample's list of allowed passages")
    top_k: int = option(5, "passages to retrieve for a question", check=at_least(1))
    backend: Literal["bm25", "colbert"] = option("bm25", "one of bm25, colbert")
    scope: Literal["sample", "corpus"] = option(
        "sample", "search the sample's own passages (sample) or those of all samples (corpus)"
    )
    include_neighbors: bool = option(False, "let a hit's neighbours on its page take the next of the k places")
    dataset_path: str = option("", "data set file; by default inputs/<dataset_name>.json")
    output_dir: str = option("results/retrieval", "folder for <dataset_name>_rag_both_k<top_k>.json")
    index_dir: str = option("results/retrieval/indexes", "folder for indexes (colbert backend only)")
    max_samples: int = option(0, "use only the first samples; 0 for all", check=at_least(0))

    @property
    def input_path(self) -> Path:
        return Path(self.dataset_path or f"inputs/{self.dataset_name}.json")

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir) / f"{self.dataset_name}_rag_both_k{self.top_k}.json"


@dataclass(frozen=True)
class PrefillConfig(Section):
    """The model that computes the KV of all chunks, and how many chunks of a sample are marked for the GPU."""

    model_id: str = option("inputs/demo-model", "model directory or hub id")
    dtype: Dtype = option("auto", "one of auto, float32, bfloat16, float16")
    device: str = option("auto", "auto, cpu or cuda")
    retrieval_json: str = option("", "output of the retrieval stage; by default where that stage writes it")
    top_k_gpu: int = option(
        5, "best chunks of a sample that go to the GPU; the rest are CPU placeholders", check=at_least(0)
    )
    pages: bool = option(
        False, "encode a passage after those before it on its page, if the data set has page ids; as in decode"
    )
    max_samples: int = option(0, "use only the first samples; 0 for all", check=at_least(0))
    output_dir: str = option("results/kv_caches", "folder for the chunks' KV and the summary")

    def summary_path(self, dataset_name: str) -> Path:
        return Path(self.output_dir) / f"{dataset_name}_kv_top{self.top_k_gpu}.json"


@dataclass(frozen=True)
class DecodeConfig(Section):
    """The way answers are decoded over the chunks' KV."""

    model_id: str = option("inputs/demo-model", "model directory or hub id")
    dtype: Dtype = option("auto", "one of auto, float32, bfloat16, float16")
    device: str = option("auto", "auto, cpu or cuda")
    retrieval_json: str = option("", "output of the retrieval stage; by default where that stage writes it")
    load_cache_dir: str = option("results/kv_caches", "folder with the chunks' KV")
    passages: Literal["retrieved", "all"] = option(
        "all", "answer over all passages of a sample, or over the retrieved ones alone"
    )
    pages: bool = option(
        False, "tell the engine which passages are of one page, and use KV that was stored so; as in prefill"
    )
    order: Literal["given", "free"] = option(
        "given", "passages in the data set's order, or by the retrieval's scores (free; needs offload_mode none)"
    )
    blend_selector: str = option(BlendConfig.selector, "selector of the tokens to recompute")
    blend_recompute_ratio: float = option(
        0.15, "share of the tokens to recompute, 0 to 1; none and full have their own", check=check_ratio
    )
    offload_mode: Literal["exact", "resident", "none"] = option(
        "exact", "chunks off the GPU are attended on the CPU (exact), ignored (resident), or there are none (none)"
    )
    offload_predictor: str = option("query_digest", "predictor of the chunks to promote")
    resident_chunks: int = option(
        0, "chunks of a prompt on the GPU at a time; 0 for as many as stage 2 marked", check=at_least(0)
    )
    bytes_per_step: int = option(64 << 20, "the most that promotions and evictions of a step may copy", check=positive)
    draft_tokens: int = option(0, "longest draft of speculative decoding; 0 for one token a step", check=at_least(0))
    enable_kvc: bool = option(False, "evict KV by head while decoding (KV-Compress); needs offload_mode none")
    target_compression_rate: float = option(
        0.0, "share of a prompt's KV that is kept with enable_kvc; 0 for all", check=check_ratio
    )
    max_cache_tokens: int = option(0, "the same, as a number of tokens; 0 for all", check=at_least(0))
    kvc_metric: str = option("kv_compress", "metric of what a KV is worth")
    max_tokens: int = option(0, "longest answer in tokens; 0 for what the data set's answers need", check=at_least(0))
    max_samples: int = option(0, "use only the first samples; 0 for all", check=at_least(0))
    output: str = option("results/decoding/speculative_trace.json", "trace to write")
    timeline: bool = option(False, "draw the trace too, into a .png beside it (needs matplotlib)")

    @property
    def timeline_path(self) -> Path:
        return Path(self.output).with_suffix(".png")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_kvc and self.offload_mode != "none":
            raise ValueError(
                f"enable_kvc needs offload_mode none, not {self.offload_mode}: pages of single heads do not move"
            )
        if self.order == "free" and self.offload_mode != "none":
            raise ValueError(
                f"order free needs offload_mode none, not {self.offload_mode}: the trace names the chunks that move by "
                "their places in the data set's order"
            )
        if self.enable_kvc and self.draft_tokens:
            raise ValueError(
                f"enable_kvc and draft_tokens={self.draft_tokens} exclude each other: leave one of them out"
            )


WORDING = ("dataset_style", "instruction", "template")  # how questions are asked, in the retrieval section
SECTIONS: dict[str, type[Section]] = {"retrieval": RetrievalConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
S = TypeVar("S", bound=Section)


def load_config(path: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Return {"retrieval": {...}, "prefill": {...}, "decode": {...}} with every key, from a YAML file over the
    defaults.

    Raises FileNotFoundError, or ValueError that names the file, the section and the key, with the closest known one.
    """
    given: Any = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"pipeline configuration not found: {path} (relative to {Path.cwd()}); check the path"
            )
        try:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
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


def make_section(cls: type[S], name: str, values: Any) -> S:
    """Return a section from a mapping of some of its keys. Raises ValueError for an unknown key or a value of the wrong
    type."""
    if not isinstance(values, Mapping):
        raise ValueError(f"section {name} must map keys to values, not {type(values).__name__}")
    defaults = {setting.name: setting.default for setting in cls.options()}
    for key in values:
        if key not in defaults:
            raise ValueError(
                f"{name}.{key} is not a setting{_close_match(key, defaults)}; known: {', '.join(defaults)}"
            )
    whole = {key: float(value) for key, value in values.items() if type(value) is int and type(defaults[key]) is float}
    try:
        return cls(**{**values, **whole})
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def add_section_flags(parser: argparse.ArgumentParser, cls: type[Section]) -> None:
    """Add --some-key for every setting of a section, and --config. Flags that are not given stay out of the
    namespace."""
    parser.add_argument("--config", default=argparse.SUPPRESS, help="YAML file with this section; flags override it")
    for setting in cls.options():
        kind = type(setting.default)
        flag, help = f"--{setting.name.replace('_', '-')}", f"{setting.help} (default: {setting.default!r})"
        if kind is bool:
            parser.add_argument(flag, nargs="?", const=True, type=_parse_bool, default=argparse.SUPPRESS, help=help)
        else:
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=help)


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with which every stage is told of the data set. Those that are not given stay out of the
    namespace."""
    parser.add_argument(
        "--dataset", help="data set file; its name becomes the data set's name unless that is given too"
    )
    for setting in RetrievalConfig.options():
        if setting.name in WORDING:
            parser.add_argument(f"--{setting.name.replace('_', '-')}", default=argparse.SUPPRESS, help=setting.help)


def dataset_settings(values: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the retrieval section `values` with the flags of `add_dataset_flags` over it. A file that is given also
    gives its name to the data set, in place of the section's."""
    changed = dict(values)
    if args.dataset:
        changed |= {"dataset_path": args.dataset, "dataset_name": Path(args.dataset).stem}
    return changed | {name: getattr(args, name) for name in WORDING if hasattr(args, name)}


def section_from_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> Any:
    """Return the section `name`: defaults, then --config, then flags. Mistakes end the program with a message."""
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
    meant = closest(word, known)
    return f" (did you mean {meant!r}?)" if meant else ""
