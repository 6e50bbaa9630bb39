"""A drawing of rectangles, lines and text in SVG, in the colours of a theme.

All are `WIDTH` wide, and no letters are smaller than `SMALL`: so they can be read on a screen of 400 pixels.
"""

from __future__ import annotations

from math import atan2, cos, sin
from xml.sax.saxutils import escape

#: Name of a colour -> its value; light and dark have the same names.
Theme = dict[str, str]

#: `rank` is a process and its own memory, `shared` the memory of a node, `network` what goes between nodes.
THEMES: dict[str, Theme] = {
    "light": {
        **{"paper": "#ffffff", "edge": "#dde3ea", "ink": "#1b2733", "muted": "#566575", "faint": "#b9c4cf"},
        **{"panel": "#f3f6f9", "on": "#ffffff"},
        **{"rank": "#2466b0", "rank_pale": "#dfeaf7", "shared": "#0d6b53", "shared_pale": "#d8f0e8"},
        **{"network": "#a65104", "network_pale": "#fdebd6", "failed": "#bd3030", "failed_pale": "#fbe0de"},
    },
    "dark": {
        **{"paper": "#14181d", "edge": "#2e3742", "ink": "#e7edf3", "muted": "#9fadbb", "faint": "#4b5866"},
        **{"panel": "#1d232b", "on": "#0d1117"},
        **{"rank": "#78b0f0", "rank_pale": "#1d3350", "shared": "#52c9a5", "shared_pale": "#143c32"},
        **{"network": "#f0a352", "network_pale": "#46301a", "failed": "#f4817c", "failed_pale": "#4b2224"},
    },
}

WIDTH = 520
SMALL, NORMAL, LARGE = 13.5, 15, 17

_SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class Drawing:
    """What is drawn so far; colours are names of the theme, or values.

    Parameters
    ----------
    title : str
        What a screen reader says.
    height : float
        How high it is; it is `WIDTH` wide.
    """

    def __init__(self, theme: Theme, title: str, height: float) -> None:
        self.theme, self.title, self.height = theme, title, height
        self._parts: list[str] = []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "paper", "edge", radius=10)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, line: str = "", radius: float = 5
    ) -> None:
        stroke = f' stroke="{self._colour(line)}"' if line else ""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" '
            f'fill="{self._colour(fill)}"{stroke}/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{self._colour(fill)}"/>')

    def words(
        self,
        x: float,
        y: float,
        words: str,
        size: float = NORMAL,
        colour: str = "ink",
        at: str = "middle",
        bold: bool = False,
    ) -> None:
        """Write a line of text that starts, ends or has its middle `at` x; y is the line that letters stand on."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{at}"{weight} '
            f'fill="{self._colour(colour)}">{escape(words)}</text>'
        )

    def heading(self, words: str, below: str = "") -> None:
        """Write the title at the top, and a line below it."""
        self.words(20, 32, words, LARGE, at="start", bold=True)
        self.words(20, 53, below, SMALL, "muted", at="start")

    def line(self, *points: tuple[float, float], colour: str = "muted", width: float = 1.6) -> None:
        through = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{through}" fill="none" stroke="{self._colour(colour)}" stroke-width="{_n(width)}" '
            f'stroke-linejoin="round"/>'
        )

    def arrow(self, *points: tuple[float, float], colour: str = "muted", width: float = 1.6) -> None:
        """Draw a line whose last point has a head."""
        (x0, y0), (x, y) = points[-2:]
        angle, size = atan2(y - y0, x - x0), 5 + 2 * width
        neck = (x - 0.8 * size * cos(angle), y - 0.8 * size * sin(angle))
        self.line(*points[:-1], neck, colour=colour, width=width)
        corners = [(x, y), *((x - size * cos(angle + turn), y - size * sin(angle + turn)) for turn in (0.42, -0.42))]
        through = " ".join(f"{_n(a)},{_n(b)}" for a, b in corners)
        self._parts.append(f'<polygon points="{through}" fill="{self._colour(colour)}"/>')

    def mixed(self, first: str, second: str, share: float) -> str:
        """Return the colour that has a share of the second in it."""
        of = (self.theme[first], self.theme[second])
        parts = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in of]
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*parts, strict=True))

    def text(self) -> str:
        """Return the file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(self.height)}" width="{WIDTH}" '
                f'height="{_n(self.height)}" role="img" font-family="{_SANS}">',
                f"<title>{escape(self.title)}</title>",
                *self._parts,
                "</svg>\n",
            ]
        )

    def _colour(self, name: str) -> str:
        return self.theme.get(name, name)


def _n(value: float) -> str:
    """Return a number with at most one digit behind the point."""
    return f"{value:.1f}".removesuffix(".0")
