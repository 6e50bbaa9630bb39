"""What the ranks of a world try together: a file that all see, clocks, rates between nodes, and one all-reduce."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy

from mpidist.collectives.communicator import Communicator
from mpidist.collectives.exchange.objects import all_gather_object, broadcast_object
from mpidist.diagnosis.case import Joint, NodePair
from mpidist.errors import MpidistError

#: What all pairs may take together, in seconds, and how much is sent at a time.
PAIR_SECONDS, _PAIR_BYTES = 3.0, 2**20

#: The array of the all-reduce, and the questions about the time of a clock.
_REDUCED, _QUESTIONS = 1 << 17, 5

_NETWORK, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def try_together(communicator: Communicator, thread_level: str, folder: str) -> Joint:
    """Return what the ranks found out together, the same on all of them.

    Collective: every rank calls it, with the same `folder`.  `thread_level` is MPI's, `folder` that for checkpoints.
    """
    topology = communicator.topology
    return Joint(
        hosts=topology.hosts,
        thread_level=thread_level,
        reduction_error=_reduce(communicator),
        reduction_bytes=_REDUCED * 8,
        clocks=_clocks(communicator),
        pairs=_pairs(communicator),
        blind=_blind(communicator, folder),
    )


def _reduce(communicator: Communicator) -> str:
    """Return what is wrong with an all-reduce; empty if nothing is."""
    size, rank = communicator.size, communicator.rank
    counted = numpy.arange(_REDUCED, dtype=numpy.float64)
    try:
        reduced = counted * (rank + 1)
        communicator.all_reduce(reduced)
        wrong = int(numpy.count_nonzero(reduced != counted * (size * (size + 1) // 2)))
        wrongs = all_gather_object(communicator, wrong)
    except MpidistError as error:
        return str(error)
    told = [f"rank {other} ({communicator.topology.hosts[other]})" for other, count in enumerate(wrongs) if count]
    return f"wrong sums of {_REDUCED} numbers on {', '.join(told[:4])}" if told else ""


def _blind(communicator: Communicator, folder: str) -> tuple[str, ...]:
    """Return the nodes that do not see what rank 0 has written to the folder; none where it cannot write."""
    path, written = Path(folder, f".mpidist-doctor-{os.getpid()}"), False
    if communicator.rank == 0:
        try:
            path.write_text("seen")
            written = True
        except OSError:
            pass
    try:
        name, written = broadcast_object(communicator, (str(path), written))
        sees = not written or _reads(Path(name))
        answers = all_gather_object(communicator, sees)
    finally:
        if communicator.rank == 0:
            with suppress(OSError):  # there may be no file, and a file in the place of its folder
                path.unlink()
    hosts = communicator.topology.hosts
    return tuple(dict.fromkeys(host for host, answer in zip(hosts, answers, strict=True) if not answer))


def _reads(path: Path) -> bool:
    try:
        return path.read_text() == "seen"
    except OSError:
        return False


def _leaders(communicator: Communicator) -> list[int]:
    return [ranks[0] for ranks in communicator.topology.ranks_of_node]


def _clocks(communicator: Communicator) -> dict[str, float]:
    """Return by node how far its clock is ahead of that of rank 0's node."""
    leaders, ahead = _leaders(communicator), {}
    for leader in leaders[1:]:
        for _ in range(_QUESTIONS if communicator.rank == leader else 0):
            communicator.receive(0)
            communicator.send(numpy.array([time.time()]), 0)
        if communicator.rank == 0:
            answers = [_ask(communicator, leader) for _ in range(_QUESTIONS)]
            ahead[communicator.topology.hosts[leader]] = min(answers)[1]
    return dict(broadcast_object(communicator, ahead))


def _ask(communicator: Communicator, leader: int) -> tuple[float, float]:
    """Return how long an answer took, and how far the clock of a node is ahead by it."""
    asked = time.time()
    communicator.send(numpy.zeros(1), leader)
    told = float(communicator.receive(leader)[0])
    answered = time.time()
    return answered - asked, told - (asked + answered) / 2


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs: each of `count` members meets each other one once, and is in one pair a round."""
    ring = [*range(count), *([] if count % 2 == 0 else [-1])]
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _pairs(communicator: Communicator) -> tuple[NodePair, ...]:
    """Return what pairs of nodes can send; pairs that have no node in common are measured at the same time."""
    leaders = _leaders(communicator)
    if len(leaders) < 2:
        return ()
    place = leaders.index(communicator.rank) if communicator.rank in leaders else None
    node_pairs, began = [], time.monotonic()
    planned = list(rounds(len(leaders)))
    for pairs in planned:
        late = time.monotonic() - began > PAIR_SECONDS
        if broadcast_object(communicator, late):
            break
        for first, second in pairs:
            if place in (first, second):
                other = leaders[second if place == first else first]
                rate, through = _rate(communicator, other, place == first, PAIR_SECONDS / len(planned))
                if place == first:
                    names = (communicator.topology.hosts[leaders[first]], communicator.topology.hosts[other])
                    node_pairs.append(NodePair(names, rate, through))
    return tuple(pair for pairs in all_gather_object(communicator, node_pairs) for pair in pairs)


def _rate(communicator: Communicator, other: int, leads: bool, seconds: float) -> tuple[float, str]:
    """Return the bytes a second to another rank and back, and the interface that they went through."""
    array, before = numpy.ones(_PAIR_BYTES, numpy.uint8), _sent()
    best, end, trips, goes_on = float("inf"), time.monotonic() + seconds, 0, True
    while goes_on:
        began = time.perf_counter()
        if leads:
            goes_on = time.monotonic() < end
            array[0] = goes_on
            communicator.send(array, other)
            communicator.receive(other, like=array)
        else:
            array = communicator.receive(other)
            communicator.send(array, other)
            goes_on = bool(array[0])
        best, trips = min(best, time.perf_counter() - began), trips + 1
    grown = {name: count - before.get(name, 0) for name, count in _sent().items()}
    most = max(grown, key=lambda name: grown[name], default="")
    return 2 * _PAIR_BYTES / best, most if most and grown[most] >= trips * _PAIR_BYTES // 2 else ""


def _sent() -> dict[str, int]:
    """Return the bytes that each interface has sent so far."""
    sent = {}
    for path in _NETWORK.glob("*/statistics/tx_bytes"):
        sent[path.parts[-3]] = _number(path)
    for path in _INFINIBAND.glob("*/ports/*/counters/port_xmit_data"):
        sent[f"{path.parts[-5]}:{path.parts[-3]}"] = 4 * _number(path)  # counted in words
    return sent


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
