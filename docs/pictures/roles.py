"""Parameter servers in their two styles: a chief that has the program, and workers that each run it."""

from __future__ import annotations

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme

_LEFT, _RIGHT = 138, WIDTH - 138


def coordinator(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "The chief schedules functions; workers run them and talk to the servers", 448)
    drawing.heading("The chief has the program", "Workers run its functions, one at a time.")
    for x, words, at in ((_LEFT, "functions", "end"), (_RIGHT, "results", "start")):
        _both(drawing, (WIDTH / 2 + (-40 if x == _LEFT else 40), 142), (x, 186), "rank")
        drawing.words(x + (20 if x == _LEFT else -20), 166, words, SMALL, "muted", at=at)
    _box(drawing, WIDTH / 2, 72, "rank", "chief", "schedules and joins")
    for number, x in enumerate((_LEFT, _RIGHT)):
        _box(drawing, x, 188, "rank", f"worker {number}", "computes gradients")
        for server in (_LEFT, _RIGHT):
            _both(drawing, (x, 258), (server, 324), "shared")
    _servers(drawing, 326)
    return drawing


def between_graph(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "Every worker runs the program: it pulls from all servers and pushes to them", 398)
    drawing.heading("Every worker runs the program", "Each pulls and pushes at its own pace. Here a worker is a node.")
    for number, x in enumerate((_LEFT, _RIGHT)):
        drawing.box(x - 118, 70, 236, 124, "panel", "edge", 8)
        drawing.words(x, 92, f"worker {number}", bold=True)
        for place in range(2):
            middle = x + 56 * (2 * place - 1)
            drawing.box(middle - 50, 104, 100, 40, "rank_pale", "rank")
            drawing.words(middle, 129, f"replica {place}", SMALL)
        drawing.words(x, 168, "gradients are summed inside", SMALL, "muted")
        for server in (_LEFT, _RIGHT):
            _both(drawing, (x, 196), (server, 274), "shared")
    _servers(drawing, 276)
    return drawing


def _servers(drawing: Drawing, y: float) -> None:
    drawing.words(WIDTH / 2, y - 52, "pull", SMALL, "shared", bold=True)
    drawing.words(WIDTH / 2, y - 8, "push", SMALL, "shared", bold=True)
    for number, x in enumerate((_LEFT, _RIGHT)):
        _box(drawing, x, y, "shared", f"server {number}", f"variables {number}, {number + 2}, {number + 4}, ...")
    drawing.words(20, y + 104, "A server applies each push with its optimizer.", SMALL, "muted", at="start")


def _box(drawing: Drawing, x: float, y: float, colour: str, words: str, below: str) -> None:
    drawing.box(x - 92, y, 184, 68, f"{colour}_pale", colour)
    drawing.words(x, y + 29, words, colour=colour, bold=True)
    drawing.words(x, y + 51, below, SMALL)


def _both(drawing: Drawing, first: tuple[float, float], second: tuple[float, float], colour: str) -> None:
    """Draw a line with a head at each end."""
    middle = ((first[0] + second[0]) / 2, (first[1] + second[1]) / 2)
    for end in (first, second):
        drawing.arrow(middle, end, colour=colour)
