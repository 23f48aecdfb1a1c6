"""Small tokenizers, trained on the spot, as the metadata of GGUF files."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase

from tests.models.gguf_files import write_metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Entries = dict[str, Any]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "Hello world, it's WE'LL they'D",
    "trailing  ",
    "a\n\n\nb \n \n\t\ttabs \t\n",
    "\r\nlines\r\n",
    "1234567890 3.14159 1,000,000 0x7fff 2024-11-28T14:59",
    "敏捷的棕色狐狸跳过了懒狗。速い茶色の狐が飛び越えた",
    "빠른 갈색 여우 Привет, мир! مرحبا بالعالم",
    "हिन्दी में एक वाक्य है।",
    "naïve café Ångström ﬁ",
    "😀😃 👩‍👩‍👧 🇩🇪 👍🏽 🤖🤖",
    "def f(x):\n    if x:\n        return x+1  # comment\n\n\nclass A:\n\tpass\n",
    'for(int i=0;i<10;++i){ printf("%d\\n", i); }',
    '<div class="a"><p>text</p></div> https://example.com/a?b=c&d=e#f {"a": [1, 2]}',
    "\u00a0nbsp\u2003em\u200bzero\u3000ideographic",
    "x" * 40 + " " * 20 + "code",
    "ΑΒΓ αβγ Ⅷ ½ ² १२३ ٤٥٦",
    "MiXeDCase camelCaseString HTTPServer end.Start",
    "\x00\x01\x7f control \ue000 \U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>x <|endoftext|> <tool>y</tool>",
]


@lru_cache
def _byte_level() -> tuple[list[str], list[str]]:
    """Return tokens and merges that were learned across words, so that every missing split shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    pieces = [text[at : at + 25] for text in TEXTS for at in range(0, len(text), 7)]
    tokenizer.train_from_iterator(pieces * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(pair) for pair in model["merges"]]


def byte_level_entries(pre: str | None, **more: Any) -> Entries:
    """Return the metadata of a byte-level tokenizer with ChatML's special tokens behind its vocabulary, a token of the
    user's, and three that fill a matrix up."""
    tokens, merges = _byte_level()
    count = len(tokens)
    tokens = [*tokens, *SPECIAL, "<tool>", *(f"[PAD{count + 4 + i}]" for i in range(3))]
    return {
        "/tokenizer.ggml.model": "gpt2",
        "/tokenizer.ggml.pre": pre,
        "/tokenizer.ggml.tokens": tokens,
        "/tokenizer.ggml.token_type": [NORMAL] * count + [CONTROL] * 3 + [USER_DEFINED] + [UNUSED] * 3,
        "/tokenizer.ggml.merges": merges,
        "/tokenizer.ggml.bos_token_id": count,
        "/tokenizer.ggml.eos_token_id": count + 2,
        "/tokenizer.ggml.padding_token_id": count,
        "/tokenizer.chat_template": CHATML,
    } | {f"/tokenizer.{name}": value for name, value in more.items()}


@lru_cache
def _sentencepiece() -> list[str]:
    """Return what SentencePiece would learn in this order: characters last, after what is merged of them."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    tokenizer.train_from_iterator([f"▁{text}".replace(" ", "▁") for text in TEXTS[:13]] * 3, trainer)
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    return sorted(vocab, key=lambda token: (len(token) == 1, vocab[token]))


def sentencepiece_entries(
    scores: list[float] | None = None, special: tuple[str, ...] = (), own: tuple[str, ...] = (), **more: Any
) -> Entries:
    """Return the metadata of a SentencePiece tokenizer with fallback to bytes, and tokens of the user's `own`."""
    first, runs = ["<unk>", "<s>", "</s>", *special], {"▁" * len(token) for token in own if not token.strip()}
    pieces = [piece for piece in _sentencepiece() if piece not in {*first, *runs}]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    before = [*first, *bytes_, *own]
    types = [UNKNOWN, *[CONTROL] * (len(first) - 1), *[BYTE] * 256, *[USER_DEFINED] * len(own), *[NORMAL] * len(pieces)]
    return {
        "/tokenizer.ggml.model": "llama",
        "/tokenizer.ggml.tokens": [*before, *pieces],
        "/tokenizer.ggml.scores": [0.0] * len(before) + (scores or [-float(i) for i in range(len(pieces))]),
        "/tokenizer.ggml.token_type": types,
        "/tokenizer.ggml.bos_token_id": 1,
        "/tokenizer.ggml.eos_token_id": 2,
        "/tokenizer.ggml.unknown_token_id": 0,
    } | {f"/tokenizer.{name}": value for name, value in more.items()}


def entries_of(tokenizer: PreTrainedTokenizerBase, pre: str, **more: Any) -> Entries:
    """Return the metadata of a byte-level tokenizer."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model, special = described["model"], {token["id"] for token in described["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "/tokenizer.ggml.model": "gpt2",
        "/tokenizer.ggml.pre": pre,
        "/tokenizer.ggml.tokens": tokens,
        "/tokenizer.ggml.token_type": [CONTROL if index in special else NORMAL for index in range(len(tokens))],
        "/tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "/tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "/tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
    } | {f"/tokenizer.{name}": value for name, value in more.items()}


def write_vocabulary(path: Path, entries: Entries, architecture: str = "llama") -> Path:
    """Write a file without tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8}
    write_metadata(writer, architecture, sizes | {"attention.head_count": 1} | entries)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
