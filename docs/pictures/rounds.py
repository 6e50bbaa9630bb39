"""Algorithms as they move: the rounds of `mpidist.schedules`, played, a line of buffers after each round."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme
from mpidist.cluster.topology import Topology
from mpidist.schedules import table
from mpidist.schedules.rounds import NOBODY, Schedule, unrolled

_LEFT, _TOP, _PITCH, _CELL = 112, 108, 62, 22


class Message(NamedTuple):
    """A chunk on its way."""

    sender: int
    receiver: int
    chunk: int


class Played(NamedTuple):
    """A round: what was sent, whether it was added, and how many ranks' values are then in each rank's chunks."""

    messages: list[Message]
    reduce: bool
    counts: list[list[int]]


def play(schedule: Schedule, size: int) -> list[Played]:
    """Return the rounds of all ranks in step; the first, without messages, is the state before them."""
    chunks = schedule.chunks(size)
    held = [[frozenset([rank])] * chunks for rank in range(size)]
    found = [Played([], True, _counts(held))]
    for together in zip_longest(*(unrolled(schedule.rounds_of(rank, size), chunks) for rank in range(size))):
        messages = [
            Message(rank, each.send_to, chunk)
            for rank, each in enumerate(together)
            if each.send_to != NOBODY
            for chunk in range(each.send_chunk, each.send_chunk + each.send_count)
        ]
        reduce, before = together[0].reduce, [list(row) for row in held]
        for sender, receiver, chunk in messages:
            sent = before[sender][chunk]
            held[receiver][chunk] = held[receiver][chunk] | sent if reduce else sent
        found.append(Played(messages, reduce, _counts(held)))
    return found


def _counts(held: list[list[frozenset[int]]]) -> list[list[int]]:
    return [[len(each) for each in row] for row in held]


def ring(theme: Theme) -> Drawing:
    played = play(table.algorithm("all_reduce", "ring"), 4)
    return _draw(theme, "Ring", "Sums go once round, then the finished chunks do.", played, Topology(["a"] * 4))


def recursive_doubling(theme: Theme) -> Drawing:
    played = play(table.algorithm("all_reduce", "recursive_doubling"), 8)
    return _draw(
        theme, "Recursive doubling", "Ranks at distance 1, 2, 4 exchange all they have.", played, Topology(["a"] * 8)
    )


def two_levels(theme: Theme) -> Drawing:
    topology = Topology(["node 1"] * 3 + ["node 2"] * 3)
    played = play(table.hierarchical(topology, "recursive_doubling"), topology.size)
    return _draw(theme, "Two levels", "Inside the nodes, between them, and inside again.", played, topology)


def _draw(theme: Theme, title: str, below: str, played: list[Played], topology: Topology) -> Drawing:
    drawing = Drawing(theme, f"{title}: {below}", _TOP + _PITCH * (len(played) - 1) + _CELL + 52)
    drawing.heading(title, below)
    chunks = len(played[0].counts[0])
    columns = _Columns(topology, chunks)
    for node, ranks in enumerate(topology.ranks_of_node if topology.node_count > 1 else ()):
        left, right = columns.left(ranks[0], 0) - 9, columns.left(ranks[-1], chunks - 1) + columns.cell + 9
        drawing.box(left, _TOP - 43, right - left, drawing.height - _TOP + 11, "panel", "edge", 8)
        drawing.words((left + right) / 2, _TOP - 27, topology.node_names[node], SMALL, "muted")
    drawing.words(_LEFT - 24, _TOP - 9, "rank", SMALL, "muted", at="end")
    for rank in range(topology.size):
        drawing.words(columns.middle(rank), _TOP - 9, str(rank), bold=True)
    for number, each in enumerate(played):
        _label(drawing, number, each, topology)
        _messages(drawing, number, each, columns, topology)
    for number, each in enumerate(played):
        _buffers(drawing, number, each, columns)
    drawing.words(
        20, drawing.height - 18, "A number: how many ranks' values are in the sum.", SMALL, "muted", at="start"
    )
    return drawing


class _Columns:
    """Where each rank's chunks are."""

    def __init__(self, topology: Topology, chunks: int) -> None:
        self._topology = topology
        self._gap = 14 * (topology.node_count - 1)
        self._column = (WIDTH - _LEFT - 16 - self._gap) / topology.size
        self.cell = min(_CELL if chunks > 1 else 40, (self._column - 8) / chunks)
        self._chunks = chunks

    def middle(self, rank: int) -> float:
        return _LEFT + self._column * (rank + 0.5) + 14 * self._topology.node_of[rank]

    def left(self, rank: int, chunk: int) -> float:
        return self.middle(rank) + self.cell * (chunk - self._chunks / 2)


def _label(drawing: Drawing, number: int, played: Played, topology: Topology) -> None:
    y = _TOP + _PITCH * (number - 1) + _CELL + (_PITCH - _CELL) / 2
    if not number:
        return
    is_far = any(topology.node_of[each.sender] != topology.node_of[each.receiver] for each in played.messages)
    two_lines = topology.node_count > 1
    drawing.words(
        20, y + (-2 if two_lines else 5), f"{number}  {'add' if played.reduce else 'copy'}", bold=True, at="start"
    )
    if two_lines:
        where, colour = ("between", "network") if is_far else ("in the nodes", "shared")
        drawing.words(20, y + 15, where, SMALL, colour, at="start")


def _messages(drawing: Drawing, number: int, played: Played, columns: _Columns, topology: Topology) -> None:
    below = _TOP + _PITCH * number
    for sender, receiver, chunk in played.messages:
        x0, x1 = (columns.left(rank, chunk) + columns.cell / 2 for rank in (sender, receiver))
        is_far = topology.node_of[sender] != topology.node_of[receiver]
        colour = "network" if is_far else "shared" if topology.node_count > 1 else "muted"
        drawing.arrow((x0, below - _PITCH + _CELL + 1), (x1, below - 2), colour=colour, width=1.4)


def _buffers(drawing: Drawing, number: int, played: Played, columns: _Columns) -> None:
    top, ranks = _TOP + _PITCH * number, len(played.counts)
    received = {(each.receiver, each.chunk) for each in played.messages}
    for rank, counts in enumerate(played.counts):
        for chunk, count in enumerate(counts):
            x, is_whole = columns.left(rank, chunk), count == ranks
            fill = "rank" if is_whole else drawing.mixed("rank_pale", "rank", 0.5 * (count - 1) / (ranks - 1))
            drawing.box(x + 0.5, top, columns.cell - 1, _CELL, fill, radius=3)
            is_new = (rank, chunk) in received
            drawing.words(
                x + columns.cell / 2, top + 16, str(count), SMALL, "on" if is_whole else "ink", bold=is_new or is_whole
            )
