"""One step: over two nodes, and as it is inside one of them."""

from __future__ import annotations

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme


def step(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "One step: four ranks on two nodes sum their gradients", 404)
    drawing.heading("One step", "One batch of 128 rows; the weights are the same on all ranks.")
    for node in range(2):
        _node(drawing, 16 + 258 * node, node)
    middle = WIDTH / 2
    drawing.arrow((middle - 1, 243), (middle - 29, 243), colour="network", width=2.2)
    drawing.arrow((middle + 1, 243), (middle + 29, 243), colour="network", width=2.2)
    drawing.words(middle, 226, "MPI", SMALL, "network", bold=True)
    return drawing


def _node(drawing: Drawing, left: float, node: int) -> None:
    width = 230
    drawing.box(left, 70, width, 318, "panel", "edge", 8)
    drawing.words(left + width / 2, 91, f"node {node + 1}", SMALL, "muted")
    drawing.box(left + 12, 218, width - 24, 52, "shared_pale", "shared")
    drawing.words(left + width / 2, 240, "shared memory", SMALL, "shared", bold=True)
    drawing.words(left + width / 2, 259, "sums of all ranks", SMALL)
    for place in range(2):
        rank, x, wide = 2 * node + place, left + 12 + 108 * place, 98
        drawing.box(x, 102, wide, 74, "rank_pale", "rank")
        drawing.words(x + wide / 2, 123, f"rank {rank}", colour="rank", bold=True)
        drawing.words(x + wide / 2, 144, "rows", SMALL)
        drawing.words(x + wide / 2, 163, f"{32 * rank} to {32 * rank + 31}", SMALL)
        drawing.arrow((x + wide / 2, 178), (x + wide / 2, 216), colour="shared", width=2.2)
        drawing.arrow((x + wide / 2, 272), (x + wide / 2, 310), colour="shared", width=2.2)
        drawing.box(x, 312, wide, 60, "rank_pale", "rank")
        drawing.words(x + wide / 2, 337, "weights", bold=True)
        drawing.words(x + wide / 2, 358, "updated", SMALL)
    drawing.words(left + width / 2, 202, "gradients", SMALL, "muted")


def fused_step(theme: Theme) -> Drawing:
    drawing = Drawing(theme, "One fused step: each rank sums and updates its share of the model", 482)
    drawing.heading("One fused step in a node", "Weights are updated as gradients are summed. No sum is ever stored.")
    drawing.box(16, 178, WIDTH - 32, 66, "shared_pale", "shared", 8)
    drawing.words(WIDTH / 2, 201, "shared", SMALL, "shared", bold=True)
    drawing.words(WIDTH / 2, 220, "memory", SMALL, "shared", bold=True)
    for rank in range(2):
        _rank(drawing, rank)
    drawing.words(
        20, 464, "Green goes through shared memory. A and B are halves of the model.", SMALL, "muted", at="start"
    )
    return drawing


def _rank(drawing: Drawing, rank: int) -> None:
    own, other, left, width = "AB"[rank], "BA"[rank], 28 + 260 * rank, 204
    own_x, other_x = left + width * (0.25 + 0.5 * rank), left + width * (0.75 - 0.5 * rank)
    drawing.words(left + width / 2, 91, f"rank {rank}", colour="rank", bold=True)
    _halves(drawing, left, 102, width, "gradients ", rank)
    drawing.arrow((other_x, 142), (other_x, 188), colour="shared", width=2.2)
    drawing.arrow((own_x, 142), (own_x, 278), colour="rank", width=2.2)
    drawing.words(own_x + (8 if rank else -8), 165, "stays", SMALL, "muted", at="start" if rank else "end")
    drawing.box(other_x - 46, 190, 92, 42, "paper", "shared")
    drawing.words(other_x, 208, f"gradients {other}", SMALL)
    drawing.words(other_x, 225, f"of rank {rank}", SMALL, "muted")
    # the other rank adds what lies there to its own, and its new weights go the same way back
    across = WIDTH - other_x
    drawing.arrow((other_x, 234), (across, 278), colour="shared", width=2.2)
    drawing.arrow((own_x, 348), (own_x, 396), colour="rank", width=2.2)
    drawing.arrow((other_x, 348), (across, 396), colour="shared", width=2.2)
    drawing.box(left, 280, width, 66, "rank", radius=6)
    drawing.words(left + width / 2, 307, f"add {own}, update {own}", colour="on", bold=True)
    drawing.words(left + width / 2, 330, f"optimizer's state of {own} only", SMALL, "on")
    _halves(drawing, left, 398, width, "weights ", rank)


def _halves(drawing: Drawing, left: float, y: float, width: float, words: str, own: int | None) -> None:
    for half, letter in enumerate("AB"):
        drawing.box(left + width / 2 * half + 1, y, width / 2 - 2, 38, "rank_pale", "rank")
        drawing.words(left + width * (0.25 + 0.5 * half), y + 24, f"{words}{letter}", SMALL, bold=half == own)
