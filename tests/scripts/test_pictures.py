"""The pictures of the documentation are what the scripts draw."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.checkout import ROOT

IMAGES = ROOT / "docs/images"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Make the scripts importable as they are when they run, and have them write elsewhere."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import svg

    monkeypatch.setattr(svg, "IMAGES", tmp_path)
    return svg


def test_pictures_of_concepts_are_as_drawn(scripts: ModuleType, tmp_path: Path) -> None:
    import draw_concepts

    for name, draw in draw_concepts.PICTURES.items():
        assert draw().save(name) == tmp_path / name
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        assert drawn == (IMAGES / name).read_text(encoding="utf-8"), "run python scripts/draw_concepts.py"


def test_pictures_of_the_model_show_what_it_does(scripts: ModuleType, tmp_path: Path) -> None:
    """What a rule chooses may differ by a token where machines round differently; shapes and words may not."""
    import draw_reuse

    llm = draw_reuse.demo_llm()
    for name, draw in draw_reuse.PICTURES.items():
        draw(llm).save(name)
        drawn, kept = (ElementTree.parse(folder / name).getroot() for folder in (tmp_path, IMAGES))
        assert drawn.attrib == kept.attrib
        words = [[text.text for text in root.iter() if text.tag.endswith("text")] for root in (drawn, kept)]
        assert words[0] == words[1], "run python scripts/draw_reuse.py"


def test_every_picture_has_a_script_and_a_page(scripts: ModuleType) -> None:
    import draw_concepts
    import draw_reuse

    made = {*draw_concepts.PICTURES, *draw_reuse.PICTURES}
    assert made == {path.name for path in IMAGES.glob("*.svg")}
    text = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    assert all(f"(images/{name})" in text for name in made)
