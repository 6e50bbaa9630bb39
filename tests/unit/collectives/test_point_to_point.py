"""Send and receive on loopback ranks, whose sends end only when they are received."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.arrays import as_host, is_device
from mpidist.errors import (
    CollectiveMismatchError,
    RankFailedError,
    RemoteReplicaError,
    TransportTimeoutError,
    UnsupportedDtypeError,
)
from mpidist.testing import Faults, run_ranks
from mpidist.testing.device import on_device, pretended_device
from mpidist.world import world_communicator

DTYPES = ["f2", ml_dtypes.bfloat16, "f4", "i1", "?", "c16", ">f8", "U3", "M8[s]", "f4,i8"]
#: Records whose description does not fit into the head of a message.
LONG = numpy.dtype([(f"a field with a long name, number {number}", "i4") for number in range(100)])

places = pytest.mark.parametrize("hosts", [["a"] * 3, list("aab")], ids=["one node", "nodes"])


@places
@given(shape=st.sampled_from([(), (0,), (3,), (2, 0), (500,), (40, 100)]), dtype=st.sampled_from([*DTYPES, LONG]))
def test_an_array_comes_as_it_was_sent(hosts, shape, dtype):
    count = int(numpy.prod(shape))
    values = numpy.arange(count * numpy.dtype(dtype).itemsize) % 2
    array = values.astype("u1").view(dtype).reshape(shape)

    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            communicator.send(array, 2)
        elif communicator.rank == 2:
            got = communicator.receive(0)
            got.flags.writeable = True  # it is the caller's own
            return got
        return None

    found = run_ranks(3, on_rank, hosts=hosts)[2]
    assert found.dtype == array.dtype and found.shape == shape and found.tobytes() == array.tobytes()


@places
def test_arrays_with_gaps_are_sent_as_they_are(hosts):
    base = numpy.arange(6000.0).reshape(60, 100)

    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            for each in (base.T, base[::3, ::-2], base[5]):
                communicator.send(each, 1)
            return True
        if communicator.rank == 1:
            return all((communicator.receive(0) == each).all() for each in (base.T, base[::3, ::-2], base[5]))
        return True

    assert run_ranks(3, on_rank, hosts=hosts) == [True] * 3


@places
def test_a_ring_in_which_all_start_to_send_first(hosts):
    def on_rank():
        communicator = world_communicator()
        rank, size = communicator.rank, communicator.size
        send = communicator.send_init(numpy.zeros(5000), (rank + 1) % size)
        receive = communicator.receive_init(numpy.zeros(5000), (rank - 1) % size)
        found = []
        for step in range(4):
            sending = send.start(numpy.full(5000, 10.0 * step + rank))
            found.append({*receive().tolist()})
            assert sending.wait() is None and sending.wait() is None
        return found

    expected = [[{10.0 * step + (rank - 1) % 3} for step in range(4)] for rank in range(3)]
    assert run_ranks(3, on_rank, hosts=hosts) == expected


@places
def test_transfers_move_on_while_somebody_asks_whether_they_are_ready(hosts):
    def on_rank():
        communicator = world_communicator()
        rank, size = communicator.rank, communicator.size
        lines = communicator.point_to_point
        transfers = [
            lines.start_send(numpy.full(5000, float(rank)), (rank + 1) % size),
            lines.start_receive((rank - 1) % size),
        ]
        deadline = time.monotonic() + 60
        while not all(each.is_ready() for each in transfers):
            assert time.monotonic() < deadline
        return {*transfers[1].wait().tolist()}

    assert run_ranks(3, on_rank, hosts=hosts) == [{2.0}, {0.0}, {1.0}]


@places
def test_who_asks_whether_a_transfer_is_ready_is_told_of_the_deadline_and_of_a_rank_that_failed(hosts):
    def on_rank(fails):
        communicator = world_communicator()
        if communicator.rank == 0:
            receiving = communicator.point_to_point.start_receive(1, timeout_seconds=0 if fails else 0.2)
            try:
                while not receiving.is_ready():
                    pass
            finally:
                asked.set()
        elif fails:
            raise ValueError("no data")
        else:
            asked.wait(60)

    asked = threading.Event()
    with pytest.raises(ValueError, match="no data"):
        run_ranks(3, on_rank, True, hosts=hosts)
    asked.clear()
    with pytest.raises(TransportTimeoutError, match=r"receive.*rank 1"):
        run_ranks(3, on_rank, False, hosts=hosts)


def test_who_asks_hears_of_a_step_that_raised_on_the_other_rank():
    def on_rank():
        communicator = world_communicator()

        def step():
            if communicator.rank == 1:
                raise KeyError("lost")
            receiving = communicator.point_to_point.start_receive(1)
            while not receiving.is_ready():
                pass

        with pytest.raises(KeyError if communicator.rank == 1 else RemoteReplicaError):
            mpidist.MirroredStrategy().run(step)
        return float(communicator.all_reduce_list([numpy.ones(1)])[0][0])

    assert run_ranks(2, on_rank) == [2.0, 2.0]


@places
def test_receives_are_served_in_the_order_in_which_they_were_started(hosts):
    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            sends = [communicator.point_to_point.start_send(numpy.full(count, count), 1) for count in (3, 4000, 5)]
            for each in reversed(sends):
                each.wait()
        elif communicator.rank == 1:
            receives = [communicator.point_to_point.start_receive(0) for _ in range(3)]
            return [len(receives[at].wait()) for at in (2, 0, 1)] + [len(receives[2].wait())]
        return None

    assert run_ranks(3, on_rank, hosts=hosts)[1] == [5, 3, 4000, 5]


@places
def test_what_was_started_moves_on_while_its_rank_waits_in_a_collective(hosts):
    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            sending = communicator.point_to_point.start_send(numpy.arange(3000), 1)
            communicator.barrier()
            sending.wait()
        elif communicator.rank == 1:
            got = communicator.receive(0)
            communicator.barrier()
            return got.sum()
        else:
            communicator.barrier()
        return None

    assert run_ranks(3, on_rank, hosts=hosts)[1] == 3000 * 2999 // 2


def test_collectives_between_a_send_and_its_receive_do_not_mix_with_it():
    def on_rank():
        communicator = world_communicator()
        rank, other = communicator.rank, 1 - communicator.rank
        sending = communicator.point_to_point.start_send(numpy.full(4000, rank), other)
        joined = communicator.all_gather(numpy.full(700, rank))
        communicator.broadcast(numpy.zeros(900), 1)
        got = communicator.receive(other)
        sending.wait()
        return {*joined.tolist()}, {*got.tolist()}

    assert run_ranks(2, on_rank, hosts=["a", "b"]) == [({0, 1}, {1}), ({0, 1}, {0})]


@pytest.mark.parametrize("verb", ["send", "receive", "send_init", "receive_init"])
@pytest.mark.parametrize(
    ("peer", "text"), [(0, "rank 0 of 1 is this rank itself"), (1, "no rank 1 in"), (-1, "no rank -1 in")]
)
def test_a_wrong_peer_is_refused(verb, peer, text):
    communicator = world_communicator()
    with pytest.raises(ValueError, match=text):
        communicator.receive(peer) if verb == "receive" else getattr(communicator, verb)(numpy.ones(2), peer)


def test_objects_and_other_arrays_than_those_bound_are_refused():
    def on_rank():
        communicator = world_communicator()
        with pytest.raises(UnsupportedDtypeError):
            communicator.send(numpy.zeros(2, "O"), 1 - communicator.rank)
        bound = communicator.send_init(numpy.zeros(3, "f4"), 1 - communicator.rank)
        with pytest.raises(ValueError, match=r"bound to float32\[3\], got float64\[3\]; bind another one"):
            bound.start(numpy.zeros(3))

    run_ranks(2, on_rank)


def test_another_array_than_was_expected_is_a_mismatch_on_the_receiver_which_can_go_on():
    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            communicator.send(numpy.zeros((2, 3)), 1)
            communicator.send(numpy.ones(2), 1)
            return None
        with pytest.raises(
            CollectiveMismatchError,
            match=r"rank 1 of 2: receive of float32\[3\] from rank 0 expected .*got float64\[2, 3\]",
        ):
            communicator.receive(0, numpy.zeros(3, "f4"))
        return communicator.receive(0, numpy.zeros(2)).tolist()

    assert run_ranks(2, on_rank)[1] == [1.0, 1.0]


def test_two_ranks_that_both_wait_for_their_sends_are_told_what_to_do():
    def on_rank():
        communicator = world_communicator()
        with pytest.raises(
            TransportTimeoutError, match=r"send of float64\[4000\] to rank \d .*waited .* start\(\) one of the two"
        ):
            communicator.send(numpy.zeros(4000), 1 - communicator.rank, timeout_seconds=0.3)
        with pytest.raises(TransportTimeoutError):
            communicator.barrier()

    run_ranks(2, on_rank)


LONG_ARRAY = numpy.zeros(4000)

#: By rank: whether it sends first, to whom or from whom, and what it then is said to wait in.
CIRCLES = {
    "two send": [("send", 1), ("send", 0)],
    "two receive": [("receive", 1), ("receive", 0)],
    "all send in a ring": [("send", 1), ("send", 2), ("send", 0)],
    "one receives in a ring": [("send", 1), ("receive", 2), ("send", 0)],
    "a third waits for the circle": [("send", 1), ("send", 2), ("send", 1)],
}


@pytest.mark.parametrize("hosts", [["a"] * 3, list("aab")], ids=["one node", "nodes"])
@pytest.mark.parametrize("name", CIRCLES)
def test_ranks_that_wait_for_each_other_are_told_so_long_before_the_deadline(hosts, name):
    circle = CIRCLES[name]

    def on_rank():
        communicator = world_communicator()
        verb, peer = circle[communicator.rank]
        with pytest.raises(TransportTimeoutError) as caught:
            communicator.receive(peer) if verb == "receive" else communicator.send(LONG_ARRAY, peer)
        return str(caught.value)

    size = len(circle)
    waiting = range(1, 3) if "third" in name else range(size)
    for text in run_ranks(size, on_rank, hosts=hosts[:size]):
        assert "wait for each other" in text and "send_init(array, to).start(array)" in text
        for rank in waiting:
            verb, peer = circle[rank]
            what = "receive from" if verb == "receive" else "send of float64[4000] to"
            assert text.count(f"rank {rank} ({hosts[rank]}) waits in {what} rank {peer}") == 1


def test_a_circle_after_messages_that_got_through_and_some_that_were_started():
    def on_rank():
        communicator = world_communicator()
        rank, other = communicator.rank, 1 - communicator.rank
        send = communicator.send_init(LONG_ARRAY, other)
        for _ in range(3):
            sending = send.start(LONG_ARRAY)
            communicator.receive(other)
            sending.wait()
        send.start(LONG_ARRAY)
        if rank:
            communicator.receive(other)
        with pytest.raises(TransportTimeoutError, match="wait for each other"):
            send.start(LONG_ARRAY).wait() if rank else communicator.send(LONG_ARRAY, other)

    run_ranks(2, on_rank)


@places
def test_ranks_that_wait_long_in_a_chain_are_in_no_circle(hosts):
    is_probed = threading.Event()

    def on_rank():
        communicator = world_communicator()
        rank = communicator.rank
        if rank == 2:  # computes until both others are sure to have asked who waits for whom
            while not is_probed.wait(60):
                pass
            communicator.send(LONG_ARRAY, 1)
            return None
        heard = communicator.point_to_point.standoffs
        hear = heard._hear
        heard._hear = lambda *note: (hear(*note), is_probed.set()) if rank == 1 else hear(*note)
        if rank == 0:
            communicator.send(LONG_ARRAY, 1)
            return communicator.receive(1).size
        waiting = communicator.receive(2).size
        communicator.receive(0)
        communicator.send(LONG_ARRAY, 0)
        return waiting

    assert run_ranks(3, on_rank, hosts=hosts)[:2] == [4000, 4000]


def test_a_rank_that_waits_for_one_which_it_serves_is_in_no_circle():
    looks = {0: 0, 1: 0}

    def on_rank():
        communicator = world_communicator()
        rank, other = communicator.rank, 1 - communicator.rank
        standoffs = communicator.point_to_point.standoffs
        found = standoffs.found

        def counted(waited):
            looks[rank] += 1
            return found(waited)

        standoffs.found = counted
        sending = communicator.send_init(LONG_ARRAY, other).start(LONG_ARRAY) if rank == 0 else None
        got = communicator.receive(other).size if rank == 0 else communicator.send(LONG_ARRAY, other)
        if rank == 1:
            got = communicator.receive(other).size
        if sending is not None:
            sending.wait()
        return got

    assert run_ranks(2, on_rank, faults=Faults(delay_seconds=1.0)) == [4000, 4000]
    assert min(looks.values()) > 1  # looks while a message was under way


def test_a_receive_that_nobody_sends_ends_at_its_deadline():
    def on_rank():
        communicator = world_communicator()
        if communicator.rank:
            with pytest.raises(TransportTimeoutError, match=r"receive from rank 0 waited .* for rank 0"):
                communicator.receive(0, timeout_seconds=0.3)
        else:
            time.sleep(1)

    run_ranks(2, on_rank)


@places
def test_a_rank_that_has_left_is_named_and_what_it_sent_before_still_comes(hosts):
    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            communicator.send(numpy.ones(3), 1)
        elif communicator.rank == 1:
            got = communicator.receive(0)
            with pytest.raises(
                RankFailedError, match=r"rank 0 \(a\) left .* while this rank is in receive from rank 0"
            ):
                communicator.receive(0)
            return got.tolist()
        return None

    assert run_ranks(3, on_rank, hosts=hosts)[1] == [1.0] * 3


def test_a_rank_that_fails_is_named():
    def on_rank():
        communicator = world_communicator()
        if communicator.rank == 0:
            raise KeyError("on purpose")
        communicator.receive(0)

    with pytest.raises(KeyError) as caught:
        run_ranks(2, on_rank)
    assert isinstance(caught.value.rank_errors[1], RankFailedError)
    assert "on purpose" in str(caught.value.rank_errors[1])


def test_a_function_that_raises_is_met_in_a_receive_and_all_ranks_go_on():
    def on_rank():
        strategy, communicator = mpidist.MultiWorkerMirroredStrategy(), world_communicator()

        def step():
            if communicator.rank == 0:
                raise KeyError("on purpose")
            if communicator.rank == 1:
                mpidist.get_replica_context().receive(0)
            else:
                communicator.barrier()

        with pytest.raises((KeyError, RemoteReplicaError), match="on purpose"):
            strategy.run(step)
        joined = communicator.all_gather(numpy.array([communicator.rank])).tolist()
        if communicator.rank == 0:
            communicator.send(numpy.full(3, 5), 1)
            return joined
        return joined + (communicator.receive(0).tolist() if communicator.rank == 1 else [])

    assert run_ranks(3, on_rank) == [[0, 1, 2], [0, 1, 2, 5, 5, 5], [0, 1, 2]]


@places
@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("bound", [False, True])
def test_what_was_sent_in_a_step_that_was_given_up_is_never_received(hosts, count, bound):
    def on_rank():
        strategy, communicator = mpidist.MultiWorkerMirroredStrategy(), world_communicator()
        rank = communicator.rank
        send = communicator.send_init(numpy.zeros(count), 0) if rank else None
        receive = communicator.receive_init(numpy.zeros(count), 1) if rank == 0 else None

        def step(number):
            if rank == 0:
                if number % 2 == 0:
                    raise KeyError("before it receives")
                return {*(receive() if bound else communicator.receive(1)).tolist()}
            value = numpy.full(count, float(number))
            if rank == 1:
                sending = send.start(value) if bound else communicator.point_to_point.start_send(value, 0)
                if number % 2:
                    sending.wait()
            if number % 2 == 0:
                communicator.barrier()

        found = []
        for number in range(4):
            try:
                found.append(strategy.run(step, args=(number,)))
            except (KeyError, RemoteReplicaError):
                found.append("given up")
        return found

    nothing = ["given up", None, "given up", None]
    assert run_ranks(3, on_rank, hosts=hosts) == [["given up", {1.0}, "given up", {3.0}], nothing, nothing]


@pytest.mark.parametrize("link", ["", "there is none"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (300, 400)], ids=str)
@pytest.mark.parametrize("hosts", [None, ["a", "b"]], ids=["node", "nodes"])
def test_arrays_in_device_memory_go_by_the_host(link, shape, hosts):
    """Where a message ends up is for the receiver to say."""

    def on_rank():
        ranks = world_communicator()
        rank, other = ranks.rank, 1 - ranks.rank
        like, found = on_device(numpy.zeros(shape, "f4")), []
        send, receive = ranks.send_init(like, other), ranks.receive_init(like, other)
        for turn in range(3):
            values = numpy.full(shape, rank + 10 * turn, "f4")
            given, expected = on_device(values), numpy.full(shape, other + 10 * turn, "f4")
            sends = [
                ranks.point_to_point.start_send(given, other),
                ranks.point_to_point.start_send(given, other),
                send.start(given),
                send.start(values),
            ]
            given[...] = -1  # it has been copied
            results = [ranks.receive(other, like=like), ranks.receive(other), receive()]
            transfer = receive.start()
            results += [transfer.wait(), transfer.wait()]
            assert results[3] is results[4]
            for each in sends:
                each.wait()
            found += [is_device(each) for each in results]
            for each in results:
                numpy.testing.assert_array_equal(as_host(each), expected)
        return found

    with pretended_device(link):
        assert run_ranks(2, on_rank, hosts=hosts) == [[True, False, True, True, True] * 3] * 2


def test_another_array_than_the_expected_one_of_a_device_is_an_error():
    def on_rank():
        ranks = world_communicator()
        if ranks.rank == 0:
            ranks.send(on_device(numpy.ones(3)), 1)
        else:
            with pytest.raises(CollectiveMismatchError, match=r"expected float64\[4\], got float64\[3\]"):
                ranks.receive(0, like=on_device(numpy.ones(4)))

    with pretended_device(""):
        run_ranks(2, on_rank)
