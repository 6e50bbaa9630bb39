"""A push: by a worker on the server's node, and by one on another node."""

from __future__ import annotations

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme

#: Middles of what takes part: the worker beside the server, the server, the worker on the other node.
_NEAR, _SERVER, _FAR = 94, 262, 432


def push(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "A push takes the write lock, writes the next copy, and makes it the current one", 448)
    drawing.heading("A push to a server", "Worker 0 updates by itself. For worker 1 the server does the same.")
    for name, left, right, height in (("node 1", 16, 342, 338), ("node 2", 360, WIDTH - 16, 122)):
        drawing.box(left, 70, right - left, height, "panel", "edge", 8)
        drawing.words((left + right) / 2, 91, name, SMALL, "muted")
    for middle, colour, words in (
        (_NEAR, "rank", "worker 0"),
        (_SERVER, "shared", "server 0"),
        (_FAR, "rank", "worker 1"),
    ):
        drawing.box(middle - 60, 102, 120, 42, f"{colour}_pale", colour)
        drawing.words(middle, 128, words, colour=colour, bold=True)
    drawing.arrow((_FAR - 61, 123), (_SERVER + 62, 123), colour="network", width=2.2)
    drawing.words(_FAR, 173, "a message", SMALL, "network", bold=True)
    for middle in (_NEAR, _SERVER):
        drawing.arrow((middle, 146), (middle, 186), colour="shared", width=2.2)
    drawing.words((_NEAR + _SERVER) / 2, 171, "gradients", SMALL, "muted")
    drawing.box(_NEAR - 60, 188, 288, 38, "paper", "shared")
    drawing.words((_NEAR + _SERVER) / 2, 212, "write lock: one update at a time", SMALL)
    _copies(drawing, 248)
    drawing.words(20, 432, "Who reads copy A goes on: nothing is written to it.", SMALL, "muted", at="start")
    return drawing


def _copies(drawing: Drawing, y: float) -> None:
    drawing.box(_NEAR - 66, y, 300, 148, "shared_pale", "shared", 8)
    drawing.words(_NEAR, y + 22, "shared memory", SMALL, "shared", bold=True)
    for middle, words, below in ((_NEAR, "copy A", "current"), (_SERVER, "copy B", "A, updated")):
        drawing.box(middle - 60, y + 36, 120, 58, "paper", "shared")
        drawing.words(middle, y + 60, words, bold=True)
        drawing.words(middle, y + 81, below, SMALL)
    drawing.arrow((_NEAR + 62, y + 65), (_SERVER - 62, y + 65), colour="shared", width=2.2)
    drawing.arrow((_SERVER, y - 20), (_SERVER, y + 34), colour="shared", width=2.2)
    drawing.words((_NEAR + _SERVER) / 2, y + 126, "Then one store makes B current.", SMALL)
