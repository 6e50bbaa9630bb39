"""Collectives of one array on loopback ranks: closed forms, through shared memory and over messages, short and long.

Loopback ranks have call slots of 1 KiB and places of 4 KiB, so that arrays of some thousand elements fill them often.
"""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.exchange import node_exchange
from mpidist.collectives.exchange.call_slots import CallSlots
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError, UnsupportedDtypeError
from mpidist.testing import run_ranks
from mpidist.transports import world
from mpidist.world import world_communicator

#: On one node they go through shared memory, on several by messages.
PLACES = {"one node": lambda size: ["a"] * size, "nodes": lambda size: list("aabcde"[:size])}
DTYPES = ["f2", ml_dtypes.bfloat16, "f4", "f8", "i1", "u2", "i8", "?", "c8", "c16", ">f8", "U3", "S5", "M8[s]", "f4,i8"]

places = pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES)


def _full(shape, rank, dtype):
    """Return an array that tells its rank and its elements, in any dtype."""
    count = int(numpy.prod(shape))
    values = (numpy.arange(count) * 3 + 7 * rank) % 100
    dtype = numpy.dtype(dtype)
    if dtype.names:
        found = numpy.zeros(count, dtype)
        for name in dtype.names:
            found[name] = values
        return found.reshape(shape)
    return (values % 2 if dtype.kind == "b" else values).astype(dtype).reshape(shape)


def _same(first, second):
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


# -- all_gather and gather --------------------------------------------------------------------------------------------

lengths = st.lists(st.sampled_from([0, 1, 2, 30, 700]), min_size=1, max_size=4)


@places
@pytest.mark.parametrize("axis", [0, 1, -1])
@given(lengths=lengths, dtype=st.sampled_from(DTYPES))
def test_all_gather_joins_uneven_arrays(hosts, axis, lengths, dtype):
    def part(rank):
        shape = [2, 3]
        shape[axis] = lengths[rank]
        return _full(shape, rank, dtype)

    def on_rank():
        communicator = world_communicator()
        given = part(communicator.rank)
        before = given.copy()
        first, second = (communicator.all_gather(given, axis) for _ in range(2))
        assert _same(given, before) and _same(first, second)
        second.view("u1")[...] = 0  # the caller's own
        return first

    parts = [part(rank) for rank in range(len(lengths))]
    expected = numpy.concatenate(parts, axis=axis).astype(dtype)
    for found in run_ranks(len(lengths), on_rank, hosts=hosts(len(lengths))):
        assert _same(found, expected)


@places
@pytest.mark.parametrize("verb", ["all_gather", "gather"])
def test_an_error_for_text_and_numbers_names_the_call_that_was_made(hosts, verb):
    def on_rank():
        communicator = world_communicator()
        getattr(communicator, verb)(numpy.array([["a"], [1.0]][communicator.rank]))

    with pytest.raises(CollectiveMismatchError, match=verb) as raised:
        run_ranks(2, on_rank, hosts=hosts(2))
    assert f"rank 0 called width of text for {verb}" in str(raised.value)
    assert "all_reduce" not in str(raised.value) and set(raised.value.rank_errors) == {0, 1}


@places
@given(lengths=lengths, data=st.data())
def test_gather_joins_them_on_the_root_only(hosts, lengths, data):
    root = data.draw(st.integers(0, len(lengths) - 1))

    def on_rank():
        communicator = world_communicator()
        found = communicator.gather(_full((lengths[communicator.rank], 2), communicator.rank, "f4"), root)
        transposed = communicator.gather(_full((2, lengths[communicator.rank]), communicator.rank, "f4"), root, -1)
        return found, transposed

    results = run_ranks(len(lengths), on_rank, hosts=hosts(len(lengths)))
    for at, axis in ((0, 0), (1, 1)):
        shapes = [(length, 2) if axis == 0 else (2, length) for length in lengths]
        expected = numpy.concatenate([_full(shape, rank, "f4") for rank, shape in enumerate(shapes)], axis=axis)
        assert _same(results[root][at], expected)
        assert [each[at] for rank, each in enumerate(results) if rank != root] == [None] * (len(lengths) - 1)


@places
def test_arrays_with_gaps_and_transposed_ones_are_gathered_as_they_are(hosts):
    def on_rank():
        communicator = world_communicator()
        base = numpy.arange(4000.0).reshape(40, 100) + communicator.rank
        return [communicator.all_gather(each) for each in (base[::2, ::3], base.T, base[:3, ::-1])]

    bases = [numpy.arange(4000.0).reshape(40, 100) + rank for rank in range(3)]
    expected = [
        numpy.concatenate([each(base) for base in bases])
        for each in (lambda base: base[::2, ::3], lambda base: base.T, lambda base: base[:3, ::-1])
    ]
    for found in run_ranks(3, on_rank, hosts=hosts(3)):
        assert all(map(_same, found, expected))


@places
def test_lengths_may_change_from_call_to_call_between_short_and_long(hosts):
    def on_rank():
        communicator = world_communicator()
        sums = []
        for step in range(12):
            mine = (step * 37 * (communicator.rank + 1)) % 900
            sums.append(communicator.all_gather(numpy.full(mine, communicator.rank + 1, "i8")).tolist())
        return sums

    expected = [[rank + 1 for rank in range(3) for _ in range((step * 37 * (rank + 1)) % 900)] for step in range(12)]
    assert run_ranks(3, on_rank, hosts=hosts(3)) == [expected] * 3


def test_results_that_are_held_do_not_change_and_dropped_ones_are_used_again():
    count = 40_000  # of 8 bytes: long enough for memory to be kept

    def on_rank():
        communicator = world_communicator()
        kept = [communicator.all_gather(numpy.full(count, float(step))) for step in range(4)]
        right = all((each == step).all() for step, each in enumerate(kept))
        address = kept.pop().ctypes.data
        view = communicator.all_gather(numpy.full(count, 9.0))[5:7]
        again = view.ctypes.data - 40
        other = communicator.all_gather(numpy.full(count, 8.0))
        return right and address == again and (view == 9.0).all() and (other == 8.0).all()

    assert run_ranks(2, on_rank) == [True, True]


def test_a_scalar_and_a_wrong_axis_are_refused_before_any_communication():
    communicator = world_communicator()
    calls = communicator.control.call
    for fn, name in ((communicator.all_gather, "all_gather"), (communicator.gather, "gather")):
        with pytest.raises(ValueError, match=f"{name} needs an array of at least one dimension"):
            fn(numpy.array(1.0))
        with pytest.raises(ValueError, match="axis 2 is out of range for an array of 2 dimensions"):
            fn(numpy.ones((2, 2)), axis=2)
    with pytest.raises(ValueError, match="gather: root 1 is no rank of a world of 1"):
        communicator.gather(numpy.ones(2), 1)
    assert communicator.control.call == calls


# -- reduce_scatter ---------------------------------------------------------------------------------------------------

_OPS = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.sum(0) / len(stack),
    "min": lambda stack: stack.min(0),
    "max": lambda stack: stack.max(0),
    "prod": lambda stack: stack.prod(0),
}


@places
@pytest.mark.parametrize("op", _OPS)
@given(
    size=st.integers(1, 4), rows=st.sampled_from([0, 1, 2, 5, 33, 700]), dtype=st.sampled_from(["f2", "f4", "f8", "i4"])
)
def test_reduce_scatter_gives_each_rank_its_rows(hosts, op, size, rows, dtype):
    def mine(rank):  # small whole numbers: sums and products are exact in every dtype
        return ((numpy.arange(rows * 3) + rank) % 3 + 1).reshape(rows, 3).astype(dtype)

    def on_rank():
        communicator = world_communicator()
        given = mine(communicator.rank)
        before = given.copy()
        found = communicator.reduce_scatter(given, op)
        assert _same(given, before)
        return found

    whole = _OPS[op](numpy.stack([mine(rank).astype("f8") for rank in range(size)]))
    given = numpy.dtype("f8") if op == "mean" and dtype == "i4" else numpy.dtype(dtype)
    for rank, found in enumerate(run_ranks(size, on_rank, hosts=hosts(size))):
        assert found.dtype == given
        expected = whole[rank * rows // size : (rank + 1) * rows // size]
        numpy.testing.assert_allclose(found.astype("f8"), expected, rtol=1e-3 if dtype == "f2" else 1e-6)


def test_reduce_scatter_through_memory_adds_in_rank_order_whatever_the_length():
    def on_rank():
        communicator = world_communicator()
        values = numpy.random.default_rng(communicator.rank).normal(size=4000).astype("f4")
        long = communicator.reduce_scatter(values)
        short = [
            communicator.all_reduce_list([values[other * 1000 + at : other * 1000 + at + 50]])[0]
            for other in range(4)
            for at in range(0, 1000, 50)
        ]
        own = short[20 * communicator.rank : 20 * (communicator.rank + 1)]
        return long.tobytes() == numpy.concatenate(own).tobytes()

    assert run_ranks(4, on_rank) == [True] * 4


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
@places
def test_reduce_scatter_of_16_bit_floats_rounds_once(hosts, dtype):
    half_unit = float(ml_dtypes.finfo(dtype).eps) / 2
    expected = numpy.array(1 + 2 * half_unit, "f4").astype(dtype)

    def on_rank():
        communicator = world_communicator()
        return communicator.reduce_scatter(numpy.full(3000, half_unit if communicator.rank else 1.0, dtype))

    for found in run_ranks(3, on_rank, hosts=hosts(3)):
        assert found.dtype == numpy.dtype(dtype) and (found == expected).all() and len(found) == 1000


def test_what_has_no_reduction_is_refused_before_any_communication():
    communicator = world_communicator()
    calls = communicator.control.call
    for dtype, op in (("O", "sum"), ("U3", "max"), ("?", "sum"), ("c8", "min")):
        with pytest.raises(UnsupportedDtypeError):
            communicator.reduce_scatter(numpy.zeros(2, dtype), op)
    with pytest.raises(ValueError, match="'xor' is not a reduction"):
        communicator.reduce_scatter(numpy.zeros(2), "xor")
    with pytest.raises(ValueError, match="reduce_scatter needs an array of at least one dimension"):
        communicator.reduce_scatter(numpy.zeros(()))
    assert communicator.control.call == calls


# -- broadcast --------------------------------------------------------------------------------------------------------


@places
@given(
    size=st.integers(1, 4),
    shape=st.sampled_from([(), (0,), (3,), (2, 0, 3), (40, 100)]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_broadcast_from_every_root(hosts, size, shape, dtype, data):
    root = data.draw(st.integers(0, size - 1))

    def on_rank():
        communicator = world_communicator()
        given = _full(shape, communicator.rank, dtype)
        before = given.copy()
        copy = communicator.broadcast_copy(given, root)
        assert _same(given, before) and not numpy.shares_memory(copy, given)
        communicator.broadcast(given, root)
        return copy, given

    expected = _full(shape, root, dtype)
    for copy, in_place in run_ranks(size, on_rank, hosts=hosts(size)):
        assert _same(copy, expected) and _same(in_place, expected)


@places
def test_a_root_may_broadcast_a_view_and_a_read_only_array(hosts):
    def on_rank():
        communicator = world_communicator()
        base = numpy.arange(2000.0).reshape(20, 100)[:, ::2].T * (communicator.rank + 1)
        base.flags.writeable = False
        return communicator.broadcast_copy(base, 1)

    expected = numpy.arange(2000.0).reshape(20, 100)[:, ::2].T * 2
    for found in run_ranks(2, on_rank, hosts=hosts(2)):
        numpy.testing.assert_array_equal(found, expected)


@places
def test_who_cannot_be_written_to_is_refused_in_place_without_a_call(hosts):
    def on_rank():
        communicator = world_communicator()
        array = numpy.zeros(3)
        array.flags.writeable = communicator.rank == 0
        calls = communicator.control.call
        if communicator.rank:
            with pytest.raises(ValueError, match="rank 1 of 2: broadcast writes its result in place, got a read-only"):
                communicator.broadcast(array)
            assert communicator.control.call == calls

    run_ranks(2, on_rank, hosts=hosts(2))


# -- interrupted ------------------------------------------------------------------------------------------------------


def test_what_a_signal_handler_has_broken_off_before_a_call_is_not_in_the_next_one(monkeypatch):
    view = CallSlots.view

    def interrupted(slots, rank, start, shape, *others):
        if shape == (3,):
            raise TimeoutError
        return view(slots, rank, start, shape, *others)

    monkeypatch.setattr(CallSlots, "view", interrupted)

    def on_rank():
        communicator = world_communicator()
        gather, own = communicator.all_gather_init(numpy.zeros(1)), numpy.full(1, 1.0 + communicator.rank)
        gather(own)
        with pytest.raises(TimeoutError):
            gather(numpy.zeros(3))
        return gather(own).tolist()

    assert run_ranks(2, on_rank) == [[1.0, 2.0]] * 2


# -- all_to_all -------------------------------------------------------------------------------------------------------


@st.composite
def tables(draw):
    size = draw(st.integers(1, 4))
    rows = st.sampled_from([0, 1, 3, 20, 300])
    return draw(st.lists(st.lists(rows, min_size=size, max_size=size), min_size=size, max_size=size))


@pytest.fixture(scope="module", params=[node_exchange._SENT_BYTES, 2048], ids=["in memory", "long ones sent"])
def _sent_bytes(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_exchange, "_SENT_BYTES", request.param)
        yield


@places
@pytest.mark.usefixtures("_sent_bytes")
@given(table=tables(), dtype=st.sampled_from(DTYPES), row=st.sampled_from([(), (2,), (0,)]))
def test_all_to_all_brings_each_row_to_its_rank(hosts, table, dtype, row):
    size = len(table)

    def rows_of(giver, getter):
        return _full((table[giver][getter], *row), giver + 10 * getter, dtype)

    def on_rank():
        communicator = world_communicator()
        rank = communicator.rank
        given = numpy.concatenate([rows_of(rank, other) for other in range(size)]).astype(dtype)
        found, splits = communicator.all_to_all(given, table[rank])
        again, _ = communicator.all_to_all(given, numpy.array(table[rank]))
        assert _same(found, again) and not numpy.shares_memory(found, again)
        return found, splits

    for rank, (found, splits) in enumerate(run_ranks(size, on_rank, hosts=hosts(size))):
        assert splits == [table[giver][rank] for giver in range(size)]
        assert _same(found, numpy.concatenate([rows_of(giver, rank) for giver in range(size)]).astype(dtype))


@places
def test_all_to_all_deals_out_evenly_by_default(hosts):
    def on_rank():
        communicator = world_communicator()
        found, splits = communicator.all_to_all(numpy.arange(6) + 10 * communicator.rank)
        return found.tolist(), splits

    expected = [([0, 1, 10, 11, 20, 21], [2] * 3), ([2, 3, 12, 13, 22, 23], [2] * 3), ([4, 5, 14, 15, 24, 25], [2] * 3)]
    assert run_ranks(3, on_rank, hosts=hosts(3)) == expected


@pytest.mark.parametrize(
    ("rows", "splits", "text"),
    [
        (3, None, "all_to_all of 3 rows on 2 ranks: they cannot be dealt out evenly; pass splits"),
        (3, [4, -1], r"splits \[4, -1\]; the number of rows for a rank cannot be negative"),
        (3, [1, 1], r"splits of 2 rows, \[1, 1\], for an array of 3 rows"),
        (3, [3], "on 2 ranks got 1 splits"),
        (3, [1, 1, 1], "on 2 ranks got 3 splits"),
    ],
)
def test_wrong_splits_are_refused_before_any_communication(rows, splits, text):
    def on_rank():
        communicator = world_communicator()
        calls = communicator.control.call
        with pytest.raises(ValueError, match=text):
            communicator.all_to_all(numpy.ones(rows), splits)
        with pytest.raises(TypeError, match="each of the splits must be a whole number, got 1.5"):
            communicator.all_to_all(numpy.ones(rows), [1.5, 1.5])
        with pytest.raises(TypeError, match="each of the splits must be a whole number, got True"):
            communicator.all_to_all_init(numpy.ones(rows), [True, 2])
        with pytest.raises(TypeError, match=r"splits must be a sequence, got 3 \(int\)"):
            communicator.all_to_all(numpy.ones(rows), 3)
        assert communicator.control.call == calls
        return communicator.all_to_all(numpy.ones(2))[1]

    assert run_ranks(2, on_rank) == [[1, 1]] * 2


# -- what all have in common ------------------------------------------------------------------------------------------


@places
def test_collectives_of_all_kinds_and_lengths_may_follow_each_other(hosts):
    """Call slots, places and turns are those of the all-reduce, which comes in between in all its forms."""

    def on_rank():
        communicator = world_communicator()
        rank, size = communicator.rank, communicator.size
        wrong = []
        for step in range(40):
            count = (5, 90, 1500, 400, 3000)[step % 5]
            root = step % size
            joined = communicator.all_gather(numpy.full(count + rank, step + rank, "f4"))
            expected = numpy.concatenate([numpy.full(count + each, step + each, "f4") for each in range(size)])
            wrong.append(not _same(joined, expected))
            total = numpy.full(count, rank + 1.0)
            communicator.all_reduce(total)
            wrong.append(not (total == size * (size + 1) / 2).all())
            shared = numpy.full(count, float(rank + step))
            communicator.broadcast(shared, root)
            wrong.append(not (shared == root + step).all())
            share = communicator.reduce_scatter(numpy.arange(float(count)) * (rank + 1))
            rows = numpy.arange(float(count))[rank * count // size : (rank + 1) * count // size]
            wrong.append(not (share == rows * size * (size + 1) / 2).all())
            (short,) = communicator.all_reduce_list([numpy.full(7, rank + step)])
            wrong.append(not (short == size * step + size * (size - 1) // 2).all())
            rows, splits = communicator.all_to_all(numpy.repeat(numpy.arange(size), count), [count] * size)
            wrong.append(not ((rows == rank).all() and splits == [count] * size))
            found = communicator.gather(numpy.full((1, count), rank), root)
            wrong.append(rank == root and not (found == numpy.arange(size)[:, None]).all())
        return sum(wrong)

    assert run_ranks(3, on_rank, hosts=hosts(3)) == [0, 0, 0]


def test_a_call_without_splits_of_its_own_deals_as_the_all_to_all_was_bound_to():
    """Rank 1 gets all rows; a call whose splits are None deals them evenly, and changes nothing for the next one."""

    def on_rank():
        communicator = world_communicator()
        bound = communicator.all_to_all_init(numpy.zeros(2), [0, 2])
        rows = numpy.arange(2.0) + 10 * communicator.rank
        return [bound(each)[0].tolist() for each in ((rows, None), rows, (rows, None), (rows, None), rows)]

    even = [[0.0, 10.0], [1.0, 11.0]]
    bound_to = [[], [0.0, 1.0, 10.0, 11.0]]
    expected = [[even[r], bound_to[r], even[r], even[r], bound_to[r]] for r in range(2)]
    assert run_ranks(2, on_rank) == expected
    assert run_ranks(2, on_rank, hosts=["a", "b"]) == expected


def test_bound_ones_are_started_and_waited_for_in_any_order():
    def on_rank():
        communicator = world_communicator()
        rank = communicator.rank
        gather = communicator.all_gather_init(numpy.zeros((1, 2)))
        scatter = communicator.reduce_scatter_init(numpy.zeros(4), "max")
        share = communicator.broadcast_init(numpy.zeros(3), 1)
        trade = communicator.all_to_all_init(numpy.zeros(1))
        to_root = communicator.gather_init(numpy.zeros(1), 1)
        found = []
        for step in range(3):
            handles = [
                gather.start(numpy.full((rank + 1, 2), float(step + rank))),
                scatter.start(numpy.arange(4.0) + rank),
                share.start(numpy.full(3, float(rank + step))),
                trade.start((numpy.full(3, float(rank)), [1, 2] if rank else [2, 1])),
                to_root.start(numpy.full(1, float(rank))),
            ]
            last = handles[4].wait()
            found.append([handles[at].wait() for at in (2, 0, 1)])
            rows, splits = handles[3].wait()
            assert (None if last is None else last.tolist()) == (None if rank == 0 else [0.0, 1.0])
            assert (
                splits == ([2, 1] if rank == 0 else [1, 2]) and rows.tolist() == [0.0] * splits[0] + [1.0] * splits[1]
            )
            assert found[-1][0].tolist() == [1.0 + step] * 3
            assert found[-1][1].tolist() == [[step] * 2, [step + 1] * 2, [step + 1] * 2]
            assert found[-1][2].tolist() == [[1.0, 2.0], [3.0, 4.0]][rank]
        return True

    assert run_ranks(2, on_rank) == [True, True]


def test_a_bound_one_refuses_other_arrays_without_a_call():
    def on_rank():
        communicator = world_communicator()
        calls = communicator.control.call
        bound = communicator.all_gather_init(numpy.zeros((2, 3), "f4"))
        for array, text in (
            (numpy.zeros((2, 4), "f4"), r"bound to float32\[any, 3\] \(ndarray\), got float32\[2, 4\]"),
            (numpy.zeros((2, 3)), r"got float64\[2, 3\]"),
            (numpy.zeros(3, "f4"), r"got float32\[3\]"),
            ([1.0], r"got \[\] \(list\)"),
        ):
            for call in (bound, bound.start):
                with pytest.raises(ValueError, match=text):
                    call(array)
        assert communicator.control.call == calls
        return len(bound(numpy.zeros((5, 3), "f4")))

    assert run_ranks(2, on_rank) == [10, 10]


@places
@pytest.mark.parametrize(
    ("name", "call", "text"),
    [
        (
            "all_gather",
            lambda c: c.all_gather(numpy.ones((2, 3 + c.rank))),
            r"all_gather\(axis=0\).*\(-1, 4\).*\(-1, 3\)",
        ),
        ("gather", lambda c: c.gather(numpy.ones(2), c.rank), r"rank 1 called gather\(root=1, axis=0\).*rank 0 called"),
        ("root", lambda c: c.broadcast(numpy.ones(2), c.rank), r"rank 1 called broadcast\(root=1\).*rank 0 called"),
        (
            "broadcast",
            lambda c: c.broadcast(numpy.ones(2 + c.rank)),
            r"rank 1 passed float64 \(3,\), rank 0 passed float64 \(2,\)",
        ),
        ("scatter", lambda c: c.reduce_scatter(numpy.ones(2), "max" if c.rank else "min"), r"reduce_scatter\(max\)"),
        ("dtype", lambda c: c.all_to_all(numpy.ones(2, "f4" if c.rank else "f8")), "float32.*float64"),
        ("kind", lambda c: c.barrier() if c.rank else c.all_to_all(numpy.ones(2)), "rank 1 called barrier"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_ranks_that_differ_are_named_and_can_go_on(name, call, text, hosts):
    def on_rank():
        communicator = world_communicator()
        with pytest.raises(CollectiveMismatchError, match=text):
            call(communicator)
        return communicator.all_gather(numpy.array([communicator.rank])).tolist()

    assert run_ranks(2, on_rank, hosts=hosts(2)) == [[0, 1]] * 2


@pytest.mark.parametrize("op", ["all_gather", "gather", "reduce_scatter", "broadcast", "all_to_all"])
@pytest.mark.parametrize("dtype", ["O", [("a", "O")]])
def test_objects_are_refused_before_any_communication(op, dtype):
    communicator = world_communicator()
    calls = communicator.control.call
    with pytest.raises(UnsupportedDtypeError):
        getattr(communicator, op)(numpy.zeros(2, dtype))
    with pytest.raises(TypeError):
        getattr(communicator, op)([1, 2])
    assert communicator.control.call == calls


def test_a_rank_whose_function_raises_is_met_in_every_collective():
    import mpidist

    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        communicator = world_communicator()

        def step(name):
            if communicator.rank:
                raise KeyError(name)
            getattr(communicator, name)(numpy.ones(2))

        for name in ("all_gather", "gather", "reduce_scatter", "broadcast", "all_to_all"):
            with pytest.raises((KeyError, RemoteReplicaError)):
                strategy.run(step, args=(name,))
        return communicator.all_gather(numpy.array([communicator.rank])).tolist()

    assert run_ranks(2, on_rank) == [[0, 1]] * 2


def test_parts_of_a_world_have_collectives_of_their_own():
    from mpidist.collectives.communicator import Communicator

    def on_rank():
        whole = world()
        part = Communicator(whole.part(whole.transport.rank % 2))
        joined = part.all_gather(numpy.full(300, whole.transport.rank))
        rows, _ = part.all_to_all(numpy.full(400, whole.transport.rank))
        return sorted({*joined.tolist()}), sorted({*rows.tolist()})

    assert run_ranks(4, on_rank) == [([0, 2], [0, 2]), ([1, 3], [1, 3])] * 2


@places
def test_splits_are_read_once(hosts):
    def on_rank():
        ranks = world_communicator()
        return ranks.all_to_all(numpy.full(3, ranks.rank), iter([1, 2]))[1]

    assert run_ranks(2, on_rank, hosts=hosts(3)[1:]) == [[1, 1], [2, 2]]


def test_attributes_of_a_bound_exchange_are_few_enough_to_be_found_fast():
    def on_rank():
        ranks, like = world_communicator(), numpy.ones(4)
        bound = [ranks.all_gather_init(like), ranks.broadcast_init(like), ranks.all_to_all_init(like)]
        for each in bound:
            each(like)
        return max(len(vars(each)) for each in bound)

    assert max(run_ranks(2, on_rank)) <= 30  # CPython 3.11 looks up each of more, a tenth of a short call


def test_groups_of_ranks_have_them_by_messages():
    from mpidist.collectives.group import GroupCommunicator

    def on_rank():
        whole = world_communicator()
        group = GroupCommunicator(whole, [whole.rank % 2, whole.rank % 2 + 2])
        rank, own = whole.rank, group.rank
        rows, splits = group.all_to_all(numpy.full(2, rank))
        sending = group.send_init(numpy.zeros(3000), 1 - own).start(numpy.full(3000, float(rank)))
        got = group.receive(1 - own)
        sending.wait()
        joined = group.gather(numpy.full(own + 1, rank), 1)
        return (
            rows.tolist(),
            splits,
            {*got.tolist()},
            group.broadcast_copy(numpy.full(3, rank), 1).tolist(),
            None if joined is None else joined.tolist(),
            group.reduce_scatter(numpy.arange(2) + rank, "max").tolist(),
        )

    expected = [
        (
            [rank % 2, rank % 2 + 2],
            [1, 1],
            {float((rank + 2) % 4)},
            [rank % 2 + 2] * 3,
            [rank % 2, rank, rank] if rank > 1 else None,
            [rank % 2 + 2 + (rank > 1)],
        )
        for rank in range(4)
    ]
    assert run_ranks(4, on_rank) == expected
