"""A little SVG for the pictures of the documentation: boxes, words and arrows on white, in one style."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
SLATE, BLUE, GREEN, ORANGE, VIOLET, RED = "#64748b", "#2563eb", "#059669", "#d97706", "#7c3aed", "#dc2626"
EMPTY = "#e2e8f0"
PALE = 0.18  # opacity of what is reused; what is computed is opaque
STYLE = (
    "text{font-family:sans-serif;fill:#334155;font-size:11px}.title{font-size:13px;font-weight:600}"
    ".middle{text-anchor:middle}.end{text-anchor:end}"
)
ARROW = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#334155"/></marker>'
)


class Picture:
    """A picture of a fixed size in pixels, to which shapes are added in the order in which they cover one another."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0, line: str = "none"
    ) -> None:
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" fill-opacity="{opacity:g}" '
            f'stroke="{line}"/>'
        )

    def words(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write a line of text whose baseline begins at (x, y). `kind`: title, middle or end, for bold or aligned."""
        named = f' class="{kind}"' if kind else ""
        self._shapes.append(f'<text x="{x:g}" y="{y:g}"{named}>{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        self._shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#334155" marker-end="url(#head)"{start}/>'
        )

    def legend(self, x: float, y: float, entries: list[tuple[str, float, str]]) -> None:
        """Explain colours in one line: (fill, opacity, what it means) each."""
        for fill, opacity, text in entries:
            self.box(x, y - 9, 10, 10, fill, opacity, line="#94a3b8")
            self.words(x + 15, y, text)
            x += 15 + 6.0 * len(text) + 22

    def save(self, name: str) -> Path:
        """Write the picture into docs/images, and return its path."""
        body = "\n".join(self._shapes)
        path = IMAGES / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}">\n<style>{STYLE}</style>\n<defs>{ARROW}</defs>\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
            encoding="utf-8",
        )
        return path
