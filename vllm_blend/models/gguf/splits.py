"""How byte-level tokenizers split text before they merge: llama.cpp's names of pre-tokenizers, and what is split off in
the tokenizer.json of the models that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_blend.registry import Registry

DEFAULT = "default"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"  # each on its own
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", _DIGITS)
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_WORD % ('', '')}|{_DIGITS}|{_SIGNS}"
_O200K = rf"{_WORD % (f'{_ENDINGS}?', f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_SIGNS}"
_CJK = r"[一-龥ࠀ-一가-퟿]+"
# Letters with case, without the mathematical ones.
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7FF}]]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_LLAMA_CPP = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")  # llama.cpp's, for files that name none


@dataclass(frozen=True)
class Splits:
    """What each of some `names` stands for.

    `patterns` are split off one after the other. With `whole_words` what is split off is one token if there is such a
    token, whatever the merges make of it. `adds_bos` is what holds for files that do not say whether a text begins with
    BOS. With `composes` text is brought into the normal form NFC at first.
    """

    names: tuple[str, ...]
    patterns: Sequence[str]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


_ALL = (
    Splits((DEFAULT,), _LLAMA_CPP),
    Splits(("qwen2", "deepseek-r1-qwen"), (_QWEN2,), composes=True),
    Splits(("megrez", "kormo"), (_QWEN2,)),
    Splits(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        (_CL100K,),
        whole_words=True,
        adds_bos=True,
    ),
    Splits(("dbrx", "smaug-bpe"), (_CL100K,)),  # Phi-4; SmolLM3
    Splits(("gpt-4o", "kanana2"), (_O200K,)),  # gpt-oss, Phi-4-mini
    Splits(("tekken",), (_TEKKEN,), whole_words=True, adds_bos=True),
    Splits(("gpt-2", "phi-2", "trillion", "a.x-4.0", "gigachat", "mellum"), (_GPT2,)),
    Splits(("smollm", "refact", "starcoder", "codeshell", "exaone", "minerva-7b"), (_DIGITS, _GPT2)),  # Granite 3
    Splits(("olmo",), (_GPT2,), composes=True),
    Splits(("command-r",), (_DIGITS, _GPT2), composes=True),
    Splits(("deepseek-llm",), _DEEPSEEK_LLM),
    Splits(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS)),
    Splits(("deepseek-v3",), _DEEPSEEK_V3),
    Splits(("seed-coder",), (_SEED_CODER,)),
)
SPLITS: Registry[Splits] = Registry(
    "pre-tokenizer", "tokenizer.ggml.pre", {name: splits for splits in _ALL for name in splits.names}
)
