"""The tokenizer of a GGUF file gives the ids, the texts and the chats of the model's own: that of transformers' classes
and conversion, and where the conversion forgets something, of the published tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from tests.models.gguf_vocabularies import (
    CHATML,
    SPECIAL,
    TEXTS,
    byte_level_entries,
    sentencepiece_entries,
    write_vocabulary,
)
from vllm_blend.models.gguf.splits import SPLITS
from vllm_blend.models.gguf.tokenizer import load_gguf_tokenizer

pytestmark = pytest.mark.cpu_only
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi \n"},
    {"role": "assistant", "content": "Hello 😀"},
    {"role": "user", "content": "敏捷"},
]


def ours(folder: Path, entries: dict[str, Any], architecture: str = "llama") -> PreTrainedTokenizerBase:
    return load_gguf_tokenizer(write_vocabulary(folder / "model.gguf", entries, architecture))


def converted(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


# Ten files of five families. In all of them transformers' own conversion is right for these texts.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("llama", byte_level_entries("llama-bpe", **{"ggml.add_bos_token": True})),
    "llama 3 without BOS": ("llama", byte_level_entries("llama-bpe", **{"ggml.add_bos_token": False})),
    "mistral nemo": ("llama", byte_level_entries("tekken", **{"ggml.add_bos_token": True})),
    "qwen 2": ("qwen2", byte_level_entries("qwen2")),
    "qwen 3": ("qwen3", byte_level_entries("deepseek-r1-qwen", **{"ggml.add_bos_token": True})),
    "gpt-oss": ("gpt-oss", byte_level_entries("gpt-4o")),
    "gpt 2": ("llama", byte_level_entries("gpt-2", **{"ggml.add_eos_token": True})),
    "llama 2": ("llama", sentencepiece_entries()),
    "phi 3": ("phi3", sentencepiece_entries(own=("  ", "<tool>"))),
    "gemma 3": (
        "gemma3",
        sentencepiece_entries(own=("  ", "<tool>"), chat_template=CHATML) | {"/tokenizer.ggml.add_space_prefix": False},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_ids_texts_and_chats_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, entries = FILES[name]
    tokenizer = ours(tmp_path, entries, architecture)
    reference = converted(tmp_path)
    count = 0
    for text in TEXTS:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
        count += len(ids)
    assert count > 250
    for kind in ("bos", "eos", "pad", "unk"):
        if name not in ("gemma 3", "phi 3", "llama 2") or kind != "pad":
            assert getattr(tokenizer, f"{kind}_token_id") == getattr(reference, f"{kind}_token_id"), kind
    if tokenizer.chat_template is not None:
        for ends in (False, True):
            chats = [
                t.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=ends)
                for t in (tokenizer, reference)
            ]
            assert chats[0] == chats[1] and "敏捷<|im_end|>" in chats[0]


# Beyond transformers' conversion


def published(entries: dict[str, Any], *steps: Any, normalizer: Any = None, **options: Any) -> Tokenizer:
    """Return what a model's tokenizer.json describes: byte-level BPE after these steps."""
    ids = {token: index for index, token in enumerate(entries["/tokenizer.ggml.tokens"])}
    merges: list[Any] = [tuple(merge.split(" ")) for merge in entries["/tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(ids, merges, **options))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["<tool>"])
    return backend


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
CJK = "[一-龥ࠀ-一가-퟿]+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIPELINES: dict[str, Any] = {
    "smollm": (DIGITS, GPT2),
    "refact": (DIGITS, GPT2),
    "deepseek-coder": (split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(CJK), DIGITS, BYTES),
    "deepseek-v3": (split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), BYTES),
    "dbrx": (split(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), BYTES),
    "kormo": (split(QWEN2), BYTES),
}


@pytest.mark.parametrize("pre", PIPELINES)
def test_text_is_split_as_the_published_tokenizer_splits_it(pre: str, tmp_path: Path) -> None:
    entries = byte_level_entries(pre)
    tokenizer, reference = ours(tmp_path, entries), published(entries, *PIPELINES[pre])
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids, text
    assert any(reference.encode(text).ids != published(entries, BYTES).encode(text).ids for text in TEXTS)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a1234 b", ["a", "1234", " b"]),
        ("x=1;\n  y", ["x", "=", "1", ";", "\n", " ", " y"]),
        ("b𝐱 中文字", ["b", "𝐱 ", "中文字"]),
    ],
)
def test_deepseek_llm_splits_letters_with_case_signs_and_runs_of_digits(text: str, pieces: list[str]) -> None:
    steps = pre_tokenizers.Sequence([split(pattern) for pattern in SPLITS["deepseek-llm"].patterns])
    assert [piece for piece, _ in steps.pre_tokenize_str(text)] == pieces


def test_qwens_text_is_composed(tmp_path: Path) -> None:
    """Published tokenizers of Qwen bring text into the normal form NFC, which no file says."""
    entries = byte_level_entries("qwen2")
    tokenizer = ours(tmp_path, entries, "qwen2")
    ids = {token: index for index, token in enumerate(entries["/tokenizer.ggml.tokens"])}
    merges: list[Any] = [tuple(merge.split(" ")) for merge in entries["/tokenizer.ggml.merges"]]
    reference = Qwen2Tokenizer(ids, merges)
    assert isinstance(tokenizer.backend_tokenizer.normalizer, normalizers.NFC)
    text = "cafe\u0301 A\u030a \u1100\u1161"
    assert tokenizer.encode(text) == reference.encode(text) == tokenizer.encode("café Å 가")
    assert ours(tmp_path, byte_level_entries("gpt-2")).encode(text) != tokenizer.encode(text)


@pytest.mark.parametrize(
    ("pre", "architecture", "whole"),
    [("llama-bpe", "llama", True), ("smaug-bpe", "smollm3", True), ("smaug-bpe", "llama", False)],
)
def test_words_of_the_vocabulary_are_tokens_whatever_the_merges_say(
    pre: str, architecture: str, whole: bool, tmp_path: Path
) -> None:
    entries = byte_level_entries(pre)
    word = len(entries["/tokenizer.ggml.tokens"]) - 1
    entries["/tokenizer.ggml.tokens"][word] = "Ġunmergeable"
    tokenizer = ours(tmp_path, entries, architecture)
    reference = published(entries, *PIPELINES["dbrx"], ignore_merges=whole)
    ids = tokenizer.encode("an unmergeable word", add_special_tokens=False)
    assert ids == reference.encode("an unmergeable word", add_special_tokens=False).ids
    assert (word in ids) is whole


@pytest.mark.parametrize("first", [False, True])
def test_where_sentencepiece_puts_a_space(first: bool, tmp_path: Path) -> None:
    """Before every text between special tokens, also one that begins with a space, as SentencePiece and the published
    files of Llama 2 do; with Mistral's control tokens, before the first text alone."""
    tokenizer = ours(tmp_path, sentencepiece_entries(special=("[INST]", "[/INST]") if first else ()))

    def pieces(text: str) -> Any:
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))

    if first:
        assert pieces("<s>[INST] x[/INST]x") == ["<s>", "[INST]", "▁", "x", "[/INST]", "x"]
        assert pieces(" x") == ["▁", "x"]
    else:
        assert pieces("<s>x</s> x") == ["<s>", "▁", "x", "</s>", "▁▁", "x"]
        assert pieces(" x") == ["▁▁", "x"]
    assert tokenizer.decode(tokenizer.encode("x y", add_special_tokens=False)) == "x y"


def test_scores_of_unigrams_are_log_probabilities(tmp_path: Path) -> None:
    """Those of BPE are whole numbers: ranks."""
    count = len(sentencepiece_entries()["/tokenizer.ggml.tokens"]) - 259
    scores = [-1.5 - (index * 37 % 101) / 10 for index in range(count)]
    entries = sentencepiece_entries(scores)
    tokenizer = ours(tmp_path, entries)
    tokens, scores = entries["/tokenizer.ggml.tokens"], entries["/tokenizer.ggml.scores"]
    rounded = np.array(scores, np.float32).astype(float).tolist()
    reference = Tokenizer(models.Unigram(list(zip(tokens, rounded, strict=True)), 0, byte_fallback=True))
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for text in TEXTS[:-2]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text).ids
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_phi_3s_turns_swallow_the_whitespace_after_them(tmp_path: Path) -> None:
    """As its added tokens do in tokenizer.json, but for those that begin and end a text."""
    entries = sentencepiece_entries(special=("<|user|>", "<|endoftext|>"))
    for architecture, swallows in (("phi3", True), ("llama", False)):
        tokenizer = ours(tmp_path, entries, architecture)
        ids = tokenizer.encode("<|user|>\nx<|endoftext|>\n", add_special_tokens=False)
        turn, end = (tokenizer.decode(part) for part in (ids[1:-2], ids[-2:]))
        assert turn == ("x" if swallows else "\nx") and end == "<|endoftext|> \n"


def test_tokens_that_fill_a_matrix_up_are_none(tmp_path: Path) -> None:
    entries = byte_level_entries("gpt-2", **{"ggml.padding_token_id": 10**6})
    tokenizer = ours(tmp_path, entries)
    assert len(tokenizer) == len(entries["/tokenizer.ggml.tokens"]) - 3
    assert tokenizer.pad_token is None  # some converters wrote an id outside of the vocabulary for none
    kinds = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert kinds == {**dict.fromkeys(SPECIAL, True), "<tool>": False}


def test_templates_with_names_are_kept(tmp_path: Path) -> None:
    entries = byte_level_entries("gpt-2", **{"chat_template.tool_use": "{{ tools }}"})
    assert ours(tmp_path, entries).chat_template == {"default": CHATML, "tool_use": "{{ tools }}"}


def test_what_holds_where_a_file_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text begins with BOS in SentencePiece and Llama 3, and is split as llama.cpp splits it by default."""
    bare = sentencepiece_entries()
    for name in ("bos", "eos", "unknown"):
        del bare[f"/tokenizer.ggml.{name}_token_id"]
    tokenizer = ours(tmp_path, bare)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.encode("x")[0] == 1
    for pre, bos in (("llama-bpe", True), ("tekken", True), ("gpt-2", False)):
        tokenizer = ours(tmp_path, byte_level_entries(pre))
        assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) is bos
    assert "pre-tokenizer" not in caplog.text
    tokenizer = ours(tmp_path, byte_level_entries(None))
    assert "model.gguf names no pre-tokenizer (tokenizer.ggml.pre): text is split as llama.cpp does" in caplog.text
    assert tokenizer.decode(tokenizer.encode("x = 12345;")) == "x = 12345;"
