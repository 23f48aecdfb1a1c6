"""Small real tokenizers, trained on the spot: byte-level BPE, byte-fallback BPE with visible spaces, and a slow one."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Where did the dog go?",
    "Der schnelle braune Fuchs springt über den faulen Hund, naïve café.",
    "敏捷的棕色狐狸跳过了懒狗。速い茶色の狐。",
    "def f(x):\n    return x + 1\n\nAnswer: 42 😀😃",
]
SPECIAL = ["<s>", "</s>", "<|sep|>"]


@lru_cache
def byte_level() -> PreTrainedTokenizerBase:
    """Return a tokenizer like GPT-2's, Llama 3's or Qwen's: tokens are bytes, and a character may take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@lru_cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """Return a tokenizer like Llama 2's or Mistral's: a word includes the space before it, and unknown characters are
    runs of byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([TEXTS[0]], trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    tokenizer = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@lru_cache
def slow() -> PreTrainedTokenizerBase:
    """A tokenizer written in Python: one token per byte; bytes that are no character decode to nothing."""
    return ByT5Tokenizer()


@lru_cache
def sentence_piece(kind: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer as published models have them after SentencePiece: a space stands before a text ("llama2",
    whose normalizer puts it also after special tokens; "mistral"; "unigram", whose vocabulary has the special tokens),
    or before words alone ("gemma")."""
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: trainers.Trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False)
    scheme = {"llama2": "never", "mistral": "first", "unigram": "always", "gemma": "never"}[kind]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    if kind == "llama2":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind in ("llama2", "mistral"):
        strip = [decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    if kind == "gemma":
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if kind == "unigram":
        tokenizer.decoder = decoders.Metaspace()
    state = json.loads(tokenizer.to_str())
    for added in state["added_tokens"]:
        if added["content"].startswith("<0x"):
            added["special"] = False
    state["added_tokens"] = [added for added in state["added_tokens"] if added["special"]]
    state["post_processor"] = json.loads(
        processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        ).__getstate__()
    )
    tokenizer = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SENTENCE_PIECE = ("llama2", "mistral", "unigram", "gemma")
