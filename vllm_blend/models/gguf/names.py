"""Which GGUF file a model's name means: a path, or one of a repository of the Hub, as in `owner/repo:Q4_K_M`."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from vllm_blend.models.gguf.header import parts_of

_ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+):([\w./-]+)")
_PART = re.compile(r"-\d{5}-(of-\d{5}\.gguf)$", re.IGNORECASE)
_NOT_TEXT = "mmproj"  # how the names of files begin that encode images


def gguf_path(model: str, revision: str | None = None) -> Path | None:
    """Return the path of a GGUF file, None if `model` names a directory or a model of the Hub instead. A file of a
    repository is downloaded; if it is split, so are its other parts.

    Raises FileNotFoundError if a repository has no such file or several, or cannot be reached.
    """
    if not names_gguf(model):
        return None
    path, match = Path(model).expanduser(), _ON_THE_HUB.fullmatch(model)
    return path if match is None or path.exists() else _download(match[1], match[2], revision)


def names_gguf(model: str) -> bool:
    """Return whether a model's name is that of a GGUF file, here or on the Hub, without asking for it."""
    path = Path(model).expanduser()
    return not path.is_dir() and (path.suffix.lower() == ".gguf" or _ON_THE_HUB.fullmatch(model) is not None)


def conversion(folder: str, name: str) -> str:
    """Return the expression, with transformers' classes, that writes a GGUF file's model as a directory of
    safetensors: `new_path`. Without GgufConfig, transformers 5.23 keeps quantized blocks, and saves none of them."""
    return (
        f"AutoModelForCausalLM.from_pretrained({folder}, gguf_file={name}, "
        "quantization_config=GgufConfig(dequantize=True)).save_pretrained(new_path)"
    )


@lru_cache
def _download(repository: str, wanted: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = _patterns(wanted)
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # network, authentication and naming errors share no base class
        raise FileNotFoundError(f"could not fetch {wanted} of {repository!r} from the Hub: {error}") from error
    found = [
        path
        for path in sorted(folder.rglob("*.gguf"))
        if any(fnmatchcase(path.relative_to(folder).as_posix(), pattern) for pattern in patterns)
        and not path.name.startswith(_NOT_TEXT)
        and path == parts_of(path)[0]
    ]
    if len(found) != 1:
        names = "".join(f" {path.relative_to(folder).as_posix()}" for path in found)
        what = f"several files {wanted}:{names}" if found else f"no file {wanted}"
        raise FileNotFoundError(
            f"the repository {repository!r} has {what}; name one, as in {repository}:model-Q4_K_M.gguf"
        )
    return found[0]


def _patterns(wanted: str) -> list[str]:
    """Return the patterns of the names that `wanted` stands for: a file, or all whose names end with a type."""
    if wanted.lower().endswith(".gguf"):
        return [_PART.sub(r"-?????-\1", wanted)]
    either = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in wanted)
    ends = (".gguf", "-?????-of-?????.gguf")
    return [f"{before}{either}{end}" for before in ("", "*[-._/]") for end in ends]
