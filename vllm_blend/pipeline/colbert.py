"""ColBERT late interaction through RAGatouille, with an index on disk for each collection of passages.

RAGatouille needs older libraries than the rest of the project (`requirements-colbert.txt`), so it lives in its own
environment and is imported only when this backend is used. Its first search compiles ColBERT's C++ extensions, which
takes a C++ compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.retriever import Collection, Retrieval

INSTALL_HINT = (
    "the colbert backend needs RAGatouille, which cannot share an environment with transformers 5. Give it its own: "
    "python3 -m venv .venv-colbert && .venv-colbert/bin/pip install -r requirements-colbert.txt; then run this stage "
    "with PYTHON=.venv-colbert/bin/python, or use the backend bm25"
)


class ColbertRetrieval(Retrieval):
    """Retrieval by ColBERT. `config.model_id` is a checkpoint: a hub id, or a directory with weights and
    `artifact.metadata`.

    Raises ImportError with the install command if RAGatouille is missing, FileNotFoundError if the metadata is.
    """

    index_on_disk = True

    def __init__(self, config: RetrievalConfig | dict[str, Any]) -> None:
        super().__init__(config)
        self._ragatouille = _import_ragatouille()
        checkpoint = Path(self.config.model_id)
        if checkpoint.is_dir() and not (checkpoint / "artifact.metadata").is_file():
            raise FileNotFoundError(
                f"{checkpoint} has no artifact.metadata: it is not a ColBERT checkpoint, or was saved without "
                "ColBERT's settings (query and document length, marker tokens); copy the file from the training run"
            )
        self._model = self._ragatouille.from_pretrained(
            self.config.model_id, index_root=str(Path(self.config.index_dir).resolve()), verbose=0
        )

    def build_index(self, collection: Collection) -> Any:
        """Return the path of the collection's index, and build it unless it is there and holds exactly these passages.

        A single passage gets no index: there is nothing to choose from, and there are too few tokens to cluster.
        """
        if len(collection.passages) == 1:
            return ""
        name = _index_name(collection)
        path = Path(self.config.index_dir).resolve() / "colbert/indexes" / name
        if not _holds(path, collection.texts):
            self._model.index(
                collection=collection.texts,
                document_ids=[str(i) for i in range(len(collection.texts))],
                index_name=name,
                overwrite_index=True,
                split_documents=False,
            )
        return str(path)

    def rank(self, index: Any, collection: Collection, question: str) -> list[tuple[int, float]]:
        if not index:
            return [(0, float(self._model.rerank(question, collection.texts, k=1)[0]["score"]))]
        # A model that built an index under another root cannot search it; a model loaded from the index can.
        searcher = self._ragatouille.from_index(index, verbose=0)
        hits = searcher.search(question, k=len(collection.passages))
        return [(int(hit["document_id"]), float(hit["score"])) for hit in hits]


def _import_ragatouille() -> Any:
    # ColBERT compiles its extensions with the ninja of its own environment, which need not be activated.
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    try:
        from ragatouille import RAGPretrainedModel
    except ImportError as error:
        raise ImportError(f"{INSTALL_HINT} ({error})") from error
    return RAGPretrainedModel


def _index_name(collection: Collection) -> str:
    """Return a name that is readable, safe for a folder, and different for different passages."""
    digest = hashlib.sha256("\n".join(collection.texts).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', collection.name)}-{digest}"


def _holds(path: Path, texts: list[str]) -> bool:
    """Return whether the index at `path` was finished (its map of passages is written last) and holds these texts."""
    stored = path / "collection.json"
    if not stored.is_file() or not (path / "pid_docid_map.json").is_file():
        return False
    try:
        return bool(json.loads(stored.read_text()) == texts)
    except json.JSONDecodeError:
        return False
