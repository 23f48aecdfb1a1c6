"""The tokenizer in a GGUF file, as the model's published tokenizer.json has it: byte-level BPE or SentencePiece.

It is built from vocabulary and merges directly. transformers' own conversion takes many times as long, since it reads
every string of the file through arrays of NumPy to find the config, and it leaves out what the name of a pre-tokenizer
implies, such as the normal form NFC of Qwen and the single digits of SmolLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vllm_blend.models.gguf.header import GGUFHeader, read_array, read_header
from vllm_blend.models.gguf.splits import DEFAULT, SPLITS, Splits

logger = logging.getLogger(__name__)

SPACE = "\u2581"  # what SentencePiece writes for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # of files that do not say
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # of its special tokens those that swallow no whitespace
_MISTRAL_CONTROL = "[INST]"  # in Mistral's SentencePiece vocabularies from the second on


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file, with its chat template. Raises FileNotFoundError if there is no file, ValueError
    naming it and what in its metadata is missing, wrong or unknown."""
    header = read_header(path)
    try:
        vocabulary = _vocabulary(header)
        backend = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)
        backend.add_tokens(list(_added(vocabulary)))
        return _wrapped(vocabulary, backend)
    except Exception as error:  # the package tokenizers raises plain Exceptions
        if str(error).startswith(str(path)):
            raise
        raise ValueError(
            f"the tokenizer of {path} cannot be read: {error}; give tokenizer=, the directory or Hub id of the model "
            "that the file was made of"
        ) from error


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, without those that fill a matrix up above the vocabulary."""

    header: GGUFHeader
    model: str
    names: dict[int, str]
    types: list[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {name: index for index, name in self.names.items()}

    @property
    def family(self) -> str:
        return str(self.header.metadata.get("general.architecture"))

    @property
    def splits(self) -> Splits:
        return SPLITS.find(self.get("pre") or DEFAULT)

    @property
    def is_gemma(self) -> bool:
        return self.model == "llama" and self.family.startswith("gemma")

    def get(self, name: str) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def special(self, name: str) -> str | None:
        """Return a special token. Some converters wrote an id outside of the vocabulary for none."""
        default = _SENTENCEPIECE_IDS.get(name, -1) if self.model == "llama" else -1
        value = self.get(f"{name}_token_id")
        return self.names.get(default if value is None else value)


def _vocabulary(header: GGUFHeader) -> _Vocabulary:
    model = header.metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model={model!r}: gpt2 (byte-level BPE) and llama (SentencePiece) can be read")
    tokens = read_array(header, "tokenizer.ggml.tokens") or []
    types = read_array(header, "tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not tokens or not isinstance(tokens[0], str) or len(types) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens must be an array of strings, and token_type one of as many numbers")
    names = {i: token for i, token in enumerate(tokens) if types[i] != UNUSED or token != f"[PAD{i}]"}
    vocabulary = _Vocabulary(header, model, names, types)
    if vocabulary.is_gemma:  # converters write its runs of ▁ as spaces
        names |= {i: SPACE * len(name) for i, name in names.items() if types[i] == USER_DEFINED and not name.strip(" ")}
    if len(vocabulary.ids) < len(names):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    return vocabulary


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    splits = vocabulary.splits
    if splits is SPLITS[DEFAULT]:
        logger.warning(
            "%s names no pre-tokenizer (tokenizer.ggml.pre): text is split as llama.cpp does by default, which may not "
            "be as the model's own tokenizer does; to use that, give tokenizer=",
            vocabulary.header.path,
        )
    merges = [tuple(merge.split(" ", 1)) for merge in read_array(vocabulary.header, "tokenizer.ggml.merges") or []]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise ValueError("tokenizer.ggml.merges must be an array of pairs of tokens, each as 'left right'")
    whole_words = splits.whole_words or vocabulary.family == "smollm3"  # Llama 3's tokenizer under another name
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=whole_words))
    if splits.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.special("unknown")
    scores = read_array(vocabulary.header, "tokenizer.ggml.scores") or [0.0] * len(vocabulary.types)
    if len(scores) != len(vocabulary.types):
        raise ValueError("tokenizer.ggml.scores must be an array of a number for each token")
    if all(score.is_integer() for score, kind in zip(scores, vocabulary.types, strict=True) if kind == NORMAL):
        merges = _merges(vocabulary, scores)
        model: Any = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    else:  # scores of BPE are ranks, those of unigrams log-probabilities
        pieces = [(token, scores[index]) for token, index in vocabulary.ids.items()]
        model = models.Unigram(pieces, None if unknown is None else vocabulary.ids[unknown], byte_fallback=True)
    backend = Tokenizer(model)
    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaced = normalizers.Replace(" ", SPACE)
    if not vocabulary.flag("add_space_prefix", True):
        backend.normalizer = spaced
    else:
        decoder.append(decoders.Strip(" ", 1, 0))
        if _MISTRAL_CONTROL in vocabulary.ids:  # no space before what follows a special token
            backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaced])
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs that make up each token, in the order in which they are merged: by score, but in Gemma by id."""
    ids, types = vocabulary.ids, vocabulary.types
    found = []
    for token, index in ids.items():
        if types[index] in (NORMAL, USER_DEFINED):
            rank, sign = (index, 1) if vocabulary.is_gemma else (-scores[index], -1)
            for middle in range(1, len(token)):
                if (left := token[:middle]) in ids and (right := token[middle:]) in ids:
                    found.append((rank, sign * middle, sign * len(right), index, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _added(vocabulary: _Vocabulary) -> Iterator[AddedToken]:
    """Return the tokens that are found in a text before it is split."""
    for token, index in vocabulary.ids.items():
        kind = vocabulary.types[index]
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            is_special = kind != USER_DEFINED
            swallows = vocabulary.family == "phi3" and is_special and token not in _PHI3_PLAIN
            yield AddedToken(token, special=is_special, normalized=False, rstrip=swallows)


class _Handed:
    """A tokenizer that is handed over: a copy, which is made of what is given, would be parsed from JSON."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._backend


def _wrapped(vocabulary: _Vocabulary, backend: Tokenizer) -> PreTrainedTokenizerBase:
    special = {f"{theirs}_token": vocabulary.special(name) for theirs, name in _SPECIAL.items()}
    adds_bos = vocabulary.model == "llama" or vocabulary.splits.adds_bos
    before = special["bos_token"] if vocabulary.flag("add_bos_token", adds_bos) else None
    after = special["eos_token"] if vocabulary.flag("add_eos_token", False) else None
    single = [token for token in (before, "$A", after) if token is not None]
    pair = [*single, *(f"{token}:1" for token in (before, "$B", after) if token is not None)]
    ends = [(token, vocabulary.ids[token]) for token in (before, after) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single, pair, ends)
    metadata, prefix = vocabulary.header.metadata, "tokenizer.chat_template"
    templates = {
        name.removeprefix(f"{prefix}."): text for name, text in metadata.items() if name.startswith(f"{prefix}.")
    }
    default = metadata.get(prefix)
    return PreTrainedTokenizerFast(
        tokenizer_object=_Handed(backend),
        clean_up_tokenization_spaces=False,
        chat_template={"default": default, **templates} if templates and default is not None else default,
        **special,
    )
