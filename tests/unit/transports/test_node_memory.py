"""Memory of a node: each rank touches its own part first, and all see all of it."""

import os
import re
import threading
from pathlib import Path

import numpy
import pytest

from mpidist.errors import TransportError
from mpidist.options import settings
from mpidist.runtime.board import StatusBoard
from mpidist.transports import membership
from mpidist.transports.node_memory import SharedSegments, map_together

SEGMENT, PLACE = membership._SEGMENT_BYTES, membership._PLACE_BYTES


def on_threads(size, fn):
    """Return ``fn(rank, exchange)`` of `size` threads that have an exchange, by rank."""
    meeting, given, found = threading.Barrier(size), [b""] * size, [None] * size

    def run(rank):
        def exchange(payload):
            given[rank] = payload
            meeting.wait()
            everything = list(given)
            meeting.wait()
            return everything

        found[rank] = fn(rank, exchange)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_rank_touches_its_own_part_first_and_nobody_else_does(size, monkeypatch):
    touched, reserve, ranks = [], os.posix_fallocate, {}

    def watched(fd, start, length):
        touched.append((ranks[threading.current_thread()], start, start + length))
        reserve(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", watched)

    def on_rank(rank, exchange):
        ranks[threading.current_thread()] = rank
        return membership.share_memory(exchange, rank, size, settings())

    shared = on_threads(size, on_rank)
    board_bytes = -(-StatusBoard.nbytes(size) // 4096) * 4096
    part_bytes = SharedSegments.part_bytes(SEGMENT, PLACE)
    assert sorted(touched) == [
        (rank, board_bytes + rank * part_bytes if rank else 0, board_bytes + (rank + 1) * part_bytes)
        for rank in range(size)
    ]
    for board, segments, problem in shared:
        assert not problem and board.size == size
        base = segments.segments[0].ctypes.data - 128  # where the flags of rank 0 lie
        for rank in range(size):
            for rooms in (*segments.segments, *segments.places):
                first = rooms[rank].ctypes.data - base
                assert rank * part_bytes <= first and first + rooms[rank].nbytes <= (rank + 1) * part_bytes
            for words in (segments.filled_words, segments.reduced_words, segments.taken_words):
                assert rank * part_bytes <= 8 * words[rank] < (rank + 1) * part_bytes


def test_all_ranks_see_all_of_it_and_nothing_overlaps():
    """Each rank fills its own rooms with a number of their own; every rank finds them all."""
    size, count = 3, 2 + SharedSegments.PLACES

    def on_rank(rank, exchange):
        nbytes = SharedSegments.nbytes(size, 1024, 4096)
        own = (rank * nbytes // size, nbytes // size)
        segments = SharedSegments(map_together(nbytes, rank, exchange, own), size, 1024, 4096)
        for number, rooms in enumerate((*segments.segments, *segments.places)):
            rooms[rank] = rank * count + number + 1
        segments.say_filled(rank, 100 + rank)
        segments.say_reduced(rank, 200 + rank)
        segments.say_taken(rank, 300 + rank)
        exchange(b"")
        assert [segments.flags[word] for word in segments.filled_words] == [100, 101, 102]
        assert [segments.flags[word] for word in segments.reduced_words] == [200, 201, 202]
        assert [segments.flags[word] for word in segments.taken_words] == [300, 301, 302]
        found = [rooms[each] for each in range(size) for rooms in (*segments.segments, *segments.places)]
        return [set(room.tolist()) for room in found], [room.size for room in found]

    for values, sizes in on_threads(size, on_rank):
        assert values == [{number + 1} for number in range(size * count)]
        assert sizes == ([1024] * 2 + [4096] * SharedSegments.PLACES) * size


def test_a_rank_that_cannot_have_its_part_is_named_on_all_ranks(monkeypatch):
    reserve = os.posix_fallocate

    def refuse(fd, start, length):
        if start:
            raise OSError(28, "No space left on device")
        reserve(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    def on_rank(rank, exchange):
        with pytest.raises(TransportError, match="^no shared memory on this node; local rank 1: .*No space left"):
            map_together(8192, rank, exchange, (4096 * rank, 4096))
        return True

    assert on_threads(2, on_rank) == [True, True]


def test_memory_of_one_owner_is_touched_by_rank_0_alone():
    mapped = on_threads(2, lambda rank, exchange: map_together(4096, rank, exchange))
    numpy.frombuffer(mapped[0], numpy.uint8)[...] = 7
    assert bytes(mapped[1]) == bytes([7]) * 4096


@pytest.mark.skipif(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2, reason="one NUMA node")
def test_the_pages_of_a_part_lie_on_the_numa_node_of_its_rank():
    """Two processes, each tied to a core of another NUMA node."""
    cores = [
        int(re.match(r"\d+", (folder / "cpulist").read_text())[0])
        for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))[:2]
    ]
    half, before = 1 << 24, os.sched_getaffinity(0)

    def on_rank(rank, exchange):
        os.sched_setaffinity(0, {cores[rank]})  # of this thread
        return map_together(2 * half, rank, exchange, (rank * half, half))

    memory = on_threads(2, on_rank)[0]
    numpy.frombuffer(memory, numpy.uint8).sum()  # numa_maps counts pages that are mapped
    os.sched_setaffinity(0, before)
    start = numpy.frombuffer(memory, numpy.uint8).ctypes.data
    (line,) = [text for text in Path("/proc/self/numa_maps").read_text().splitlines() if text.startswith(f"{start:x} ")]
    pages = {int(node): int(count) for node, count in re.findall(r"N(\d+)=(\d+)", line)}
    assert len(pages) == 2 and len(set(pages.values())) == 1
