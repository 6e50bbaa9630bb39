"""A rank that raises, and who hears of it: time runs downwards, a line for each rank."""

from __future__ import annotations

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme

_LINES = {0: 76, 1: 190, 2: 330, 3: 444}
_FAILED = 1


def failure(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "Rank 1 raises: the others hear of it and stop, and its traceback is the last", 492)
    drawing.heading("A rank fails", "Rank 1 raises while the others wait in a collective. Time runs down.")
    for name, left, right in (("node 1", 16, 250), ("node 2", 270, WIDTH - 16)):
        drawing.box(left, 70, right - left, 336, "panel", "edge", 8)
        drawing.words((left + right) / 2, 91, name, SMALL, "muted")
    for rank, x in _LINES.items():
        drawing.line((x, 124), (x, 392), colour="faint", width=2)
        drawing.words(x, 116, f"rank {rank}", colour="failed" if rank == _FAILED else "rank", bold=True)
    for rank, x in _LINES.items():
        if rank != _FAILED:
            _label(drawing, x, 136, "waits", "rank")
    _label(drawing, _LINES[1], 176, "raises", "failed")
    _tell(drawing, 0, 232, "shared", "board")
    for rank in (2, 3):
        _tell(drawing, rank, 232 if rank == 2 else 256, "network", "notice" if rank == 2 else "")
    for rank, x in _LINES.items():
        if rank != _FAILED:
            _label(drawing, x, 284, "RankFailed", "rank", "Error")
            _label(drawing, x, 346, "quiet", "rank")
    _label(drawing, _LINES[1], 346, "traceback", "failed", "MPI_Abort")
    drawing.box(16, 422, WIDTH - 32, 54, "failed_pale", "failed", 8)
    drawing.words(32, 444, "mpidist run", bold=True, at="start")
    drawing.words(32, 465, "names rank 1; the traceback of rank 1 is printed last", SMALL, at="start")
    return drawing


def _tell(drawing: Drawing, rank: int, y: float, colour: str, words: str) -> None:
    start, end = _LINES[_FAILED], _LINES[rank]
    drawing.arrow((start, y), (end + (4 if end < start else -4), y), colour=colour, width=2.2)
    drawing.dot(start, y, 4, "failed")
    drawing.words((start + end) / 2, y - 7, words, SMALL, colour, bold=True)


def _label(drawing: Drawing, x: float, y: float, words: str, colour: str, second: str = "") -> None:
    height = 42 if second else 26
    drawing.box(x - 48, y, 96, height, f"{colour}_pale", colour)
    drawing.words(x, y + 18, words, SMALL, bold=colour == "failed")
    drawing.words(x, y + 35, second, SMALL)
