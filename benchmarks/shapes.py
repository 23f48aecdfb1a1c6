"""Write a model directory of a well-known shape, without weights, for servers and engines with `load_format=dummy`.

    python -m benchmarks.shapes mistral-7b my-7b
    vllm-blend serve my-7b --load-format dummy --enable-blending

It has the configuration and the demo model's tokenizer. Answers of random weights mean nothing; the time does.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parents[1] / "inputs" / "demo-model"
_OF_8B: dict[str, Any] = {  # what Mistral-7B and Llama-3.1-8B have in common
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B: dict[str, Any] = _OF_8B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
LLAMA_31_8B: dict[str, Any] = _OF_8B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA_33_70B: dict[str, Any] = LLAMA_31_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES = {"llama-3.1-8b": LLAMA_31_8B, "llama-3.3-70b": LLAMA_33_70B, "mistral-7b": MISTRAL_7B, "qwen3-0.6b": QWEN3_06B}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path, help="new model directory")
    args = parser.parse_args(argv)
    write_shape(args.shape, args.folder)
    print(f"{args.folder} has the shape of {args.shape}")


def write_shape(shape: str, folder: Path) -> None:
    """Write the configuration of a shape, with the demo model's tokenizer, into a new folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TOKENIZER / name, folder)


if __name__ == "__main__":
    main()
