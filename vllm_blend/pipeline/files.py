"""JSON files between the stages of the pipeline: written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

MAX_NAME = 150  # bytes; file systems allow 255, and the stages append something


def write_json(path: str | Path, data: Any) -> Path:
    """Write `data` as indented JSON, as `write_text` does."""
    return write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_text(path: str | Path, text: str) -> Path:
    """Write a file whole: a reader sees the old one or the new one, never a part. Folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def check_place(path: str | Path, option: str) -> None:
    """Raise OSError, naming the option, if the file `path` could not be written. To be called before the work."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder: give a file")
    check_folder(path.absolute().parent, f"{option} {path}")


def check_file_name(option: str, name: str) -> None:
    """Raise ValueError, naming the option, unless `name` can be part of a file's name: not a path, and not too long."""
    parts = Path(name).parts
    if "\0" in name or parts != (name,) or name == ".." or len(os.fsencode(name)) > MAX_NAME:
        raise ValueError(
            f"{option} {name!r} becomes a part of file names: use 1 to {MAX_NAME} letters, digits or other characters "
            "without '/', and not '.' or '..'"
        )


def check_folder(folder: Path, what: str) -> None:
    """Raise OSError, beginning with `what`, if no file could be written in a folder, which need not exist yet."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{what}: {there} is a file, not a folder: choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{what}: {there} is not writable: choose another place")


def read_json(path: str | Path, what: str) -> Any:
    """Parse a JSON file. Raises FileNotFoundError or ValueError that names the file, `what` it is, and where it
    breaks."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{what} not found: {path} (relative to {Path.cwd()}); check the path")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, numbers of many digits, deep nesting
        raise ValueError(f"{what} {path} is not valid JSON ({error}); write or download it again") from error


def is_json_lines(path: str | Path) -> bool:
    """Return whether a file has JSON in each of its lines: its name ends in .jsonl, or its first line is an object and
    others follow."""
    path = Path(path)
    if path.suffix.lower() == ".jsonl" or not path.is_file():
        return path.suffix.lower() == ".jsonl"
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        first, another = next(lines, b""), next(lines, None)
    if another is None or not first.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def read_json_lines(path: str | Path, what: str) -> list[tuple[int, Any]]:
    """Parse a file with JSON in every line that is not blank, and return each with its line number, from 1. Raises
    FileNotFoundError or ValueError that names the file, `what` it is, and the line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{what} not found: {path} (relative to {Path.cwd()}); check the path")
    parsed = []
    # Not str.splitlines, which also splits at characters that JSON allows within strings, such as U+2028.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                parsed.append((number, json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{what} {path}: line {number} is not valid JSON ({error}); correct the line"
                ) from error
    return parsed
