"""The executor: what it posts and reduces, in which pieces, and what it refuses.

That every algorithm of the table computes what it should is in the conformance suites; see ``tests/unit/transports``.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.arrays import as_host
from mpidist.cluster.topology import Topology
from mpidist.collectives.ways.executor import Executor, even_bounds, turns_of
from mpidist.errors import RankFailedError, UnsupportedDtypeError
from mpidist.schedules.rounds import NOBODY, Round, Schedule
from mpidist.schedules.table import ALGORITHMS, algorithm, hierarchical
from mpidist.testing import run_ranks
from mpidist.testing.conformance import contribution, expected, reduced, watch_of
from mpidist.testing.device import DeviceArray, on_device, pretended_device
from mpidist.transports import world
from mpidist.transports.base import Transport
from mpidist.transports.single import SingleTransport

RING = algorithm("all_reduce", "ring")
DEVICE_ONLY = frozenset({"device"})


def swap_rounds(rank: int, size: int) -> Iterator[Round]:
    """Neighbours exchange all they have, and reduce it."""
    peer = rank ^ 1
    peer = peer if peer < size else NOBODY
    yield Round(peer, 0, 1, peer, 0, 1, reduce=True)


SWAP = Schedule("swap", "all_reduce", lambda size: 1, swap_rounds)


class RecordingTransport(Transport):
    """Notes what is asked of it; messages that are received are `incoming`, one after the other."""

    name = "recording"
    memory = frozenset({"host"})

    def __init__(self, rank: int, size: int, incoming=()) -> None:
        self.rank, self.size = rank, size
        self.asked: list[tuple] = []
        self._incoming = iter(incoming)
        self._waiting: list[np.ndarray] = []

    def send(self, array, destination):
        self.asked.append(("send", array.size, destination))
        return len(self.asked) - 1

    def receive(self, array, source):
        self.asked.append(("receive", array.size, source))
        array[...] = next(self._incoming)
        return len(self.asked) - 1

    def wait(self, pendings, watch):
        self.asked.append(("wait", tuple(pendings)))

    def poll(self, pendings):
        self.asked.append(("poll", tuple(pendings)))
        return True

    def split(self, color):
        return self

    def close(self):
        self.asked.append(("close",))


def all_reduce(schedule, length, dtype="f8", op="sum", **options):
    """Return this rank's buffer after an all-reduce of the closed-form contributions."""
    transport = world().transport
    buffer = contribution(op, dtype, length, transport.rank, transport.size)
    Executor(schedule, transport, buffer, op, **options).run(watch_of(transport))
    return buffer


# -- posting -----------------------------------------------------------------------------------------------------------


def test_the_next_segment_is_posted_before_the_present_one_is_awaited_and_receives_before_sends():
    transport = RecordingTransport(0, 2, incoming=[10.0, 20.0, 30.0])
    buffer = np.arange(6.0)
    Executor(SWAP, transport, buffer, segment_bytes=16).run(None)
    post = [("receive", 2, 1), ("send", 2, 1)]
    assert transport.asked == [*post, *post, ("wait", (0, 1)), *post, ("wait", (2, 3)), ("wait", (5, 6))]
    np.testing.assert_array_equal(buffer, np.arange(6.0) + [10, 10, 20, 20, 30, 30])


@pytest.mark.parametrize("ahead", [0, 2, 5])
def test_so_many_segments_are_posted_ahead(ahead):
    transport = RecordingTransport(0, 2, incoming=[10.0, 20.0, 30.0, 40.0])
    buffer = np.arange(8.0)
    Executor(SWAP, transport, buffer, segment_bytes=16, ahead=ahead).run(None)
    order = "".join(what[0] for what, *_ in transport.asked)  # receive, send, wait
    assert order == {0: "rsw" * 4, 2: "rs" * 2 + "rsw" * 2 + "ww", 5: "rs" * 4 + "w" * 4}[ahead]
    np.testing.assert_array_equal(buffer, np.arange(8.0) + [10, 10, 20, 20, 30, 30, 40, 40])


@pytest.mark.parametrize("ahead", [1, 3, 1000])
@pytest.mark.parametrize("name", sorted(name for what, name in ALGORITHMS if what == "all_reduce"))
def test_sums_are_the_same_however_many_segments_are_posted_ahead(name, ahead):
    for size in (2, 3, 4):
        for result in run_ranks(
            size, partial(all_reduce, algorithm("all_reduce", name), 1000, segment_bytes=80, ahead=ahead)
        ):
            np.testing.assert_array_equal(result, reduced("sum", "f8", 1000, size))


def test_all_that_is_posted_is_given_up_on():
    class Waiting(RecordingTransport):
        def poll(self, pendings):
            return False

    transport = Waiting(0, 2, incoming=itertools.repeat(1.0))
    kept = []
    transport.abandon = kept.extend
    progress = Executor(SWAP, transport, np.zeros(100), segment_bytes=80, ahead=4).start()
    assert not progress.poll()
    progress.abandon()
    assert len(kept) == len(transport.asked) == 2 * 5


def test_replacing_messages_are_not_cut_and_are_received_in_place():
    transport = RecordingTransport(1, 2, incoming=[7.0])
    buffer = np.zeros(1000)
    Executor(algorithm("broadcast", "binomial"), transport, buffer, segment_bytes=16).run(None)
    assert transport.asked == [("receive", 1000, 0), ("wait", (0,))]
    assert (buffer == 7).all()


@pytest.mark.parametrize("key", ALGORITHMS, ids="-".join)
def test_nothing_is_posted_for_nothing(key):
    for size in range(1, 9):
        transport = RecordingTransport(size - 1, size)
        Executor(ALGORITHMS[key], transport, np.zeros(0)).run(None)
        assert transport.asked == []


def test_one_rank_has_nobody_to_talk_to():
    for schedule in ALGORITHMS.values():
        buffer = np.arange(5.0)
        transport = SingleTransport()
        Executor(schedule, transport, buffer).run(watch_of(transport))
        np.testing.assert_array_equal(buffer, np.arange(5.0))


def test_running_again_posts_the_same_arrays_and_makes_none():
    class Identities(RecordingTransport):
        def send(self, array, destination):
            self.asked.append(id(array))

        receive = send

    transport = Identities(1, 4)
    executor = Executor(RING, transport, np.zeros(100), segment_bytes=64)
    executor.run(None)
    first, transport.asked = transport.asked, []
    executor.run(None)
    assert transport.asked == first and len(first) > 20


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_a_run_may_be_given_another_buffer_which_is_not_the_one_it_was_bound_to(length):
    def step():
        transport = world().transport
        own = contribution("sum", "f8", length, transport.rank, 3)
        executor = Executor(algorithm("all_reduce", "ring"), transport, own, segment_bytes=800)
        others = [contribution("sum", "f8", length, transport.rank, 3) for _ in range(2)]
        executor.run(watch_of(transport), others[0])
        executor.release()
        executor.run(watch_of(transport), others[1])
        assert np.array_equal(own, contribution("sum", "f8", length, transport.rank, 3))
        return others

    for others in run_ranks(3, step):
        for other in others:
            np.testing.assert_array_equal(other, reduced("sum", "f8", length, 3))


def test_scratch_is_two_segments_whatever_the_length():
    transport = RecordingTransport(0, 2, incoming=itertools.repeat(1.0))
    targets = []
    transport.receive = lambda array, source: targets.append((array.base, array.size))
    Executor(SWAP, transport, np.zeros(1000), segment_bytes=80).run(None)
    memories = {id(memory): memory for memory, _ in targets}
    assert len(targets) == 100
    assert sorted(memory.nbytes for memory in memories.values()) == [80, 80]


# -- the plan ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    key=st.sampled_from(sorted(ALGORITHMS)),
    size=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40), min_size=64, max_size=64),
    segment=st.integers(1, 12),
    root=st.integers(0, 8),
)
def test_what_one_rank_sends_another_receives_piece_by_piece(key, size, cuts, segment, root):
    """For any chunk bounds: between two ranks, the lengths sent are the lengths received, in the same order."""
    schedule = ALGORITHMS[key]
    chunks = schedule.chunks(size)
    bounds = tuple(itertools.accumulate((cuts * (chunks // 64 + 1))[:chunks], initial=0))
    sent, received = {}, {}
    for rank in range(size):
        for turn in turns_of(schedule, rank, size, bounds, segment, root % size):
            if turn.send is not None:
                sent.setdefault((rank, turn.send_to), []).append(turn.send)
            if turn.receive is not None:
                received.setdefault((turn.receive_from, rank), []).append(turn.receive)
            assert not turn.reduce or turn.receive is None or turn.receive[1] - turn.receive[0] <= segment
    assert sent == received
    assert all(start < stop for spans in sent.values() for start, stop in spans)


@given(length=st.integers(0, 1000), chunks=st.integers(1, 50))
def test_even_bounds_differ_by_one_element_at_most(length, chunks):
    bounds = even_bounds(length, chunks)
    lengths = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(lengths)) == (0, length, chunks)
    assert lengths.min() >= 0 and lengths.max() - lengths.min() <= 1


def test_a_round_whose_messages_overlap_in_part_is_refused():
    def rounds(rank, size):
        yield Round(1 - rank, rank, 2, 1 - rank, 1 - rank, 2, reduce=True)

    schedule = Schedule("overlap", "all_reduce", lambda size: 3, rounds)
    with pytest.raises(AssertionError, match="the same part of the buffer"):
        Executor(schedule, RecordingTransport(0, 2), np.zeros(3))


# -- values ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    name=st.sampled_from(["ring", "recursive_doubling", "rabenseifner", "binomial"]),
    hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    length=st.integers(0, 60),
    segment_bytes=st.integers(1, 100),
    eager_bytes=st.sampled_from([0, 64, 1 << 20]),
    op=st.sampled_from(["sum", "min", "max", "prod"]),
)
def test_hierarchies_over_any_placement_of_ranks(name, hosts, length, segment_bytes, eager_bytes, op):
    schedule = hierarchical(Topology(hosts), name)

    def on_rank():
        return all_reduce(schedule, length, op=op, segment_bytes=segment_bytes)

    results = run_ranks(len(hosts), on_rank, hosts=hosts, eager_bytes=eager_bytes, timeout_seconds=20)
    for result in results:
        np.testing.assert_array_equal(result, reduced(op, "f8", length, len(hosts)))


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 5), (0, 0, 0), (1, 1, 1)])
def test_all_gather_of_uneven_and_empty_shares(counts):
    bounds = [0, *itertools.accumulate(counts)]

    def on_rank():
        transport = world().transport
        buffer = np.full(bounds[-1], -1)
        buffer[bounds[transport.rank] : bounds[transport.rank + 1]] = transport.rank
        Executor(algorithm("all_gather", "ring"), transport, buffer, bounds=bounds).run(watch_of(transport))
        return buffer.tolist()

    assert run_ranks(3, on_rank) == [[rank for rank, count in enumerate(counts) for _ in range(count)]] * 3


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "?", "S5", "M8[s]", "c16"])
def test_copies_take_any_dtype(dtype):
    def on_rank():
        transport = world().transport
        buffer = np.frombuffer(bytes(range(160)), np.uint8).view(dtype).copy()
        if transport.rank != 1:
            buffer[...] = np.zeros((), dtype)
        Executor(algorithm("broadcast", "binomial"), transport, buffer, root=1).run(watch_of(transport))
        return buffer.tobytes()

    assert run_ranks(3, on_rank) == [bytes(range(160))] * 3


def test_buffers_of_any_shape_are_worked_on_in_memory_order():
    def on_rank():
        transport = world().transport
        buffer = np.asfortranarray(np.arange(12.0).reshape(3, 4) * (transport.rank + 1))
        Executor(RING, transport, buffer).run(watch_of(transport))
        return buffer

    for result in run_ranks(3, on_rank):
        np.testing.assert_array_equal(result, np.arange(12.0).reshape(3, 4) * 6)


def test_partners_reduce_their_operands_in_the_same_order():
    """min(0.0, -0.0) may be either; ranks that exchange partial results must get the same one."""

    def on_rank():
        transport = world().transport
        buffer = np.full(100, -0.0 if transport.rank else 0.0, "f4")
        Executor(SWAP, transport, buffer, "min").run(watch_of(transport))
        return np.signbit(buffer).tolist()

    first, second = run_ranks(2, on_rank)
    assert first == second


def test_a_failed_rank_ends_the_run_of_the_others():
    def on_rank():
        if world().transport.rank == 2:
            raise KeyError("no gradient")
        return all_reduce(RING, 10)

    with pytest.raises(KeyError, match="no gradient") as caught:
        run_ranks(4, on_rank)
    failed = [rank for rank, error in caught.value.rank_errors.items() if isinstance(error, RankFailedError)]
    assert sorted(failed) == [0, 1, 3]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_sixteen_bit_floats_are_never_added_as_such(dtype, size):
    with pytest.raises(UnsupportedDtypeError, match="16 values are not reduced as such.*float32"):
        Executor(RING, RecordingTransport(0, size), np.zeros(3, dtype))


@pytest.mark.parametrize("dtype, op", [("O", "sum"), ("S3", "max"), ("?", "sum"), ("c8", "min")])
def test_dtypes_without_the_reduction_are_refused(dtype, op):
    with pytest.raises(UnsupportedDtypeError, match="no reduction"):
        Executor(RING, RecordingTransport(0, 2), np.zeros(3, dtype), op)


def test_buffers_with_gaps_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        Executor(RING, RecordingTransport(0, 2), np.zeros((4, 4))[:, 1])


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 2, 5), (1, 2, 5), (0, 6, 5), (0, 2, 4)])
def test_bounds_must_fit_the_buffer_and_the_schedule(bounds):
    with pytest.raises(ValueError, match="expected 3 ascending bounds from 0 to 5"):
        Executor(RING, RecordingTransport(0, 2), np.zeros(5), bounds=bounds)


# -- device memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ALGORITHMS, ids="-".join)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_device_arrays_stay_on_the_device(key, op):
    """The pretended device refuses whatever would read or write it from the host, and the transport takes no other."""
    schedule, size, length = ALGORITHMS[key], 5, 23

    def on_rank():
        transport = world().transport
        buffer = on_device(contribution(op, "f8", length, transport.rank, size))
        Executor(schedule, transport, buffer, op, segment_bytes=40).run(watch_of(transport))
        assert isinstance(buffer, DeviceArray)
        return as_host(buffer)

    with pretended_device():
        results = run_ranks(size, on_rank, memory=DEVICE_ONLY)
    before = [contribution(op, "f8", length, rank, size) for rank in range(size)]
    for rank, result in enumerate(results):
        for where, values in expected(schedule, before, reduced(op, "f8", length, size), rank, 0):
            np.testing.assert_array_equal(result[where], values)


def test_a_transport_for_host_memory_refuses_device_arrays_and_says_what_to_do():
    with pretended_device(), pytest.raises(UnsupportedDtypeError, match="recording transport moves host.*as_host"):
        Executor(RING, RecordingTransport(0, 2), on_device(np.zeros(3)))
