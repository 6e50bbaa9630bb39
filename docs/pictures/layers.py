"""The layers of the package, from its imports: a dot for each layer that another one imports, all on one side."""

from __future__ import annotations

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme
from tests.unit.test_layering import LAYERS, imports, layer_of, sources, top

_PITCH, _TOP = 17, 84

#: Layers that are shown as one: the names that lie lowest, and those of the public modules.
_LOWEST, _PUBLIC = "errors, options", "public names"


def rows() -> dict[str, str]:
    """Return for each name of the lists of layers the row that shows it, the lowest layer first."""
    found = {}
    for names in LAYERS:
        for name in names:
            if LAYERS.index(names) <= LAYERS.index(_with("errors")):
                found[name] = _LOWEST
            elif LAYERS.index(_with("callbacks")) <= LAYERS.index(names) <= LAYERS.index(_with("__init__")):
                found[name] = _PUBLIC
            else:
                found[name] = ", ".join(names[:2]) if names != _with("__main__") else "commands"
    return found


def _with(name: str) -> tuple[str, ...]:
    (names,) = [each for each in LAYERS if name in each]
    return names


def imported() -> set[tuple[str, str]]:
    """Return the pairs of rows of which the first imports the second."""
    files, row = sources(), rows()
    known = frozenset(map(top, files))
    found = set()
    for path, text in files.items():
        for _, dotted in imports(path, text):
            below = layer_of(dotted, known)
            if below is not None and row[below] != row[top(path)]:
                found.add((row[top(path)], row[below]))
    return found


def layers(theme: Theme) -> Drawing:
    names = [*dict.fromkeys(rows().values())][::-1]
    height = _TOP + _PITCH * len(names) + 52
    drawing = Drawing(theme, "The layers: each imports only what is below it", height)
    drawing.heading("Layers", "A dot: this layer imports the one whose square is below the dot.")
    left = WIDTH - 18 - _PITCH * len(names)
    at = {name: number for number, name in enumerate(names)}
    for name, number in at.items():
        y = _TOP + _PITCH * number
        if number % 2 == 0:
            drawing.box(left + _PITCH * number, y, _PITCH * (len(names) - number), _PITCH, "panel", radius=2)
        drawing.box(left + _PITCH * number + 1, y + 1, _PITCH - 2, _PITCH - 2, "rank", radius=3)
        drawing.words(left + _PITCH * number - 6, y + 13, name, SMALL, at="end")
    for above, below in sorted(imported()):
        x, y = left + _PITCH * (at[below] + 0.5), _TOP + _PITCH * (at[above] + 0.5)
        drawing.dot(x, y, 4.2, "shared")
    drawing.words(
        20, height - 18, "No dot is left of a square: no layer imports one above it.", SMALL, "muted", at="start"
    )
    return drawing
