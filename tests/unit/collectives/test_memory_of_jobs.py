"""Collectives at the ends of shared memory that is as long as that of jobs; other tests have short memory."""

import numpy
import pytest

from mpidist.testing import ranks, run_ranks
from mpidist.transports import membership
from mpidist.world import world_communicator
from tests.helpers.identical import assert_identical

SEGMENT, PLACE = membership._SEGMENT_BYTES, membership._PLACE_BYTES
#: Of a segment what a call slot has room for, without and with a line of words before it.
ENDS = [end + step for end in (SEGMENT - 64, SEGMENT) for step in (-8, 0, 8)]
SIZE = 3


@pytest.fixture(autouse=True)
def _memory_of_jobs(monkeypatch):
    monkeypatch.setattr(ranks, "_SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(ranks, "_PLACE_BYTES", PLACE)


def _bytes(rank, length):
    return ((numpy.arange(length) * 3 + 7 * rank) % 251).astype("u1")


def _all(fn):
    """Call ``fn(communicator, rank)`` on all ranks, twice, since memory is used in turn; return what the ranks got."""
    return run_ranks(SIZE, lambda: [fn(world_communicator(), world_communicator().rank) for _ in range(2)])


def _assert_same(found, expected):
    for each in found:
        assert_identical(each, expected)


@pytest.mark.parametrize("length", ENDS)
def test_broadcast(length):
    for found in _all(lambda communicator, rank: communicator.broadcast_copy(_bytes(rank, length), 1)):
        _assert_same(found, _bytes(1, length))


@pytest.mark.parametrize("length", ENDS)
def test_all_gather_and_gather(length):
    lengths = [5, length, 0]
    joined = numpy.concatenate([_bytes(rank, lengths[rank]) for rank in range(SIZE)])
    for found in _all(lambda communicator, rank: communicator.all_gather(_bytes(rank, lengths[rank]))):
        _assert_same(found, joined)
    on_root = _all(lambda communicator, rank: communicator.gather(_bytes(rank, lengths[rank]), 2))
    assert on_root[:2] == [[None, None]] * 2
    _assert_same(on_root[2], joined)


@pytest.mark.parametrize("length", [*ENDS, 2 * SEGMENT])
def test_all_to_all(length):
    splits = [[1, length, 3], [0, 0, 9], [SEGMENT // 3, SEGMENT // 3, SEGMENT // 3]]

    def trade(communicator, rank):
        return communicator.all_to_all(_bytes(rank, sum(splits[rank])), splits[rank])[0]

    for getter, found in enumerate(_all(trade)):
        parts = []
        for giver, counts in enumerate(splits):
            start = sum(counts[:getter])
            parts.append(_bytes(giver, sum(counts))[start : start + counts[getter]])
        _assert_same(found, numpy.concatenate(parts))


@pytest.mark.parametrize("length", [end // 8 for end in (*ENDS, PLACE - 8, PLACE, PLACE + 8, 3 * PLACE)])
def test_what_reduces(length):
    values = numpy.arange(length) % 13 + 1.0
    total = SIZE * values + SIZE * (SIZE - 1) // 2

    def reduce(communicator, rank):
        in_place = values + rank
        communicator.all_reduce(in_place, algorithm="shared_memory")
        (listed,) = communicator.all_reduce_list([values + rank])
        return in_place, listed, communicator.reduce_scatter(values + rank)

    for rank, found in enumerate(_all(reduce)):
        for in_place, listed, share in found:
            _assert_same((in_place, listed), total)
            _assert_same([share], total[rank * length // SIZE : (rank + 1) * length // SIZE])
