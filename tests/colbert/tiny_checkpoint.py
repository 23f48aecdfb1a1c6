"""A ColBERT checkpoint small enough to make on the spot: a random two-layer BERT over characters, 32 numbers a token.

With random weights a token's vector depends mostly on the token itself, so late interaction finds passages that share
characters with the question: enough to tell a working retriever from a broken one.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

DIM, HIDDEN = 32, 32  # RAGatouille packs 4 bits a number for small collections, which takes a multiple of 32

# ColBERT's own settings of a checkpoint; without this file it cannot be loaded from a directory.
ARTIFACT_METADATA = {
    "dim": DIM,
    "doc_maxlen": 128,
    "query_maxlen": 32,
    "nbits": 2,
    "similarity": "cosine",
    "mask_punctuation": True,
    "attend_to_mask_tokens": False,
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_token": "[Q]",
    "doc_token": "[D]",
}


def write_tiny_colbert(folder: Path) -> Path:
    """Write tokenizer, weights, configuration and `artifact.metadata`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [*string.ascii_lowercase, *string.digits]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
    vocabulary = [*special, *letters, *(f"##{c}" for c in letters), *string.punctuation]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        architectures=["HF_ColBERT"],
    )
    config.save_pretrained(folder)
    torch.manual_seed(0)
    weights = {f"bert.{name}": tensor for name, tensor in BertModel(config).state_dict().items()}
    weights["linear.weight"] = torch.randn(DIM, HIDDEN) * 0.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "artifact.metadata").write_text(json.dumps(ARTIFACT_METADATA))
    return folder
