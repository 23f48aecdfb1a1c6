"""Which file a name means: a path, the first of several parts, or a file of a repository on the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from vllm_blend.models.gguf import names
from vllm_blend.models.gguf.header import parts_of
from vllm_blend.models.gguf.names import gguf_path, names_gguf

pytestmark = pytest.mark.cpu_only
REPOSITORY = "someone/Tiny-GGUF"
FILES = (
    "README.md",
    "Tiny-Q4_K_M.gguf",
    "Tiny-Q4_K_S.gguf",
    "tiny-q8_0.gguf",
    "Tiny.Q5_0.gguf",
    "Tiny-UD-Q3_K_XL.gguf",
    "mmproj-Q8_0.gguf",
    "F16/Tiny-F16-00001-of-00002.gguf",
    "F16/Tiny-F16-00002-of-00002.gguf",
    "One-Q2_K.gguf",
    "Other-Q2_K.gguf",
)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are downloaded of a repository with `FILES`."""
    asked: list[str] = []

    def snapshot_download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if (repository, revision) != (REPOSITORY, "v1"):
            raise ConnectionError("offline")
        folder = tmp_path / "snapshot"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in [name for name in FILES if any(fnmatch(name, pattern) for pattern in allow_patterns)]:
            asked.append(name)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    names._download.cache_clear()
    yield asked
    names._download.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["Tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny-q8_0.gguf"]),
        ("Q5_0", ["Tiny.Q5_0.gguf"]),
        ("UD-Q3_K_XL", ["Tiny-UD-Q3_K_XL.gguf"]),
        ("F16", ["F16/Tiny-F16-00001-of-00002.gguf", "F16/Tiny-F16-00002-of-00002.gguf"]),
        ("F16/Tiny-F16-00001-of-00002.gguf", ["F16/Tiny-F16-00001-of-00002.gguf", "F16/Tiny-F16-00002-of-00002.gguf"]),
        ("Other-Q2_K.gguf", ["Other-Q2_K.gguf"]),
    ],
)
def test_a_file_of_a_repository(wanted: str, expected: list[str], fetched: list[str]) -> None:
    assert names_gguf(f"{REPOSITORY}:{wanted}") and not fetched
    for _ in range(2):  # each part of the engine asks
        path = gguf_path(f"{REPOSITORY}:{wanted}", "v1")
        assert path is not None and path.as_posix().endswith(f"snapshot/{expected[0]}")
    assert [name for name in fetched if "mmproj" not in name] == expected


@pytest.mark.parametrize(
    ("wanted", "revision", "message"),
    [
        (
            "Q6_K",
            "v1",
            r"the repository 'someone/Tiny-GGUF' has no file Q6_K; name one, as in someone/Tiny-GGUF:model-Q4",
        ),
        ("Q4_K", "v1", "has no file Q4_K;"),
        ("Q2_K", "v1", r"has several files Q2_K: One-Q2_K\.gguf Other-Q2_K\.gguf; name one"),
        ("F16/Tiny.gguf", "v1", r"has no file F16/Tiny\.gguf;"),
        ("Q4_K_M", None, "could not fetch Q4_K_M of 'someone/Tiny-GGUF' from the Hub: offline"),
    ],
)
def test_a_file_that_cannot_be_had_is_named(
    wanted: str, revision: str | None, message: str, fetched: list[str]
) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        gguf_path(f"{REPOSITORY}:{wanted}", revision)


def test_what_else_a_name_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("the Hub is asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "name:Q4.gguf").touch()
    for name, path in (
        ("model.gguf", Path("model.gguf")),
        ("/no/such/MODEL.GGUF", Path("/no/such/MODEL.GGUF")),
        ("~/model.gguf", Path.home() / "model.gguf"),
        ("odd/name:Q4.gguf", Path("odd/name:Q4.gguf")),
        ("folder.gguf", None),
        (str(tmp_path), None),
        ("someone/tiny", None),
        ("gpt2", None),
    ):
        assert gguf_path(name) == path and names_gguf(name) is (path is not None)


def test_the_parts_of_a_file() -> None:
    assert parts_of(Path("a/m-00001-of-00002.gguf")) == [Path(f"a/m-0000{i}-of-00002.gguf") for i in (1, 2)]
    for name in ("m.gguf", "m-1-of-2.gguf", "m-00000-of-00000.gguf"):
        assert parts_of(Path(name)) == [Path(name)]
