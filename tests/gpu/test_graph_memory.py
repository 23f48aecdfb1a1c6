"""What a CUDA graph reads lives as long as the graph (the rule is in `vllm_blend/ops/graph_capture.py`)."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.awq_models import write_random_model
from tests.gpu.graph_addresses import addresses, owned, segments
from vllm_blend import LLM, SamplingParams

pytestmark = pytest.mark.gpu

LARGEST_INTEGER = 32768  # that these engines pass to a kernel and that an address might be taken for
TOKENIZER = "inputs/demo-model"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LONG = (2048, 4096, 8192, 16384, 32000)
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen3": (QWEN3, {}),
    "fp8": (LLAMA, {"quantization": "fp8"}),
    "int4": (LLAMA, {"load_format": "auto"}),
    "drafts": (LLAMA, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}),
    "prompts": (LLAMA, {"max_cudagraph_capture_size": 256}),
    "question": (LLAMA, {"enable_blending": True, "blend_chunk_cache_gib": 0.25}),
    # All chunks stay: when a copy to the host ends is up to the GPU, and what a step sees would depend on it.
    "tapped": (
        LLAMA,
        {
            "enable_blending": True,
            "offload_mode": "resident",
            "offload_host_gib": 0.25,
            "offload_device_fraction": 1.0,
        },
    ),
    "cascade": (LLAMA, {"cascade_attention": True}),
    "kv_compress": (LLAMA, {"enable_kvc": True, "target_compression_rate": 0.25, "kvc_interval": 8}),
    "keydiff": (QWEN3, {"enable_kvc": True, "target_compression_rate": 0.25, "kvc_metric": "keydiff"}),
}


@pytest.fixture(params=ENGINES)
def llm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine of random weights whose graphs can be looked into."""
    shape, arguments = ENGINES[request.param]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    common: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32768, "num_gpu_blocks_override": 4096}
    if arguments.get("load_format") == "auto":
        write_random_model(Path(TOKENIZER), tmp_path, 3, 512, 1024, 64, max_position_embeddings=32768)
    common |= {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "enable_prefix_caching": False}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(torch.cuda.CUDAGraph, keep_graph=True))
    yield LLM(str(tmp_path), tokenizer=TOKENIZER, **common | arguments)
    gc.collect()
    torch.cuda.empty_cache()


def prompts(llm: LLM) -> list[Any]:
    ids = [[(11 * i * (j + 1)) % 2000 + 10 for i in range(64)] for j in range(8)]
    if llm.llm_engine.config.blend.enable_blending:
        return [{"prefix": [5, 6], "chunks": [ids[i], ids[(i + 3) % 8]], "suffix": ids[i][:5]} for i in range(4)]
    return [{"prompt_token_ids": ids[0] + ids[i]} for i in range(4)]


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(llm), params, use_tqdm=False)]


def graph_holders(llm: LLM) -> list[Any]:
    worker = llm.llm_engine.model_executor.driver_worker
    block_pass = worker.model_runner.block_pass
    own = (block_pass.decode_graphs, block_pass.question_graphs, block_pass.step_graphs)
    holders = [*own, *worker.extensions]
    return [holder for holder in holders if holder is not None]


def strangers(llm: LLM) -> set[str]:
    """Return the addresses in the engine's graphs that lie in device memory and have no owner that the rule allows.

    A word whose lower half is a small number is an integer as often as an address: what pads it may be the upper half
    of one.
    """
    extents, graphs = owned(graph_holders(llm))
    assert graphs
    held = segments(llm.llm_engine.device)
    pools = {tuple(graph.pool()) for graph in graphs}
    found = set()
    for word in {word for graph in graphs for word in addresses(graph)}:
        pool = next((pool for start, stop, pool in held if start <= word < stop), None)
        is_owned = pool is None or pool in pools or any(start <= word < stop for start, stop in extents)
        if not is_owned and word & 0xFFFFFFFF > LARGEST_INTEGER:
            found.add(hex(word))
    return found


def test_other_steps_and_other_tensors_change_nothing_that_a_graph_reads(llm: LLM) -> None:
    """Long prefills between two runs drop whatever is remembered by size; new tensors then take the freed memory."""
    before = answers(llm)
    one = SamplingParams(temperature=0, max_tokens=1)
    for length in LONG:
        ids = [(7 * i) % 2000 + 10 for i in range(length)]
        llm.generate([ids], one, use_tqdm=False)
    gc.collect()
    assert not strangers(llm)
    sizes = [size for size in (128, 2048, 1 << 18) for _ in range(128)]
    poison = [torch.full((size,), -1, dtype=torch.int32, device="cuda") for size in sizes]
    torch.cuda.empty_cache()
    assert answers(llm) == before
    assert all(int(tensor.min()) == -1 for tensor in poison)


@pytest.mark.parametrize("feature", [{}, {"cascade_attention": True}])
def test_graphs_keep_no_logits(tmp_path: Path, feature: dict[str, Any]) -> None:
    """A vocabulary 64 times as large adds nothing to what all graphs keep, and nothing to what the engine sets aside
    for them. 128 requests have graphs of 615 rows together, and those of cascade attention 396 more."""
    seqs, vocabularies = 128, (2048, 131072)
    kept, set_aside = [], []
    for vocab_size in vocabularies:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": vocab_size}))
        common: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_model_len": 4096}
        common |= {"max_num_seqs": seqs, "gpu_memory_utilization": 0.3}
        llm = LLM(str(tmp_path), tokenizer=TOKENIZER, **common, **feature)
        assert [len(ids) for ids in answers(llm)] == [24] * 4
        pools = {tuple(graph.pool()) for graph in owned(graph_holders(llm))[1]}
        assert len(pools) == 1
        kept.append(sum(stop - start for start, stop, pool in segments(llm.llm_engine.device) if pool in pools))
        share = llm.llm_engine.model_executor.driver_worker.memory
        assert share is not None
        set_aside.append(share.graphs)
        llm.llm_engine.shutdown()
        del llm, share
        gc.collect()
        torch.cuda.empty_cache()
    logits_of_the_largest = seqs * vocabularies[1] * torch.bfloat16.itemsize
    assert kept[1] - kept[0] < logits_of_the_largest // 2
    assert set_aside[1] - set_aside[0] < logits_of_the_largest // 2
