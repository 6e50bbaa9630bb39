"""Sums that are begun before the call that takes them, beside the stream in which arrays are made and read."""

from __future__ import annotations

import numpy
import pytest

from mpidist.collectives import early_sums
from mpidist.collectives.ways.device_ways import DeviceWays
from mpidist.world import world_communicator
from tests.gpu.library import check_on_all_ranks, in_replica, place, problems_of, slowly, stream, two_streams

pytestmark = [pytest.mark.mpi, pytest.mark.gpu(only=True)]

SHAPES = [(50, 80), (3000,), (1700, 3)]


@pytest.fixture
def engine(xp, monkeypatch):
    """What reduces lists of these ranks, by NCCL where they can use it."""
    monkeypatch.setattr(early_sums, "_LEAST_BUCKET_BYTES", 64)
    in_replica("SUM", xp.zeros(3, "f4"))
    return world_communicator().engine()


def bound(xp, engine, dtype, number=0, op="sum"):
    """Return the early sums of arrays of `SHAPES`, each in a bucket of its own; None where there are none."""
    kind = xp.zeros(0, dtype)
    signatures = [(str(shape), kind.dtype, shape) for shape in SHAPES]
    plan = engine.early_plan(signatures, op, kind)
    links = [each for each in DeviceWays.links(world_communicator().devices) if not isinstance(each, str)]
    assert (plan is not None) == (place()[1] > 1 and bool(links))
    return None if plan is None else engine.bind_early(plan, number, ("flags", numpy.dtype("f4"), (1,)), 1)


def fill(sums, arrays):
    for index, each in enumerate(arrays):
        sums.buckets.fill(index, [each])


def take(sums, arrays, scale=None):
    for index, each in enumerate(arrays):
        sums.buckets.take(index, [each], scale)


def slow_arrays(xp, dtype, step):
    """Return this rank's arrays, which the card is still making."""
    found = [xp.zeros(shape, dtype) for shape in SHAPES]
    for number, each in enumerate(found):
        slowly(xp, each, place()[0] + 1 + step + number)
    return found


def expected(dtype, step, scale=None, op="sum"):
    size = place()[1]
    sums = [size * (size + 1) // 2 + size * (step + number) for number in range(len(SHAPES))]
    if op == "max":
        sums = [size + step + number for number in range(len(SHAPES))]
    return [numpy.full(shape, each * (scale or 1), dtype) for shape, each in zip(SHAPES, sums, strict=True)]


@pytest.mark.parametrize(("dtype", "op"), [("f2", "sum"), ("f4", "sum"), ("f8", "sum"), ("i2", "sum"), ("f4", "max")])
@pytest.mark.parametrize("is_other", [False, True])
def test_each_rank_begins_when_it_likes(xp, engine, dtype, op, is_other):
    sums, problems = bound(xp, engine, dtype, op=op), []
    if sums is None:
        return
    with stream(xp) if is_other else two_streams(xp)[0]:
        for step in range(4):
            given = slow_arrays(xp, dtype, step)
            for index, each in enumerate(given):
                sums.buckets.fill(index, [each])
                each.fill(-100)  # it was copied
                if index < (place()[0] + step) % 4:
                    sums.move_on(index + 1)
            sums.flags[:] = place()[0]
            assert sums(True)
            assert sums.flags[0] == sum(range(place()[1]))
            scale = 0.5 if step == 3 and dtype != "i2" else None
            take(sums, given, scale)
            doubled = [each * 2 for each in given]
            wanted = [2 * each for each in expected(dtype, step, scale, op)]
            problems.append(problems_of(xp, doubled, wanted))
    check_on_all_ranks("".join(problems))
    sums.end()


def test_what_does_not_count_on_one_rank_is_dropped_on_all(xp, engine):
    sums, problems = bound(xp, engine, "f4"), []
    if sums is None:
        return
    for step in range(6):
        given = slow_arrays(xp, "f4", step)
        fill(sums, given)
        sums.move_on((place()[0] + step) % 3)
        own = xp.ones(5, "f4")
        counts = step % 2 == 1 or place()[0] != 1
        assert sums(counts) == (step % 2 == 1)
        problems.append(problems_of(xp, [in_replica("SUM", own)], [numpy.full(5, place()[1], "f4")]))
        if step % 2:
            take(sums, given)
            problems.append(problems_of(xp, given, expected("f4", step)))
    check_on_all_ranks("".join(problems))
    sums.end()


def test_two_lists_are_under_way_at_once_in_any_order(xp, engine):
    both, problems = [bound(xp, engine, "f4", number) for number in (0, 1)], []
    if both[0] is None:
        return
    given = [slow_arrays(xp, "f4", step) for step in range(2)]
    for number in (0, 1) if place()[0] % 2 else (1, 0):
        fill(both[number], given[number])
        both[number].move_on(3)
    for step, sums in enumerate(both):
        assert sums(True)
        take(sums, given[step])
        problems.append(problems_of(xp, given[step], expected("f4", step)))
        sums.end()
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("change", ["none", "signs", "one", "order"])
def test_arrays_that_were_changed_are_told(xp, engine, dtype, change):
    sums = bound(xp, engine, dtype)
    if sums is None:
        return
    given = [xp.arange(numpy.prod(shape)).reshape(shape).astype(dtype) for shape in SHAPES]
    fill(sums, given)
    if change == "signs":
        given[0] *= -1
    elif change == "one":
        given[2][1, 1] = -1
    elif change == "order":
        given[1][...] = given[1][::-1].copy()
    for index, each in enumerate(given):
        sums.buckets.mark(index, [each])
    check_on_all_ranks(sums.buckets.have_changed(3)() == (change != "none"))
    sums.end()


def test_arrays_of_one_bucket_come_in_several_streams(xp, engine):
    sums, problems = bound(xp, engine, "f4"), []
    if sums is None:
        return
    first, second = two_streams(xp)
    for step in range(20):
        with first:
            whole = xp.zeros(sum(map(numpy.prod, SHAPES)), "f4")
            event = first.record()
        parts = [part.reshape(shape) for part, shape in zip(xp.split(whole, [4000, 7000]), SHAPES, strict=True)]
        second.wait_event(event)
        for index, each in enumerate(parts):
            for half, stream_of_half in zip(xp.split(each.reshape(-1), 2), (first, second), strict=True):
                with stream_of_half:
                    slowly(xp, half, place()[0] + 1 + step)
                    sums.enter(())
            with second:
                sums.buckets.fill(index, [each])
                sums.move_on(index + 1)
        first.wait_event(second.record())
        with first:
            assert sums(True)
            take(sums, parts)
            wanted = numpy.full(whole.size, place()[1] * (place()[1] + 1) // 2 + place()[1] * step, "f4")
            problems.append(problems_of(xp, [whole], [wanted]))
    check_on_all_ranks("".join(problems))
    sums.end()


def test_a_rank_that_waits_for_its_device_in_the_pass(xp, engine):
    """Others have begun nothing yet: they do so in the call, whether theirs count or not."""
    sums = bound(xp, engine, "f4")
    if sums is None:
        return
    for step in range(4):
        given = slow_arrays(xp, "f4", step)
        fill(sums, given)
        if step and step % place()[1] == place()[0]:
            sums.move_on(1)
            xp.cuda.Device().synchronize()
        assert sums(step % 2 == 0 or place()[0] == 0) == (step % 2 == 0)
    sums.end()


@pytest.mark.parametrize("is_of_another_list", [False, True])
def test_sums_that_were_taken_are_right_where_a_later_one_is_abandoned(xp, engine, is_of_another_list):
    """Rank 0 drops its list with a sum under way that nobody else begins, while others are still busy.

    The berth of that list is lost, so each case has its own.
    """
    number = int(is_of_another_list)
    sums = bound(xp, engine, "f4", number)
    if sums is None:
        return
    given = slow_arrays(xp, "f4", 0)
    fill(sums, given)
    assert sums(True)
    take(sums, given)
    if is_of_another_list:  # by the same link
        sums.close()
        sums = bound(xp, engine, "f4", number)
        assert not sums(False)
    if place()[0] == 0:
        fill(sums, [xp.ones(SHAPES[0], "f4")])
        sums.move_on(1)
        sums.close()
    check_on_all_ranks(problems_of(xp, given, expected("f4", 0)))
    check_on_all_ranks(problems_of(xp, [in_replica("SUM", xp.ones(5, "f4"))], [numpy.full(5, place()[1], "f4")]))
