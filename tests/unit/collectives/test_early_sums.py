"""Sums that are begun before the call that takes them: values, and that nothing of one step gets into another."""

from __future__ import annotations

import gc
from weakref import ref

import numpy
import pytest

from mpidist.collectives import early_sums
from mpidist.collectives.engine import Engine
from mpidist.errors import RemoteReplicaError
from mpidist.testing import run_ranks
from mpidist.testing.device import PretendedStream, on_device, pretended_device
from mpidist.world import world_communicator

SIGNATURES = [("a", numpy.dtype("f4"), (5, 8)), ("b", numpy.dtype("f4"), (30,)), ("c", numpy.dtype("f8"), (17,))]
LENGTHS = [40, 30, 17]
HOSTS = [["a", "b"], ["a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "c"]]


@pytest.fixture(autouse=True)
def short_buckets(monkeypatch):
    monkeypatch.setattr(early_sums, "_LEAST_BUCKET_BYTES", 64)


def bound(ranks, number=0, flags=2, kind=None):
    engine = ranks.engine()
    early = engine.early_plan(SIGNATURES, "sum", kind)
    assert [bucket.elements for bucket in early.plan.buckets] == LENGTHS
    return engine.bind_early(early, number, ("flags", numpy.dtype("f4"), (flags,)), flags)


def fill(sums, rank, step):
    for index, buffer in enumerate(sums.buckets.buffers):
        buffer[:] = numpy.arange(buffer.size) * (rank + 1) + 100 * step + index


def expected(size, step):
    """Return by bucket the sum over the ranks of what `fill` gives."""
    ranks = size * (size + 1) // 2
    return [numpy.arange(length) * ranks + size * (100 * step + index) for index, length in enumerate(LENGTHS)]


def check(sums, size, step):
    for buffer, values in zip(sums.buckets.buffers, expected(size, step), strict=True):
        numpy.testing.assert_array_equal(buffer, values)


@pytest.mark.parametrize("hosts", HOSTS, ids="".join)
def test_sums_and_flags_whenever_each_rank_begins(hosts):
    def job():
        ranks = world_communicator()
        sums = bound(ranks)
        for step in range(4):
            fill(sums, ranks.rank, step)
            for filled in range((ranks.rank + step) % 4):
                sums.move_on(filled + 1)
            sums.flags[:] = 1, ranks.rank
            assert sums(True)
            check(sums, ranks.size, step)
            assert list(sums.flags) == [ranks.size, sum(range(ranks.size))]

    run_ranks(len(hosts), job, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS, ids="".join)
def test_what_does_not_count_on_one_rank_is_dropped_on_all(hosts):
    def job():
        ranks = world_communicator()
        sums = bound(ranks)
        for step in range(6):
            fill(sums, ranks.rank, step)
            sums.move_on((ranks.rank + step) % 3)
            counts = step % 2 == 1 or ranks.rank != 1
            assert sums(counts) == (step % 2 == 1)
            if step % 2 == 1:
                check(sums, ranks.size, step)

    run_ranks(len(hosts), job, hosts=hosts)


def test_nothing_is_sent_where_nobody_has_begun():
    def job():
        ranks = world_communicator()
        sums = bound(ranks)
        started = []
        for each in sums.buckets._executors:
            each.start = lambda start=each.start: started.append(1) or start()
        assert not sums(False)
        assert not started
        fill(sums, ranks.rank, 1)
        assert sums(True)
        assert len(started) == 3
        check(sums, ranks.size, 1)

    run_ranks(2, job, hosts=["a", "b"])


@pytest.mark.parametrize("begun", [0, 2])
def test_a_rank_that_misses_the_call_with_sums_under_way(begun):
    def job():
        ranks = world_communicator()
        sums = bound(ranks)
        fill(sums, ranks.rank, 7)
        if ranks.rank == 1:
            sums.move_on(begun)
            ranks.miss(ValueError("boom"))
        else:
            sums.move_on(3)
            with pytest.raises(RemoteReplicaError, match="boom"):
                sums(True)
        if ranks.rank == 1 and not begun:  # it has begun nothing, and knows nothing of what others have
            fill(sums, ranks.rank, 8)
            sums.move_on(3)
            assert not sums(True)
        else:
            assert not sums(False)
        fill(sums, ranks.rank, 9)
        sums.move_on(1)
        assert sums(True)
        check(sums, ranks.size, 9)

    run_ranks(2, job, hosts=["a", "b"])


def test_two_lists_are_under_way_at_once_in_any_order():
    def job():
        ranks = world_communicator()
        both = [bound(ranks, number) for number in (3, 4)]
        order = both if ranks.rank else both[::-1]
        for step, sums in enumerate(order):
            fill(sums, ranks.rank, both.index(sums))
            sums.move_on(2 + step)
        for step, sums in enumerate(both):
            assert sums(True)
            check(sums, ranks.size, step)

    run_ranks(2, job, hosts=["a", "b"])


def test_a_berth_is_free_again_unless_something_is_under_way_in_it():
    def job():
        ranks = world_communicator()

        def is_free(number):
            return early_sums.is_free(ranks, number)

        sums, other = bound(ranks, 5), bound(ranks, 6)
        assert not is_free(5) and not is_free(5 + 64) and not is_free(6) and is_free(7)
        other.move_on(1)
        del sums, other
        gc.collect()
        assert is_free(5) and not is_free(6)
        ranks.barrier()

    run_ranks(2, job, hosts=["a", "b"])


def test_a_device_s_sum_that_is_broken_off_keeps_its_bucket_until_it_has_ended_and_no_link(monkeypatch):
    ended = []
    monkeypatch.setattr(PretendedStream, "arrival", lambda stream: lambda: bool(ended))

    def job():
        ranks, kind = world_communicator(), on_device(numpy.zeros(0, "f4"))
        ranks.engine()([on_device(numpy.ones(3))])
        sums = bound(ranks, 0, kind=kind)
        assert not sums(False)
        buckets = [ref(each) for each in sums.buckets._buffers]
        assert len(ranks.devices._open) == 2
        if ranks.rank == 0:
            sums.move_on(1)
            del sums
            gc.collect()
            assert list(ranks.devices._open) == ranks.devices.links()
            for is_kept in (True, False):
                bound(ranks, 1, kind=kind)
                gc.collect()
                assert [each() is not None for each in buckets] == [is_kept, False, False]
                ended.append(True)
        ranks.barrier()

    with pretended_device(""):
        run_ranks(2, job)


def test_where_nothing_is_begun_early(monkeypatch):
    def plans():
        ranks = world_communicator()
        engines = [ranks.engine(), Engine(ranks, algorithm="ring"), Engine(ranks, algorithm="pinned")]
        found = [each.early_plan(SIGNATURES, "mean") for each in engines]
        return [each is not None for each in (*found, ranks.engine().early_plan(SIGNATURES[:1], "mean"))]

    assert run_ranks(2, plans, hosts=["a", "b"]) == [[True, False, False, False]] * 2
    assert run_ranks(2, plans) == [[False] * 4] * 2
    with monkeypatch.context() as patch:
        patch.setenv("MPIDIST_DETERMINISTIC", "1")
        assert run_ranks(2, plans, hosts=["a", "b"]) == [[False] * 4] * 2
    monkeypatch.setattr(early_sums, "_LEAST_BUCKET_BYTES", 1 << 20)
    assert run_ranks(2, plans, hosts=["a", "b"]) == [[False] * 4] * 2
