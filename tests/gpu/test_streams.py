"""Calls are ordered on the current stream: they wait for what makes their arrays, and what reads results for them.

What makes an array takes the card a while, and the host does not wait for it: a call that reads too soon reads the
values before.
"""

from __future__ import annotations

import time

import numpy
import pytest

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.collectives.ways.device_ways import DeviceWays
from mpidist.device.memory import memory_of
from mpidist.world import world_communicator
from tests.gpu.library import (
    check_on_all_ranks,
    in_replica,
    place,
    problem_of,
    problems_of,
    slowly,
    strategy,
    stream,
    two_streams,
)

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

COUNTS = [1, 5000, 3_000_000]


@pytest.fixture(params=["default", "other"])
def current(request, xp):
    """The default stream, or another one."""
    if request.param == "default":
        yield
        return
    with stream(xp):
        yield


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("is_list", [False, True])
def test_an_all_reduce_waits_for_its_array_and_is_waited_for(xp, current, is_list, count):
    rank, size = place()
    total, problems = size * (size + 1) / 2, []
    array = xp.zeros(count, "f4")
    for turn in range(3):
        slowly(xp, array, rank + 1 + turn)
        found = in_replica("SUM", [array, array] if is_list else array)
        found = found[1] if is_list else found
        array.fill(-100)  # behind the call
        doubled = found * 2
        found.fill(7)
        problems.append(problem_of(xp, doubled, numpy.full(count, 2 * (total + turn * size), "f4")))
        problems.append(problem_of(xp, found, numpy.full(count, 7, "f4")))
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("count", COUNTS)
def test_results_of_one_call_are_the_arrays_of_the_next(xp, current, count):
    """The host never waits in between."""
    rank, size = place()
    array = xp.zeros(count, "f8")
    slowly(xp, array, rank + 1.0)
    for _ in range(4):
        (array,) = in_replica("MEAN", [array * 2])
        array += rank  # the ranks' arrays differ again
    wanted = (size + 1) / 2
    for _ in range(4):
        wanted = 2 * wanted + (size - 1) / 2
    check_on_all_ranks(problem_of(xp, array - rank + (size - 1) / 2, numpy.full(count, wanted), rtol=1e-12))


def test_temporary_arrays_in_many_calls(xp, current):
    """Memory that is given back to the pool while the call is under way is not taken for something else."""
    rank, size = place()
    found = []
    for turn in range(20):
        given = [xp.full((1 + 3000 * number,), rank + turn, "f4") for number in range(6)]
        found.append(in_replica("SUM", given))
        del given
        xp.full(40_000, -5, "f4")
    totals = [size * (size - 1) / 2 + size * turn for turn in range(20)]
    problems = [
        problems_of(xp, results, [numpy.full(1 + 3000 * number, total, "f4") for number in range(6)])
        for results, total in zip(found, totals, strict=True)
    ]
    check_on_all_ranks("".join(problems))


def test_two_streams_in_turn(xp):
    rank, size = place()
    total, found = size * (size + 1) / 2, []
    for turn in range(4):
        with stream(xp):
            array = xp.zeros(200_000, "f4")
            slowly(xp, array, (rank + 1) * (turn + 1))
            (result,) = in_replica("SUM", [array])
            found.append(problem_of(xp, result, numpy.full(200_000, total * (turn + 1), "f4")))
    check_on_all_ranks("".join(found))


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_other_collectives_wait_for_their_array(xp, current, count):
    rank, size = place()
    array = xp.zeros(count, "f4")

    def made(value):
        slowly(xp, array, value)
        return array

    found = [
        mpidist.broadcast(made(rank + 3), root=size - 1),
        mpidist.all_gather(made(rank + 1))[-1:],
        mpidist.reduce_scatter(made(2))[:1],
        mpidist.all_to_all(made(rank), [count, *[0] * (size - 1)])[0][-1:],
    ]
    expected = [
        numpy.full(count, size + 2, "f4"),
        numpy.full(1, size, "f4"),
        numpy.full(min(1, count * (rank + 1) // size - count * rank // size), 2 * size, "f4"),
        numpy.full(1 if rank == 0 else 0, size - 1, "f4"),
    ]
    check_on_all_ranks(problems_of(xp, found, expected))


@pytest.mark.parametrize("make", [mpidist.optimizers.SGD, mpidist.optimizers.Adam], ids=["sgd", "adam"])
def test_an_update_waits_for_its_gradients(xp, current, make):
    """Of gradients that are the same in all elements and steps, both go down by a known way."""
    rank, size = place()
    with strategy().scope():
        variable, optimizer = mpidist.Variable(xp.zeros(100_000, "f8")), make(0.5)
    gradient = xp.zeros(100_000, "f8")
    for _ in range(3):
        slowly(xp, gradient, (rank + 1.0) / (size * (size + 1) / 2))
        strategy().run(lambda: optimizer.apply_gradients([(gradient, variable)]))
        gradient.fill(1e6)
    # of Adam each step is the learning rate, but for its epsilon
    check_on_all_ranks(problem_of(xp, variable.value * 1, numpy.full(100_000, -1.5), rtol=1e-5))


# -- calls in two streams, of which the host waits for none: what they have in common is ordered -----------------------


def in_turn(xp, call, counts, turns=8, dtype="f4"):
    """Return the results of calls with arrays of ``rank + 1 + turn``, in the one stream and the other."""
    rank, _ = place()
    streams, found = two_streams(xp), []
    for turn in range(turns):
        with streams[turn % 2]:
            given = [xp.zeros(count, dtype) for count in counts]
            for array in given:
                slowly(xp, array, rank + 1 + turn)
            found.append(call(given))
    return streams, found


def problems_in_turn(xp, streams, found, expected):
    problems = []
    for turn, results in enumerate(found):
        with streams[turn % 2]:
            problems.append(problems_of(xp, results, expected(turn)))
    return "".join(problems)


@pytest.mark.parametrize("counts", [[5000], [70, 5000, 1]], ids=["alone", "list"])
def test_reductions_in_two_streams(xp, counts):
    """They have work memory, tables of addresses and NCCL in common."""
    _, size = place()
    streams, found = in_turn(xp, lambda given: in_replica("SUM", given), counts)
    total = size * (size + 1) / 2
    problem = problems_in_turn(
        xp, streams, found, lambda turn: [numpy.full(count, total + turn * size, "f4") for count in counts]
    )
    check_on_all_ranks(problem)


@pytest.mark.parametrize(("dtype", "op"), [("f4", "MAX"), ("f8", "MIN"), ("i2", "SUM")])
@pytest.mark.parametrize("verb", ["reduce", "reduce_parts"])
def test_what_stands_for_values_in_two_streams(xp, ways, verb, dtype, op):
    rank, size = place()
    count = 4000 * size + 1
    call = {
        "reduce": lambda given: in_replica(op, given),
        "reduce_parts": lambda given: [mpidist.reduce_scatter(given[0], op)],
    }[verb]
    streams, found = in_turn(xp, call, [count], dtype=dtype)
    rows = count if verb == "reduce" else count * (rank + 1) // size - count * rank // size

    def expected(turn):
        number = {"MAX": size + turn, "MIN": 1 + turn, "SUM": size * (size + 1) // 2 + turn * size}[op]
        return [numpy.full(rows, number, dtype)]

    check_on_all_ranks(problems_in_turn(xp, streams, found, expected) + ways.problem(verb))


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_other_collectives_in_two_streams(xp, name):
    rank, size = place()
    calls = {
        "broadcast": lambda array: mpidist.broadcast(array, root=size - 1),
        "all_gather": mpidist.all_gather,
        "reduce_scatter": mpidist.reduce_scatter,
        "all_to_all": lambda array: mpidist.all_to_all(array)[0],
    }
    each = 3000
    numbers = {  # of each part of the result
        "broadcast": [size] * size,
        "all_gather": [giver + 1 for giver in range(size) for _ in range(size)],
        "reduce_scatter": [size * (size + 1) / 2],
        "all_to_all": [giver + 1 for giver in range(size)],
    }[name]
    streams, found = in_turn(xp, lambda given: [calls[name](given[0])], [size * each])

    def expected(turn):
        more = turn * (size if name == "reduce_scatter" else 1)
        return [numpy.repeat(numpy.array(numbers, "f4") + more, each)]

    check_on_all_ranks(problems_in_turn(xp, streams, found, expected))


def test_a_reduction_is_started_in_one_stream_and_waited_for_in_another(xp):
    """It waits for what makes its arrays where it is started, and is waited for where its results are asked for."""
    rank, size = place()
    first, second = two_streams(xp)
    total, problems = size * (size + 1) / 2, []
    with first:
        given = [xp.zeros(count, "f4") for count in (5000, 3)]
    bound = strategy().run(lambda: mpidist.get_replica_context().all_reduce_init("SUM", given))
    for turn in range(4):
        with first:
            for array in given:
                slowly(xp, array, rank + 1 + turn)
            handle = bound.start(given)
        with second:
            results = handle.wait()
            problems.append(problems_of(xp, results, [numpy.full(n, total + turn * size, "f4") for n in (5000, 3)]))
    check_on_all_ranks("".join(problems))


def test_lists_of_other_addresses_in_two_streams(xp):
    """The table of a list's addresses is made again for each: the one before may be in use in the other stream."""
    rank, size = place()
    counts, streams, found = (3000, 5, 700), two_streams(xp), []
    lists = []
    for each in range(2):
        with streams[0]:
            lists.append([xp.full(count, rank + 1 + each, "f4") for count in counts])
    for turn in range(12):
        with streams[turn % 3 % 2]:
            found.append(in_replica("SUM", lists[turn // 3 % 2]))
    problems = []
    for turn, results in enumerate(found):
        with streams[turn % 3 % 2]:
            total = size * (size + 1) / 2 + size * (turn // 3 % 2)
            problems.append(problems_of(xp, results, [numpy.full(count, total, "f4") for count in counts]))
    check_on_all_ranks("".join(problems))


#: What makes an optimizer, and of variables of 0 what six steps make that have a gradient of 1.
UPDATES = {
    "sgd": (lambda: mpidist.optimizers.SGD(0.5), -3.0),
    "adam": (lambda: mpidist.optimizers.Adam(0.5), -3.0),
    "accumulated": (lambda: mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=3), -1.0),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_updates_in_two_streams(xp, kind):
    """Each step finds the variables and sums of the step before, which the other stream has made."""
    make, expected = UPDATES[kind]
    rank, size = place()
    with strategy().scope():
        made = [mpidist.Variable(xp.zeros(count, "f8")) for count in (20_000, 3)]
        optimizer = make()
    streams = two_streams(xp)
    for turn in range(6):
        with streams[turn % 2]:
            gradients = [xp.zeros(each.shape, "f8") for each in made]
            for gradient in gradients:
                slowly(xp, gradient, (rank + 1.0) / (size * (size + 1) / 2))
            pairs = list(zip(gradients, made, strict=True))
            strategy().run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    with streams[1]:
        values = [each.value * 1 for each in made]
        problem = problems_of(xp, values, [numpy.full(each.shape, expected) for each in made], rtol=1e-5)
    check_on_all_ranks(problem)


def test_sums_of_a_state_are_given_back_behind_the_step_that_reads_them(xp):
    """They are made in one stream, and dropped when the step is begun in the other one."""
    size, streams, problems = mpidist.size(), two_streams(xp), []
    for _ in range(4):
        with streams[0], strategy().scope():
            variable = mpidist.Variable(xp.zeros(2000))
            first, second = (mpidist.optimizers.SGD(1.0, gradient_accumulation_steps=3) for _ in range(2))
        for number, optimizer in enumerate([first, second, second]):
            with streams[number == 2]:
                if number == 1:
                    second.restore(first.state())
                gradient = xp.zeros(2000)
                slowly(xp, gradient, 1 / size)
                pairs = [(gradient, variable)]
                strategy().run(lambda optimizer=optimizer, pairs=pairs: optimizer.apply_gradients(pairs))
        second.forget_micro_batches()
        with streams[1]:
            problems.append(problem_of(xp, variable.value * 1, numpy.full(2000, -1.0), rtol=1e-12))
    check_on_all_ranks("".join(problems))


def test_a_bound_reduction_is_dropped_while_it_is_under_way(xp):
    """Its memory was made in one stream, and is in use in the other one."""
    rank, size = place()
    first, second = two_streams(xp)
    counts, problems = (5000, 3), []
    for turn in range(4):
        with first:
            given = [xp.full(count, rank, "f4") for count in counts]
            bound = strategy().run(lambda like=given: mpidist.get_replica_context().all_reduce_init("SUM", like))
            bound(given)
        with second:
            others = [xp.zeros(count, "f4") for count in counts]
            for array in others:
                slowly(xp, array, rank + 1 + turn)
            results = bound(others)
        del bound
        with first:
            after = [xp.full(count, -7, "f4") for count in (sum(counts), *counts)]
        with second:
            total = size * (size + 1) / 2 + turn * size
            problems.append(problems_of(xp, results, [numpy.full(count, total, "f4") for count in counts]))
        del after
    check_on_all_ranks("".join(problems))


class Patient:
    """A watch that only waits."""

    def tick(self):
        time.sleep(0)


@pytest.mark.gpu(only=True)
def test_the_host_waits_for_copies_before_their_memory_is_written_again(xp, current):
    ways, slow, targets = DeviceWays(world_communicator()), xp.zeros(3), [xp.zeros(1000) for _ in range(4)]
    slowly(xp, slow, 1)
    for number, target in enumerate(targets):
        ways.to_device(memory_of(target), numpy.full(1000, number + 1.0), target, Patient())
    check_on_all_ranks(problems_of(xp, targets, [numpy.full(1000, number + 1.0) for number in range(4)]))


@pytest.mark.gpu(only=True)
def test_the_host_waits_for_a_staged_sum_before_its_memory_is_written_again(xp):
    rank, size = place()
    ways, found, after = world_communicator().devices, [], xp.zeros(5000)
    for turn in range(40):
        found.append(in_replica("SUM", xp.full(5000, rank + turn + 1.0)))
        ways.to_device(memory_of(after), numpy.full(5000, -7.0), after, Patient())
    totals = [size * (size + 1) / 2 + size * turn for turn in range(40)]
    check_on_all_ranks(problems_of(xp, found, [numpy.full(5000, total) for total in totals]))


@pytest.mark.gpu(only=True)
def test_a_rank_stages_arrays_on_one_gpu_after_another(xp):
    engine, (rank, size), problems = Engine(world_communicator(), algorithm="staged"), place(), []
    for turn in range(4):
        with xp.cuda.Device((rank + turn) % xp.cuda.runtime.getDeviceCount()):
            given = xp.zeros(5000 + turn, "f4")
            slowly(xp, given, rank + turn)
            total = size * (size - 1) // 2 + size * turn
            problems.append(problems_of(xp, engine([given]), [numpy.full(5000 + turn, total, "f4")]))
    check_on_all_ranks("".join(problems))


@pytest.mark.gpu(only=True)
def test_memory_of_the_host_that_is_still_written_to_is_not_handed_out_again(xp, current):
    array = xp.zeros(100)
    memory = memory_of(array)
    slowly(xp, array, 1)
    memory.read(array, memory.host_buffer(100, array.dtype))  # of which nobody looks at the values
    after = memory.host_buffer(100, array.dtype)
    after[...] = 7
    xp.cuda.get_current_stream().synchronize()
    check_on_all_ranks("" if (after == 7).all() else f"{after[0]} in place of 7")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_parts_of_a_data_set_are_copied_before_they_are_read(xp, current, ahead):
    """And nobody's memory is taken for other parts before that, which the host is far ahead of; in two epochs."""
    rank, size = place()
    rows, options = 64 * size, mpidist.InputOptions(experimental_per_replica_buffer_size=ahead)
    numbers = numpy.arange(rows * 500, dtype="f4").reshape(rows, 500)
    dataset = mpidist.data.Dataset.from_arrays({"x": numbers, "y": numbers[:, :1].astype("i8")}).batch(4 * size)
    total, products, waits, lies = xp.zeros((4, 500), "f8"), [], xp.zeros(1), True
    parts = strategy().experimental_distribute_dataset(dataset, options)
    for _ in range(2):
        for part in parts:
            slowly(xp, waits, 0)
            total += part["x"]
            products.append(part["x"][:, :1] * part["y"])
            lies &= all(isinstance(each, xp.ndarray) for each in part.values())
            del part
    given = numbers.reshape(16, size, 4, 500)[:, rank].astype("f8")
    problem = problem_of(xp, total, 2 * given.sum(axis=0))
    squares = [each[:, :1] ** 2 for each in given] * 2
    problem += problems_of(xp, products, squares)
    check_on_all_ranks(problem or lies or "parts lie elsewhere")


def test_results_are_given_back_behind_the_step_that_reads_them(xp):
    """They were made in one stream, and the list behind that step lies in memory otherwise: it has other results."""
    rank, size = place()
    shape, problems = (40, 30), []
    for _ in range(8):
        first, second = two_streams(xp)
        with strategy().scope():
            variable, optimizer = mpidist.Variable(xp.zeros(shape, "f4")), mpidist.optimizers.SGD(1.0, clipnorm=1e6)

        def step(gradient, optimizer=optimizer, variable=variable):
            strategy().run(lambda: optimizer.apply_gradients([(gradient, variable)]))

        with first:
            step(xp.zeros(shape, "f4"))
        with second:
            gradient, odd = xp.zeros(shape, "f4"), xp.zeros(shape[::-1], "f4").T
            slowly(xp, gradient, 0)
            for _ in range(100):  # an emulated card is slow by as many works
                gradient += rank + 1
            step(gradient)
            step(odd)
        with first:
            after = [xp.full(shape, 7, "f4") for _ in range(4)]
        with second:
            problems.append(problem_of(xp, variable.value * 1, numpy.full(shape, -50 * size * (size + 1), "f4")))
        del after
    check_on_all_ranks("".join(problems))


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("is_read", [False, True])
def test_a_copy_writes_over_no_later_array(xp, current, is_read):
    """Where nobody waits for it, as when an epoch is broken off, or its array was read in another stream."""
    from mpidist.device.input_copies import InputCopies  # which needs CuPy

    copies, given, problems = InputCopies(xp.cuda.Device().id), numpy.zeros((50, 500), ">f4"), []
    for _ in range(10):
        held = [copies.begin(given) for _ in range(15)]
        copy = copies.begin(given)
        if is_read:
            with two_streams(xp)[0]:
                found = copies.end(copy)
            del found
        del copy
        after = xp.full(given.shape, 7, "f4")
        problems.append(problem_of(xp, after, numpy.full(given.shape, 7, "f4")))
        del held
    check_on_all_ranks("".join(problems))
