"""What every transport and every algorithm must do, as test classes to inherit.

A transport's test file has a class of a few lines for each suite, which says how to run a function on some ranks::

    class TestLoopback(LoopbackRanks, TransportTests):
        sizes = (1, 2, 3, 4)

Functions run on every rank and check there, since under MPI no process sees the results of the others.  All expected
values are closed forms of rank and size.
"""

from __future__ import annotations

import abc
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mpidist.collectives.ways.executor import Executor, even_bounds
from mpidist.errors import TransportError, TransportTimeoutError, UnsupportedDtypeError
from mpidist.runtime.control import Watch
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.table import ALGORITHMS
from mpidist.testing.ranks import run_ranks
from mpidist.transports import world
from mpidist.transports.base import Transport
from mpidist.transports.loopback import Faults

OnRank = Callable[[Transport], Any]

#: Deadline of waits in the suites, in seconds: beyond any honest wait, and short of the patience of who runs tests.
_LIMIT_SECONDS = 30.0


class RankRunner(abc.ABC):
    """How a suite runs a function on some ranks, and on how many.

    Attributes
    ----------
    sizes : sequence of int
        Numbers of ranks that every test is run on.
    """

    sizes: Sequence[int] = (1, 2, 3, 4)

    @abc.abstractmethod
    def run(self, size: int, fn: OnRank) -> None:
        """Call ``fn(transport)`` on each of `size` ranks, and raise what it raised there."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run every test that has an argument `size` on each of the sizes."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)


def on_every_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Return the test method that calls ``test(self, transport, ...)`` on each of `size` ranks, with its fixtures."""
    own, _, *fixtures = inspect.signature(test).parameters.values()

    def method(self: RankRunner, size: int, **values: Any) -> None:
        self.run(size, lambda transport: test(self, transport, **values))

    method.__name__, method.__doc__ = test.__name__, test.__doc__
    size = inspect.Parameter("size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([own, size, *fixtures])  # type: ignore[attr-defined]
    return method


class LoopbackRanks(RankRunner):
    """Ranks as threads, without buffering, so that code which relies on it hangs."""

    faults: Faults | None = None
    eager_bytes = 0

    def run(self, size: int, fn: OnRank) -> None:
        def on_rank() -> None:
            fn(world().transport)

        run_ranks(size, on_rank, timeout_seconds=_LIMIT_SECONDS, faults=self.faults, eager_bytes=self.eager_bytes)


def watch_of(transport: Transport, timeout_seconds: float = _LIMIT_SECONDS) -> Watch:
    """Return a watch over the waits of a test."""
    return transport.control.watch("a conformance test", timeout_seconds)


def assert_same_on_all_ranks(transport: Transport, array: Any) -> None:
    """Raise AssertionError unless all ranks have the same bytes; every rank hears of it from its left neighbour."""
    mine = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    theirs = np.empty_like(mine)
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    transport.wait([transport.receive(theirs, left), transport.send(mine, right)], watch_of(transport))
    np.testing.assert_array_equal(theirs, mine, err_msg=f"rank {transport.rank} and rank {left} differ")


class TransportTests(RankRunner):
    """What a transport must do: see `mpidist.transports.base.Transport`."""

    #: Length in bytes of the message that is to be longer than any buffer on the way.
    large_bytes = 5 * (1 << 20) + 3

    @on_every_rank
    def test_zero_bytes_arrive_in_their_turn(self, transport: Transport) -> None:
        """An empty message between two others is a message: the third must not take its place."""
        right, left = _neighbours(transport)
        got = [np.zeros(1, "i8"), np.zeros(0, "i8"), np.zeros(1, "i8")]
        receives = [transport.receive(array, left) for array in got]
        sends = [
            transport.send(array, right) for array in (np.full(1, 7, "i8"), np.zeros(0, "i8"), np.full(1, 8, "i8"))
        ]
        transport.wait(receives + sends, watch_of(transport))
        assert (int(got[0][0]), int(got[2][0])) == (7, 8)

    @on_every_rank
    def test_a_rank_sends_to_itself(self, transport: Transport) -> None:
        sent, got = np.arange(10.0) + transport.rank, np.zeros(10)
        transport.wait(
            [transport.receive(got, transport.rank), transport.send(sent, transport.rank)], watch_of(transport)
        )
        np.testing.assert_array_equal(got, np.arange(10.0) + transport.rank)

    @on_every_rank
    def test_both_directions_at_once(self, transport: Transport) -> None:
        """All ranks send a long message to the right at once; with blocking sends nobody would receive."""
        right, left = _neighbours(transport)
        sent, got = _pattern(self.large_bytes, transport.rank), np.zeros(self.large_bytes, np.uint8)
        transport.wait([transport.receive(got, left), transport.send(sent, right)], watch_of(transport))
        np.testing.assert_array_equal(got, _pattern(self.large_bytes, left))

    @on_every_rank
    def test_sends_may_be_enqueued_before_receives(self, transport: Transport) -> None:
        right, left = _neighbours(transport)
        sent, got = np.full(3000, transport.rank, "i4"), np.zeros(3000, "i4")
        sends = [transport.send(sent, right)]
        transport.wait([*sends, transport.receive(got, left)], watch_of(transport))
        np.testing.assert_array_equal(got, left)

    @on_every_rank
    def test_many_messages_keep_their_order(self, transport: Transport) -> None:
        right, left = _neighbours(transport)
        watch = watch_of(transport)
        for batch in range(5):
            got = np.full(20, -1)
            pendings = [transport.receive(got[index : index + 1], left) for index in range(20)]
            pendings += [transport.send(np.array([100 * batch + index]), right) for index in range(20)]
            transport.wait(pendings, watch)
            np.testing.assert_array_equal(got, 100 * batch + np.arange(20))

    @on_every_rank
    def test_waiting_for_the_second_message_first(self, transport: Transport) -> None:
        """Messages match in the order of enqueueing, in whatever order they are waited for."""
        right, left = _neighbours(transport)
        watch = watch_of(transport)
        got = np.zeros((2, 4), "i8")
        first, second = (transport.receive(row, left) for row in got)
        sends = [transport.send(np.full(4, number), right) for number in (1, 2)]
        transport.wait([second], watch)
        transport.wait([first, *sends], watch)
        np.testing.assert_array_equal(got, [[1] * 4, [2] * 4])

    @on_every_rank
    def test_everyone_to_everyone(self, transport: Transport) -> None:
        rank, size = transport.rank, transport.size
        got = np.zeros(size, "i8")
        sent = rank * size + np.arange(size)
        pendings = [transport.receive(got[peer : peer + 1], peer) for peer in range(size)]
        pendings += [transport.send(sent[peer : peer + 1], peer) for peer in range(size)]
        transport.wait(pendings, watch_of(transport))
        np.testing.assert_array_equal(got, np.arange(size) * size + rank)

    @pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "f2", "f8", "c16", "M8[s]", "S3", "f4,i8"])
    @on_every_rank
    def test_any_dtype_travels_as_bytes(self, transport: Transport, dtype: str) -> None:
        right, left = _neighbours(transport)
        nbytes = 6 * np.dtype(dtype).itemsize
        sent = _pattern(nbytes, transport.rank).view(dtype).reshape(2, 3)
        got = np.zeros((3, 2), dtype)
        transport.wait([transport.receive(got, left), transport.send(sent, right)], watch_of(transport))
        np.testing.assert_array_equal(got.reshape(-1).view(np.uint8), _pattern(nbytes, left))

    @on_every_rank
    def test_exchange_returns_what_everyone_gave(self, transport: Transport) -> None:
        got = transport.exchange(b"x" * transport.rank, watch_of(transport))
        assert got == [b"x" * rank for rank in range(transport.size)]

    @on_every_rank
    def test_a_group_of_a_group(self, transport: Transport) -> None:
        """Odd and even ranks, then halves of these: each finds itself, in rank order, and can talk to its group."""
        odd_or_even = transport.split(transport.rank % 2)
        half = odd_or_even.split(odd_or_even.rank * 2 // odd_or_even.size)
        members = [rank for rank in range(transport.size) if rank % 2 == transport.rank % 2]
        middle = -(-len(members) // 2)
        expected = members[:middle] if transport.rank in members[:middle] else members[middle:]
        got = half.exchange(str(transport.rank).encode(), watch_of(transport))
        assert [int(raw) for raw in got] == expected
        assert half.world_ranks == tuple(transport.world_ranks[rank] for rank in expected)
        assert expected[half.rank] == transport.rank
        for group in (half, odd_or_even):
            group.close()

    @on_every_rank
    def test_groups_do_not_hear_each_other(self, transport: Transport) -> None:
        """The same two ranks in two groups at once: messages come out of the group they went into."""
        right, left = _neighbours(transport)
        other = transport.split(0)
        got = np.zeros(2, "i8")
        pendings = [transport.receive(got[:1], left), other.receive(got[1:], left)]
        later, sooner = other.send(np.array([2]), right), transport.send(np.array([1]), right)
        watch = watch_of(transport)
        other.wait([pendings[1], later], watch)
        transport.wait([pendings[0], sooner], watch)
        np.testing.assert_array_equal(got, [1, 2])
        other.close()

    @on_every_rank
    def test_python_objects_and_device_memory_are_refused(self, transport: Transport) -> None:
        from mpidist.testing.device import on_device, pretended_device

        with pytest.raises(UnsupportedDtypeError):
            transport.send(np.array([None, {}]), transport.rank)
        if "device" not in transport.memory:
            with pretended_device(), pytest.raises(UnsupportedDtypeError, match="device"):
                transport.send(on_device(np.zeros(3)), transport.rank)

    @on_every_rank
    def test_polling_moves_messages_on(self, transport: Transport) -> None:
        """A long message in both directions, without a wait."""
        right, left = _neighbours(transport)
        sent, got = _pattern(self.large_bytes, transport.rank), np.zeros(self.large_bytes, np.uint8)
        pendings, watch = [transport.receive(got, left), transport.send(sent, right)], watch_of(transport)
        while not transport.poll(pendings):
            watch.tick()
        np.testing.assert_array_equal(got, _pattern(self.large_bytes, left))

    @on_every_rank
    def test_channels_do_not_hear_each_other(self, transport: Transport) -> None:
        """Two channels over the same ranks, in reverse order: messages come out of the one they went into."""
        size = transport.size
        if not transport.has_channels:
            with pytest.raises(TransportError, match="no channels"):
                transport.among(range(size), 1)
            return
        one, two = (transport.among(range(size)[::-1], channel) for channel in (1, 2))
        right, left = _neighbours(one)
        assert one.world_ranks == transport.world_ranks[::-1] and one.rank == size - 1 - transport.rank
        got = np.zeros(2, "i8")
        pendings = [one.receive(got[:1], left), two.receive(got[1:], left)]
        later, sooner = two.send(np.array([2]), right), one.send(np.array([1]), right)
        watch = watch_of(transport)
        two.wait([pendings[1], later], watch)
        one.wait([pendings[0], sooner], watch)
        np.testing.assert_array_equal(got, [1, 2])
        assert one.exchange(bytes([transport.rank]), watch) == [bytes([rank]) for rank in range(size)[::-1]]

    @on_every_rank
    def test_there_is_nobody_outside_the_group(self, transport: Transport) -> None:
        for peer in (-1, transport.size):
            for enqueue in (transport.send, transport.receive):
                with pytest.raises(ValueError, match=f"rank {transport.rank} of {transport.size}: .* no rank {peer}"):
                    enqueue(np.zeros(1), peer)

    def test_a_message_longer_than_its_array_is_refused(self) -> None:
        size = max(self.sizes)
        if size == 1:
            pytest.skip("there is no other rank, and Open MPI cuts what a rank sends to itself without a word")
        self.run(size, _too_long)

    @on_every_rank
    def test_closing_twice(self, transport: Transport) -> None:
        group = transport.split(0)
        group.exchange(b"used", watch_of(transport))
        group.close()
        group.close()
        for enqueue in (group.send, group.receive):
            with pytest.raises(TransportError, match="closed"):
                enqueue(np.zeros(1), group.rank)
        transport.exchange(b"the others live on", watch_of(transport))


def _too_long(transport: Transport) -> None:
    """In a group of its own, which nobody uses afterwards: who waits for the message reads who sent it."""
    right, left = _neighbours(transport)
    group = transport.split(0)
    with pytest.raises(TransportError, match=f"^rank {group.rank} of {group.size}: a message .*from rank {left} "):
        group.wait([group.receive(np.zeros(1), left), group.send(np.zeros(2), right)], watch_of(transport))
    group.close()


class DeadlineTests(RankRunner):
    """What a transport must do when messages do not come.  Afterwards its world is broken: each test needs its own."""

    @on_every_rank
    def test_a_wait_ends_at_its_deadline(self, transport: Transport) -> None:
        pending = transport.receive(np.zeros(4), (transport.rank - 1) % transport.size)
        with pytest.raises(TransportTimeoutError, match="a conformance test"):
            transport.wait([pending], watch_of(transport, timeout_seconds=0.2))


# -- collectives -------------------------------------------------------------------------------------------------------


#: Dtypes, and the reductions that each is tried with; besides, all lengths are tried with sums of float64.
_REDUCTIONS = {
    "f8": ("min", "max", "prod"),
    "f4": ("sum", "min"),
    "i4": ("sum", "max", "prod"),
    "u1": ("sum", "max"),
    "c8": ("sum", "prod"),
}


class CollectiveTests(RankRunner):
    """What an algorithm must do, for every one in the table: see `mpidist.schedules.table`."""

    sizes: Sequence[int] = tuple(range(1, 9))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        super().pytest_generate_tests(metafunc)
        if "schedule" in metafunc.fixturenames:
            names = [f"{collective}-{name}" for collective, name in ALGORITHMS]
            metafunc.parametrize("schedule", list(ALGORITHMS.values()), ids=names)

    @on_every_rank
    def test_values(self, transport: Transport, schedule: Schedule) -> None:
        """Every length with one dtype, from every root; every dtype and reduction with two of the lengths."""
        reduces = schedule.collective in ("all_reduce", "reduce_scatter", "reduce")
        for length in lengths(transport.size):
            for root in range(transport.size) if schedule.rooted else [0]:
                _check(transport, schedule, "f8", "sum", length, root)
        for length in (transport.size + 1, 1000):
            for dtype, operations in _REDUCTIONS.items():
                for op in operations if reduces else operations[:1]:
                    _check(transport, schedule, dtype, op, length, 0)

    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    @pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
    @on_every_rank
    def test_special_values(self, transport: Transport, schedule: Schedule, dtype: str, op: str) -> None:
        """NaN, infinities, -0.0 and denormals come out as NumPy has them, whichever rank has them."""
        if schedule.collective in ("all_reduce", "reduce_scatter", "reduce"):
            size, rank = transport.size, transport.rank
            before = [special(dtype, each, size) for each in range(size)]
            buffer, total = before[rank].copy(), special_reduced(op, before)
            with np.errstate(invalid="ignore"):  # of infinities of both signs
                Executor(schedule, transport, buffer, op).run(watch_of(transport))
            for where, values in expected(schedule, before, total, rank, 0):
                assert_same_values(buffer[where], values)

    @on_every_rank
    def test_run_twice(self, transport: Transport, schedule: Schedule) -> None:
        """An executor is bound once and replayed: on new values in the same buffer, it computes anew."""
        size, rank = transport.size, transport.rank
        buffer = np.zeros(10)
        executor = Executor(schedule, transport, buffer)
        for scale in (1, 3):
            before = [scale * contribution("sum", "f8", 10, r, size) for r in range(size)]
            buffer[:] = before[rank]
            executor.run(watch_of(transport))
            for where, values in expected(schedule, before, scale * reduced("sum", "f8", 10, size), rank, 0):
                np.testing.assert_array_equal(buffer[where], values)

    @on_every_rank
    def test_segments(self, transport: Transport, schedule: Schedule) -> None:
        """The same with messages cut into many segments, down to one element."""
        for segment_bytes, length in ((1, transport.size + 1), (8, 1), (24, 97), (100, 97)):
            _check(transport, schedule, "f8", "sum", length, transport.size - 1, segment_bytes)

    @on_every_rank
    def test_two_groups_at_once(self, transport: Transport, schedule: Schedule) -> None:
        group = transport.split(transport.rank % 2)
        _check(group, schedule, "i4", "sum", 20 + transport.rank % 2, 0)
        group.close()

    def test_all_ranks_get_the_same_bits(self, size: int, schedule: Schedule) -> None:
        if schedule.collective == "all_reduce":
            self.run(size, lambda transport: _same_bits(transport, schedule))


def lengths(size: int) -> list[int]:
    """Return lengths of buffers around the number of ranks: none, fewer elements than ranks, and more."""
    return sorted({0, 1, size - 1, size, size + 1, 1000})


def contribution(op: str, dtype: Any, length: int, rank: int, size: int) -> np.ndarray:
    """Return a rank's buffer, another one on every rank, from which `reduced` follows in closed form."""
    index = np.arange(length)
    if op == "sum":
        return ((index % 7 + 1) * (rank + 1)).astype(dtype)
    if op == "prod":
        return np.where((index + rank) % 3 == 0, 2, 1).astype(dtype)
    return (index % 5 * 10 + (index + rank) % size).astype(dtype)


def reduced(op: str, dtype: Any, length: int, size: int) -> np.ndarray:
    """Return what all ranks' contributions together are."""
    index = np.arange(length)
    if op == "sum":
        return ((index % 7 + 1) * (size * (size + 1) // 2)).astype(dtype)
    if op == "prod":
        # Ranks r below `size` with (index + r) % 3 == 0: the first is -index % 3, and then every third.
        return (2 ** ((size + 2 - (-index) % 3) // 3)).astype(dtype)
    return (index % 5 * 10 + (size - 1 if op == "max" else 0)).astype(dtype)


def special(dtype: Any, rank: int, size: int) -> np.ndarray:
    """Return a rank's buffer of ones with NaN, infinities, -0.0 and denormals, on one rank, on two or on all."""
    number = np.dtype(dtype).type
    denormal = number(6) * np.nextafter(number(0), number(1))
    values = [math.nan, math.inf, -math.inf, -0.0, denormal, -denormal]
    of_one = [value if rank == who else 1 for value in values for who in range(size)]
    both_signs = [{who: math.inf, who + 1: -math.inf}.get(rank, 1) for who in range(size)]
    both_kinds = [math.nan if rank == who else math.inf for who in range(size)]
    return np.array(of_one + both_signs + both_kinds + values, dtype)


def special_reduced(op: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return what NumPy makes of the `special` buffers of all ranks, in one process."""
    ufunc = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    with np.errstate(all="ignore"):
        total = functools.reduce(ufunc, parts)
        return total / np.array(len(parts), total.dtype) if op == "mean" else total


def assert_same_values(found: np.ndarray, values: np.ndarray) -> None:
    """Raise AssertionError unless arrays are equal, NaN where NaN is expected and zeros by their signs, too."""
    found, values = np.asarray(found, "f8"), np.asarray(values, "f8")  # NumPy knows no NaN of ml_dtypes
    np.testing.assert_array_equal(found, values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(values)[numbers])


def expected(schedule: Schedule, before: list[np.ndarray], total: np.ndarray, rank: int, root: int) -> Any:
    """Return what `rank` must hold afterwards, and where: pairs (slice, values) of the buffer."""
    length, size = len(total), len(before)
    bounds = even_bounds(length, size)
    whole, share = slice(0, length), slice(bounds[rank], bounds[rank + 1])
    if schedule.collective == "all_gather":
        return [(slice(bounds[r], bounds[r + 1]), before[r][bounds[r] : bounds[r + 1]]) for r in range(size)]
    return {
        "all_reduce": [(whole, total)],
        "reduce_scatter": [(share, total[share])],
        "broadcast": [(whole, before[root])],
        "reduce": [(whole, total)] if rank == root else [],
    }[schedule.collective]


def _check(
    transport: Transport, schedule: Schedule, dtype: str, op: str, length: int, root: int, segment_bytes: int = 1 << 18
) -> None:
    rank, size = transport.rank, transport.size
    before = [contribution(op, dtype, length, r, size) for r in range(size)]
    buffer = before[rank].copy()
    Executor(schedule, transport, buffer, op, root, segment_bytes=segment_bytes).run(watch_of(transport))
    case = f"rank {rank} of {size}: {schedule.name} {schedule.collective} {op} {dtype}[{length}], root {root}"
    for where, values in expected(schedule, before, reduced(op, dtype, length, size), rank, root):
        np.testing.assert_array_equal(buffer[where], values, err_msg=case)


def _same_bits(transport: Transport, schedule: Schedule) -> None:
    """Sums that round: close to the exact ones, and the same to the last bit on all ranks."""
    size = transport.size
    for length in (1, size + 1, 1000):
        before = np.array([np.random.default_rng((7, rank)).normal(size=length) for rank in range(size)], "f4")
        buffer = before[transport.rank].copy()
        Executor(schedule, transport, buffer).run(watch_of(transport))
        exact = [math.fsum(column) for column in before.T.astype("f8")]
        scale = np.abs(before).sum(axis=0)
        assert (np.abs(buffer - exact) <= scale * np.finfo("f4").eps * size).all()
        assert_same_on_all_ranks(transport, buffer)
    _same_zero(transport, schedule)


def _same_zero(transport: Transport, schedule: Schedule) -> None:
    """0.0 and -0.0 are equal, and which of them the minimum is depends on the order: that must not show."""
    for op in ("min", "max"):
        buffer = np.full(50, 0.0 if transport.rank % 2 else -0.0, "f4")
        Executor(schedule, transport, buffer, op).run(watch_of(transport))
        assert_same_on_all_ranks(transport, buffer)


# -- small parts of the tests ------------------------------------------------------------------------------------------


def _neighbours(transport: Transport) -> tuple[int, int]:
    """Return the ranks to the right and to the left."""
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def _pattern(nbytes: int, seed: int) -> np.ndarray:
    """Return bytes that differ from rank to rank, and from place to place with a period that divides no buffer size."""
    period = (np.arange(251) + 17 * seed) % 251
    return np.resize(period.astype(np.uint8), nbytes)
