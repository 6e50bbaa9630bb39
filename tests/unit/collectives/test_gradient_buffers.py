"""Gradients written into shared memory: sums, ownership of results over ranks, updates, and what else is passed."""

import errno
from weakref import ref

import numpy
import pytest

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.collectives.reductions import gradient_buffers, update
from mpidist.collectives.reductions.gradient_buffers import GradientBuffers
from mpidist.errors import CollectiveMismatchError, TransportError, UnsupportedDtypeError
from mpidist.optimizers import SGD, Adam
from mpidist.testing import run_ranks
from mpidist.transports import node_memory
from mpidist.world import world_communicator

SHAPES = [(30, 40), (), (5,), (777,), (0, 3)]


def _variables(strategy, dtype="f4"):
    with strategy.scope():
        return [mpidist.Variable(numpy.zeros(shape, dtype), name=f"v{n}") for n, shape in enumerate(SHAPES)]


def _write(buffers, rank, step):
    for number, buffer in enumerate(buffers):
        buffer[...] = number + 10 * rank + 100 * step


def _expected(size, step):
    return [n * size + 10 * size * (size - 1) // 2 + 100 * step * size for n in range(len(SHAPES))]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("long_bytes", [64, 1 << 22])
def test_sums_of_what_was_written(size, hosts, long_bytes, monkeypatch):
    monkeypatch.setattr(gradient_buffers, "_LONG_BYTES", long_bytes)

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        variables = _variables(strategy)
        found = []
        for step in range(4):
            buffers = strategy.extended.gradient_buffers(variables)
            _write(buffers, world_communicator().rank, step)
            reduced = strategy.run(lambda buffers: mpidist.get_replica_context().all_reduce("sum", buffers), (buffers,))
            found.append([each.copy() for each in reduced])
            del reduced
        return found

    for found in run_ranks(size, run, hosts=[f"node{rank % hosts}" for rank in range(size)]):
        for step, reduced in enumerate(found):
            for array, shape, expected in zip(reduced, SHAPES, _expected(size, step), strict=True):
                assert array.dtype == numpy.float32
                numpy.testing.assert_array_equal(array, numpy.full(shape, expected, "f4"))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_buffers_of_variables_without_elements(op):
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros((0, 3), "f4")), mpidist.Variable(numpy.zeros(0, "f4"))]
        buffers = strategy.extended.gradient_buffers(variables)
        reduced = strategy.run(lambda buffers: mpidist.get_replica_context().all_reduce(op, buffers), (buffers,))
        return [each.shape for each in reduced]

    assert run_ranks(2, run) == [[(0, 3), (0,)]] * 2


def test_what_one_rank_changes_on_a_result_is_in_no_later_one():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        buffers, rank = strategy.extended.gradient_buffers(_variables(strategy)), world_communicator().rank
        wrong = 0
        for step in range(4):
            _write(buffers, rank, step)
            reduced = strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", buffers))
            for array, shape, expected in zip(reduced, SHAPES, _expected(2, step), strict=True):
                wrong += (array.shape, array.dtype, array.flags.writeable) != (shape, numpy.dtype("f4"), False)
                wrong += not (array == expected).all()
            if rank == 0:
                reduced[0].flags.writeable = True
                reduced[0].shape = (-1,)
                reduced[3].dtype = numpy.int32
            del reduced, array
        return wrong

    assert run_ranks(2, run) == [0, 0]


def test_results_that_any_rank_holds_do_not_change_and_free_ones_are_used_again():
    def run():
        communicator = world_communicator()
        buffers = GradientBuffers(communicator, [("", numpy.dtype("f8"), (500,))])
        held = []
        for step in range(6):
            _write(buffers.hand_out(), communicator.rank, step)
            (result,) = buffers.reduced("mean", None)
            assert not result.flags.writeable
            if communicator.rank == step % 2 and step < 3:  # one rank holds on to it, the other does not
                held.append((step, result))
            del result
        return [(step, set(result.tolist())) for step, result in held], len(buffers._results)

    for held, count in run_ranks(2, run):
        assert held == [(step, {5.0 + 100 * step}) for step, _ in held]
        assert count == 4  # three are held, by one rank or the other


def test_ranks_go_on_when_there_is_no_memory_for_one_more_result(monkeypatch):
    def full(nbytes, reserved):
        raise OSError(errno.ENOSPC, "no space left")

    def run():
        communicator = world_communicator()
        buffers = GradientBuffers(communicator, [("", numpy.dtype("f4"), (700,))])
        buffers.hand_out()[0][...] = communicator.rank + 1
        held = buffers.reduced("sum", None)
        communicator.barrier()
        monkeypatch.setattr(node_memory, "SharedFile", full)
        with pytest.raises(TransportError, match="no memory for result 2 .*no space left; drop or copy"):
            buffers.reduced("sum", None)
        kept = held.pop().tolist()
        buffers.hand_out()[0][...] = 5
        (again,) = buffers.reduced("mean", None)
        return kept == [3.0] * 700, again.tolist() == [5.0] * 700

    assert run_ranks(2, run) == [(True, True)] * 2


@pytest.mark.parametrize("make", [lambda: SGD(0.5, momentum=0.5), lambda: Adam(0.1), lambda: SGD(1.0, clipnorm=1e9)])
def test_updates_from_buffers_are_those_from_other_arrays(make, monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)

    def run(in_buffers):
        strategy = mpidist.MultiWorkerMirroredStrategy()
        variables = _variables(strategy, "f8")
        with strategy.scope():
            optimizer = make()
        for step in range(4):
            gradients = [numpy.empty(shape) for shape in SHAPES]
            if in_buffers and step != 2:  # and back
                gradients = strategy.extended.gradient_buffers(variables)
            _write(gradients, world_communicator().rank, step)
            strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
        return [variable.value.tobytes() for variable in variables]

    assert run_ranks(2, run, True) == run_ranks(2, run, False)


def test_buffers_that_nobody_refers_to_any_more_are_given_back():
    def run():
        communicator = world_communicator()
        fused = Engine(communicator)
        buffers = GradientBuffers(communicator, [("", numpy.dtype("f4"), (500,)), ("", numpy.dtype("f4"), (3,))])
        arrays, alive = buffers.hand_out(), ref(buffers)
        del buffers
        for each in arrays:
            each[...] = 1 + communicator.rank
        assert not fused(arrays)[0].flags.writeable  # the buffers were reduced where they are
        arrays.reverse()
        assert fused(arrays)[0].flags.writeable  # another list
        del arrays, each
        assert not communicator.in_shared_memory
        return alive() is None

    assert run_ranks(2, run) == [True, True]


def test_ranks_that_pass_different_kinds_of_arrays_are_told():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        variables = _variables(strategy)
        gradients = strategy.extended.gradient_buffers(variables)
        if world_communicator().rank == 1:
            gradients = [each.copy() for each in gradients]
        with pytest.raises(CollectiveMismatchError, match="in gradient buffers"):
            strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", gradients))
        return True

    assert all(run_ranks(2, run))


def test_16_bits_are_refused_before_anything_is_made():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(3, "f2"), name="half")
        strategy.extended.gradient_buffers([variable])

    with pytest.raises(UnsupportedDtypeError, match="'half' is float16"):
        run_ranks(2, run)


@pytest.mark.parametrize(("dtype", "op"), [("i4", "mean"), ("c8", "max")])
def test_reductions_that_a_dtype_does_not_have_are_refused_and_the_ranks_go_on(dtype, op):
    def run():
        communicator = world_communicator()
        signatures = [("", numpy.dtype("f8"), (3,)), ("", numpy.dtype(dtype), (3,))]
        buffers = GradientBuffers(communicator, signatures)
        for array in buffers.hand_out():
            array[...] = 1
        with pytest.raises(UnsupportedDtypeError):
            buffers.reduced(op, None)
        return [each.tolist() for each in buffers.reduced("sum", None)]

    assert run_ranks(2, run) == [[[2, 2, 2], [2, 2, 2]]] * 2
