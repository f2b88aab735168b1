"""Lines, shapes and words on a Pillow image, in the pixels of the finished picture.

Pillow's own font has Latin characters only; others are replaced by similar ones, or by a question mark.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workbench.analysis.curve import Array
from workbench.figures import theme

OVERSAMPLING = 3
"""Factor by which the drawing is finer than the PNG, which averages it: Pillow's lines are jagged."""
LINE_PX = 18
"""Height of a line of text, in pixels."""
DASH_PX = {"dash": (9, 6), "dot": (2, 4), "dashdot": (9, 4), "longdash": (14, 6), "longdashdot": (14, 5)}
"""Length in pixels of a dash and of the gap after it."""
SIMILAR = str.maketrans(
    {
        "×": "x",
        "–": "-",
        "−": "-",
        "→": "->",
        "≤": "<=",
        "≥": ">=",
        "○": "o",
        "▷": ">",
        "▲": "^",
        "✕": "x",
        "…": "...",
        "\u2007": " ",
        "\u200b": "",
        "√": "sqrt",
        "’": "'",
        "◆": "o",
    }
)

Point = Sequence[float]
Color = str | tuple[int, int, int, int]


class Canvas:
    """A white picture of `width` × `height` pixels.

    Raises `ImportError` if Pillow is not installed, or was built without its font.
    """

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self.width, self.height = width, height
        self._font = {
            size: ImageFont.load_default(size * OVERSAMPLING) for size in (10, 11, theme.FONT_PX, theme.TITLE_PX)
        }
        self._image = Image.new("RGB", (OVERSAMPLING * width, OVERSAMPLING * height), "white")
        self._pen: Any = ImageDraw.Draw(self._image, "RGBA")

    def png(self) -> bytes:
        """Return the picture as a PNG of 128 colours."""
        file = io.BytesIO()
        self._image.reduce(OVERSAMPLING).quantize(128).save(file, "png", optimize=True)
        return file.getvalue()

    @contextlib.contextmanager
    def clipped(self, first: Point, last: Point) -> Iterator[None]:
        """Keep what is drawn meanwhile only inside the rectangle between two opposite corners."""
        before = self._image.copy()
        yield
        (left, right), (top, bottom) = sorted((first[0], last[0])), sorted((first[1], last[1]))
        box = tuple(round(OVERSAMPLING * edge) for edge in (left, top - 1, right + 1, bottom + 1))
        inside = self._image.crop(box)
        self._image.paste(before)
        self._image.paste(inside, box)

    def line(self, points: ArrayLike, color: Any, width: float = 2, dash: str | None = None) -> None:
        """Draw lines through points of shape (n, 2); they break off where a point is missing."""
        for stretch in _finite_stretches(np.asarray(points, dtype=np.float64)):
            for piece in [stretch] if dash in (None, "solid") else _dashes(stretch, *DASH_PX.get(str(dash), (9, 6))):
                thick = max(1, round(width * OVERSAMPLING))
                self._pen.line(_fine(piece.tolist()), fill=_color(color), width=thick, joint="curve")

    def polygon(self, points: ArrayLike, color: Any, edge: Any = None) -> None:
        """Fill the area inside points of shape (n, 2); a missing point parts two areas."""
        for stretch in _finite_stretches(np.asarray(points, dtype=np.float64)):
            if len(stretch) > 2:
                self._pen.polygon(_fine(stretch.tolist()), _color(color), _color(edge) if edge else None, OVERSAMPLING)

    def rectangle(self, first: Point, last: Point, color: Any, edge: Any = None) -> None:
        """Fill the rectangle between two opposite corners."""
        (left, right), (top, bottom) = sorted((first[0], last[0])), sorted((first[1], last[1]))
        box = _fine([(left, top), (right, bottom)])
        self._pen.rectangle(box, _color(color), _color(edge) if edge else None, OVERSAMPLING if edge else 0)

    def ellipse(self, center: Point, radius: float, color: Any, edge: Any) -> None:
        box = _fine([(center[0] - radius, center[1] - radius), (center[0] + radius, center[1] + radius)])
        self._pen.ellipse(box, _color(color), _color(edge), OVERSAMPLING)

    def write(self, at: Point, words: Any, color: Any = None, size: int = theme.FONT_PX, anchor: str = "la") -> None:
        """Write words, in lines where they have `<br>`; `anchor` says where `at` lies, in Pillow's two letters."""
        text = plain(words)
        if text:
            place = {"anchor": anchor, "align": {"l": "left", "m": "center", "r": "right"}[anchor[0]]}
            ink = _color(color or theme.INK)
            spacing = {"spacing": 4 * OVERSAMPLING} if "\n" in text else {}
            self._pen.text(_fine([at])[0], text, fill=ink, font=self._font_of(size), **place, **spacing)

    def width_of(self, words: Any, size: int = theme.FONT_PX) -> float:
        """Return the width of the widest line of some words, in pixels."""
        lines = plain(words).split("\n")
        return float(max(self._pen.textlength(line, self._font_of(size)) for line in lines)) / OVERSAMPLING

    def _font_of(self, size: int) -> Any:
        return self._font[min(self._font, key=lambda known: abs(known - size))]


def plain(text: Any) -> str:
    """Return the text that Plotly's markup shows, in characters that the font has."""
    lines = re.sub(r"<br\s*/?>", "\n", str(text or ""))
    words = html.unescape(re.sub(r"<[^>]*>", "", lines))
    return words.translate(SIMILAR).encode("latin-1", "replace").decode("latin-1")


def _color(value: Any) -> Color:
    """Return a colour as Pillow takes it, which reads the opacity of `rgba(…)` as a whole number."""
    parts = re.fullmatch(r"rgba\((\d+), *(\d+), *(\d+), *([0-9.]+)\)", str(value))
    if parts is None:
        return str(value or theme.INK)
    red, green, blue = (int(part) for part in parts.groups()[:3])
    return red, green, blue, round(255 * float(parts.group(4)))


def _fine(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in points]


def _finite_stretches(points: Array) -> Iterator[Array]:
    """Yield the stretches of two or more finite points."""
    finite = np.isfinite(points).all(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]]).astype(np.int8)))
    yield from (points[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True) if end - start > 1)


def _dashes(points: Array, dash: float, gap: float) -> Iterator[Array]:
    """Yield the pieces of a dashed line through the points."""
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    for start in np.arange(0.0, along[-1], dash + gap):
        end = min(start + dash, along[-1])
        inner = along[(along > start) & (along < end)]
        at = np.concatenate([[start], inner, [end]])
        yield np.column_stack([np.interp(at, along, points[:, 0]), np.interp(at, along, points[:, 1])])


def item_of(value: Any, index: int) -> Any:
    """Return the value of one point: plotly takes one value for all points, or one for each."""
    return value[index] if isinstance(value, list | tuple | np.ndarray) else value
