"""Compressed all-reduces on ranks that are threads: sums, bounds, residues, and calls that do not match."""

from fractions import Fraction

import ml_dtypes
import numpy
import pytest

import mpidist
from mpidist.collectives.reductions.plan import build
from mpidist.compression import BFloat16, Compression, Float16, TopK
from mpidist.compression.compressed import CompressedAllReduce, bind_all_reduce
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError, UnsupportedDtypeError
from mpidist.testing import run_ranks
from mpidist.testing.device import on_device, pretended_device
from mpidist.world import world_communicator

SIZES = [1, 2, 3, 5]
NODES = {2: ["a", "b"], 3: ["a", "a", "b"]}


class Signs(Compression):
    """A user's own: one bit a value, and the mean magnitude."""

    error_feedback = True

    def code_bytes(self, elements, dtype):
        return 8 + -(-elements // 8)

    def encode(self, values, code):
        code[:8].view("f8")[0] = numpy.abs(values).mean()
        code[8:] = numpy.packbits(values > 0)

    def decode(self, code, values):
        bits = numpy.unpackbits(code[8:], count=values.size)
        values[:] = (2.0 * bits - 1) * code[:8].view("f8")[0]


STAGES = [
    Float16(),
    BFloat16(),
    Float16(error_feedback=True),
    TopK(0.1),
    TopK(0.1, values=BFloat16()),
    TopK(0.2, error_feedback=False),
    Signs(),
]
FEEDBACK = [stage for stage in STAGES if stage.error_feedback]


def bind(like, op, stage):
    return CompressedAllReduce(world_communicator(), like, op, stage)


def numbers(rank, step=0, shapes=((40, 3), (7,), ()), dtype="f8"):
    rng = numpy.random.default_rng([rank, step])
    return [numpy.asarray(rng.normal(size=shape) * 10.0**-index, dtype) for index, shape in enumerate(shapes)]


def flat(arrays):
    return numpy.concatenate([each.ravel() for each in arrays])


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [None, NODES])
@pytest.mark.parametrize("stage", [Float16(), BFloat16(), TopK(1.0)])
@pytest.mark.parametrize(("size", "op"), [*((size, "sum") for size in SIZES), (1, "mean"), (2, "mean")])
def test_small_whole_numbers_are_exact(size, op, stage, hosts):
    """Below 2 ** 7 all of them are bfloat16 numbers, and so are their halves."""
    dtypes = ["f4", "f8", "f2", ml_dtypes.bfloat16, "i4", "c16"]

    def step():
        rank = world_communicator().rank
        arrays = [((numpy.arange(11) + 3 * index) % 10 + 2 * rank).astype(dtype) for index, dtype in enumerate(dtypes)]
        arrays += [numpy.full((), rank + 1, "f4"), numpy.zeros((0, 3), "f4")]
        return bind(arrays, op, stage)(arrays)

    divisor = size if op == "mean" else 1
    for results in run_ranks(size, step, hosts=(hosts or {}).get(size)):
        for index, dtype in enumerate(dtypes):
            total = ((numpy.arange(11) + 3 * index) % 10) * size + size * (size - 1)
            numpy.testing.assert_array_equal(results[index], (total / divisor).astype(results[index].dtype))
            assert results[index].dtype == ("f8" if (op, dtype) == ("mean", "i4") else dtype)
        assert results[6] == size * (size + 1) / 2 / divisor and results[6].shape == ()
        assert results[7].shape == (0, 3)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_beyond_float16_is_no_infinity(size):
    def step():
        arrays = [numpy.array([65536.0, -65536.0, 1.0], "f4")]
        return bind(arrays, "sum", Float16())(arrays)[0]

    for result in run_ranks(size, step):
        numpy.testing.assert_array_equal(result, [size * 65536.0, size * -65536.0, size])


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(("stage", "relative"), [(Float16(), 2.0**-11), (BFloat16(), 2.0**-7.99)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_error_of_a_sum_is_that_of_each_code(size, stage, relative, op):
    """Each value is rounded once, and the sum of the rounded values once more."""
    results = run_ranks(size, lambda: flat(_reduced(op, stage)))
    every = numpy.stack([flat(numbers(rank)) for rank in range(size)])
    exact, divisor = every.sum(axis=0), size if op == "mean" else 1
    lost = relative * numpy.abs(every).sum(axis=0)
    bound = (lost + relative * (numpy.abs(exact) + lost)) / divisor + 2.0**-39 * (size + 1) * numpy.abs(every).max()
    for result in results:
        assert (numpy.abs(result - exact / divisor) <= bound).all()


def _reduced(op, stage):
    arrays = numbers(world_communicator().rank)
    return bind(arrays, op, stage)(arrays)


@pytest.mark.parametrize("stage", STAGES, ids=repr)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_same_bits_and_give_keeps_its_values(size, stage):
    def steps():
        communicator = world_communicator()
        given = [numbers(communicator.rank, step, dtype="f4") for step in range(4)]
        bound = bind(given[0], "mean", stage)
        results = [bound(arrays) for arrays in given]
        for step, arrays in enumerate(given):
            numpy.testing.assert_array_equal(flat(arrays), flat(numbers(communicator.rank, step, dtype="f4")))
        return [flat(each).tobytes() for each in results]

    first, *others = run_ranks(size, steps, hosts=NODES.get(size))
    assert all(other == first for other in others)


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_one_rank_loses_nothing(stage):
    def step():
        arrays = numbers(0)
        bound = bind(arrays, "mean", stage)
        return [flat(bound(arrays)) for _ in range(3)]

    for result in run_ranks(1, step)[0]:
        numpy.testing.assert_array_equal(result, flat(numbers(0)))


def test_top_k_is_the_sum_of_what_each_rank_chose():
    def step():
        arrays = [numpy.array([[3.0, -1.0, 0.5, 4.0], [0.0, 9.0, -8.0, 1.0]][world_communicator().rank])]
        return bind(arrays, "sum", TopK(0.5))(arrays)[0]

    for result in run_ranks(2, step):
        numpy.testing.assert_array_equal(result, [3.0, 9.0, -8.0, 4.0])


def test_strided_arrays_are_taken_in_the_order_of_their_axes():
    def step():
        whole = numpy.arange(24.0).reshape(4, 6)
        arrays = [whole[::2, 1::2], whole.T]
        return bind(arrays, "sum", BFloat16())(arrays)

    base = numpy.arange(24.0).reshape(4, 6)
    for strided, transposed in run_ranks(2, step):
        numpy.testing.assert_array_equal(strided, 2 * base[::2, 1::2])
        numpy.testing.assert_array_equal(transposed, 2 * base.T)


def test_results_are_the_caller_s():
    def step():
        arrays = [numpy.ones(5, "f4")]
        bound = bind(arrays, "sum", Float16())
        first = bound(arrays)[0]
        first += 1
        second = bound([numpy.full(5, 3, "f4")])[0]
        return first.tolist(), second.tolist()

    assert run_ranks(2, step) == [([3.0] * 5, [6.0] * 5)] * 2


def test_fewer_values_than_ranks():
    def step():
        arrays = [numpy.array([1.0, 2.0])]
        bound = bind(arrays, "sum", Float16(error_feedback=True))
        return [bound(arrays)[0].tolist() for _ in range(2)], bound.state_dict()["float64.sum_residues"].tolist()

    assert run_ranks(5, step) == [([[5.0, 10.0]] * 2, [0.0, 0.0])] * 5


# -- error feedback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("stage", FEEDBACK, ids=repr)
@pytest.mark.parametrize("size", SIZES)
def test_what_was_returned_and_what_is_kept_is_all_that_was_given(size, stage, op):
    """Exact but for the rounding of float64, whatever a stage loses in a step."""
    steps = 12

    def train():
        communicator = world_communicator()
        bound = bind(numbers(0), op, stage)
        results = [flat(bound(numbers(communicator.rank, step))) for step in range(steps)]
        return sum(results), bound.state_dict()

    exact = sum(flat(numbers(rank, step)) for rank in range(size) for step in range(steps))
    for total, state in run_ranks(size, train):
        kept = state["float64.residues"].sum(axis=0)
        divisor = size if op == "mean" else 1
        whole = total + kept / divisor + state.get("float64.sum_residues", 0)
        numpy.testing.assert_allclose(whole, exact / divisor, rtol=1e-12, atol=1e-12)
        assert size == 1 or numpy.abs(kept).max() > 0


@pytest.mark.parametrize("stage", FEEDBACK, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_restored_all_reduce_goes_on_bit_for_bit(size, stage):
    def train():
        rank = world_communicator().rank
        whole, first = bind(numbers(0), "mean", stage), bind(numbers(0), "mean", stage)
        expected = [flat(whole(numbers(rank, step))) for step in range(6)]
        for step in range(3):
            first(numbers(rank, step))
        state, second = first.state_dict(), bind(numbers(0), "mean", stage)
        second.load_state_dict(state)
        found = [flat(second(numbers(rank, step))) for step in range(3, 6)]
        return [each.tobytes() for each in expected[3:]] == [each.tobytes() for each in found]

    assert all(run_ranks(size, train))


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("stages", [(TopK(0.1), TopK(0.1)), (Signs(), Signs()), (Signs(), TopK(0.2))], ids=repr)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1), (1, 3)])
def test_a_state_goes_to_another_number_of_ranks(before, after, stages, op):
    def save():
        bound = bind(numbers(0), op, stages[0])
        total = sum(flat(bound(numbers(world_communicator().rank, step))) for step in range(4))
        return total, bound.state_dict()

    def go_on():
        bound = bind(numbers(0), op, stages[1])
        bound.load_state_dict(state)
        total = sum(flat(bound(numbers(10 + world_communicator().rank, step))) for step in range(4))
        return total, bound.state_dict()

    saved, state = run_ranks(before, save)[0]
    assert state["ranks"] == before
    for total, left in run_ranks(after, go_on):
        first, second = (before, after) if op == "mean" else (1, 1)
        exact = sum(flat(numbers(rank, step)) for rank in range(before) for step in range(4)) / first
        exact = exact + sum(flat(numbers(10 + rank, step)) for rank in range(after) for step in range(4)) / second
        kept = left["float64.residues"].sum(axis=0) / second + left.get("float64.sum_residues", 0)
        numpy.testing.assert_allclose(saved + total + kept, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("stage", FEEDBACK, ids=repr)
def test_what_waits_goes_to_a_list_of_another_order(stage, op):
    def train():
        rank = world_communicator().rank
        first, second = bind(numbers(0), op, stage), bind(numbers(0)[::-1], op, stage)
        total = sum(flat(first(numbers(rank, step))) for step in range(3))
        second.keep({2 - at: values for at, values in first.waiting().items()})
        total = total + sum(flat(second(numbers(rank, step)[::-1])[::-1]) for step in range(3, 6))
        return total, second.state_dict()

    divisor = 3 if op == "mean" else 1
    exact = sum(flat(numbers(rank, step)) for rank in range(3) for step in range(6)) / divisor
    for total, left in run_ranks(3, train):
        kept = left["float64.residues"].sum(axis=0) / divisor + left.get("float64.sum_residues", 0)
        kept = flat(numpy.split(kept, [1, 8])[::-1])
        numpy.testing.assert_allclose(total + kept, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf])
@pytest.mark.parametrize("stage", [Float16(error_feedback=True), TopK(0.1)], ids=repr)
def test_a_step_that_is_not_finite_is_seen_and_leaves_the_residues(stage, bad):
    def train():
        rank = world_communicator().rank
        bound = bind(numbers(0), "sum", stage)
        bound(numbers(rank, 0))
        before = bound.state_dict()
        arrays = numbers(rank, 1)
        if rank == 1:
            arrays[0][3, 1] = bad
        results, after = bound(arrays), bound.state_dict()
        for key, value in before.items():
            numpy.testing.assert_array_equal(after[key], value)
        return results[0][3, 1], numpy.isfinite(flat(bound(numbers(rank, 2)))).all()

    for found, is_fine_later in run_ranks(2, train):
        numpy.testing.assert_equal(found, bad)
        assert is_fine_later


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    def step():
        arrays = [numpy.ones(4), numpy.ones(3, "f4")]
        bound, plain = bind(arrays, "sum", TopK(0.5)), bind(arrays, "sum", TopK(0.5, error_feedback=False))
        bound([numpy.arange(4.0), numpy.arange(3, dtype="f4")])
        state = bound.state_dict()
        messages = []
        for target, wrong in [
            (plain, state),
            (bound, plain.state_dict()),
            (bound, state | {"float64.residues": numpy.ones((1, 5))}),
            (bound, {key: value for key, value in state.items() if key != "float32.residues"}),
        ]:
            with pytest.raises(ValueError) as caught:
                target.load_state_dict(wrong)
            messages.append(str(caught.value))
        after = bound.state_dict()
        return messages, all(numpy.array_equal(after[key], state[key]) for key in state)

    for (kept, missing, shape, dtype), is_same in run_ranks(2, step):
        assert "keeps no such residues" in kept and "float64.residues" in kept
        assert "the state has no float64.residues" in missing
        assert "(1, 5), expected (-1, 4)" in shape
        assert "the state has no float32.residues" in dtype
        assert is_same


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_stages_that_differ_between_ranks_are_named():
    def step():
        stage = Float16() if world_communicator().rank == 0 else TopK(0.25)
        with pytest.raises(CollectiveMismatchError) as caught:
            bind(numbers(0), "sum", stage)(numbers(0))
        return str(caught.value)

    for message in run_ranks(2, step):
        assert "compression" in message and "Float16(" in message and "ratio=0.25" in message


def test_shapes_that_differ_between_ranks_are_named():
    def step():
        communicator = world_communicator()
        arrays = [numpy.ones(3 + communicator.rank)]
        with pytest.raises(CollectiveMismatchError) as caught:
            bind_all_reduce(communicator, arrays, "sum", Float16(), names=["kernel"])(arrays)
        return str(caught.value)

    for message in run_ranks(2, step):
        assert "'kernel' float64 (3,)" in message and "'kernel' float64 (4,)" in message


class Refusing(Float16):
    """A stage that cannot code negative numbers."""

    def encode(self, values, code):
        if values.min() < 0:
            raise OverflowError("a negative number")
        super().encode(values, code)


def test_a_stage_that_raises_on_one_rank_leaves_all_in_step():
    def step():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        mine = strategy.extended.replica_id
        bound = bind([numpy.zeros(4)], "sum", Refusing())
        expected = OverflowError if mine == 1 else RemoteReplicaError
        with pytest.raises(expected, match="a negative number"):
            strategy.run(lambda: bound([numpy.array([1.0, 2.0, 3.0, -(mine == 1)])]))
        return strategy.run(lambda: bound([numpy.ones(4)]))[0].tolist()

    assert run_ranks(3, step) == [[3.0] * 4] * 3


def test_a_sum_beyond_the_dtype_of_its_arrays_leaves_the_residues():
    def overflow():
        given = [numpy.array([60_000.0, 1.0], "f2")]
        bound = bind(given, "sum", TopK(0.5))
        with numpy.errstate(over="ignore"):
            (total,) = bound(given)
        return total.tolist(), bound.state_dict()["float16.residues"].tolist()

    assert run_ranks(2, overflow) == [([numpy.inf, 0.0], [[0.0, 0.0]] * 2)] * 2


@pytest.mark.parametrize(
    ("op", "stage", "names", "error", "words"),
    [
        ("max", Float16(), None, ValueError, "op must be 'sum' or 'mean'"),
        ("sum", Float16, None, TypeError, "pass an instance"),
        ("sum", "fp16", None, TypeError, "mpidist.compression.Compression or None, got 'fp16'"),
        ("sum", Float16(), ["a", "b"], ValueError, "got 1 arrays and 2 names"),
    ],
)
def test_what_cannot_be_bound_is_refused(op, stage, names, error, words):
    with pytest.raises(error, match=words):
        run_ranks(1, lambda: CompressedAllReduce(world_communicator(), [numpy.ones(3)], op, stage, names))


def test_other_arrays_than_it_was_bound_to_are_refused():
    def step():
        bound = bind([numpy.ones(3), numpy.ones(2, "f4")], "sum", Float16())
        for wrong in ([numpy.ones(3)], [numpy.ones(3), numpy.ones(2)], [numpy.ones(4), numpy.ones(2, "f4")]):
            with pytest.raises(ValueError, match="was bound to 2 arrays .float64.3., float32.2.., got"):
                bound(wrong)
        return bound([numpy.ones(3), numpy.ones(2, "f4")])[1].tolist()

    assert run_ranks(2, step) == [[2.0, 2.0]] * 2


def test_arrays_in_device_memory_are_refused():
    with pretended_device(), pytest.raises(UnsupportedDtypeError, match="as_host"):
        run_ranks(1, lambda: bind([on_device(numpy.ones(3))], "sum", Float16()))


def test_without_a_stage_it_is_the_plain_all_reduce():
    def step():
        arrays = [numpy.full(3, 1 / 3), numpy.full(2, 1, "i4")]
        return bind_all_reduce(world_communicator(), arrays)(arrays)

    for values, counts in run_ranks(2, step):
        assert values.tolist() == [2 / 3] * 3 and counts.tolist() == [2, 2]


def test_what_is_not_coded_is_summed_in_full():
    big = 2**53 + 1

    def step():
        arrays = [numpy.array([big]), numpy.array([1.0 + 2.0**-40 + 0.5j]), numpy.ones(3)]
        return bind(arrays, "sum", TopK(0.5))(arrays)

    for integers, complexes, _ in run_ranks(2, step):
        assert integers.tolist() == [2 * big]
        assert Fraction(complexes[0].real) == Fraction(2.0 + 2.0**-39)
    assert build([("", numpy.dtype("c16"), (1,))], "sum", 1).buckets[0].dtype == numpy.complex128


# -- replicas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_a_replica(size):
    def loop():
        strategy = mpidist.MultiWorkerMirroredStrategy()

        def step():
            mine = mpidist.get_replica_context().replica_id_in_sync_group
            value = {"w": numpy.full((2, 3), mine + 1, "f4"), "b": [numpy.float64(mine)]}
            all_reduce = mpidist.compression.all_reduce_init("SUM", value, Float16())
            first = all_reduce(value)
            handle = all_reduce.start(value)
            second = handle.wait()
            with pytest.raises(ValueError, match="was bound to"):
                all_reduce({"w": value["w"]})
            return first, second

        return strategy.run(step)

    for results in run_ranks(size, loop):
        for result in results:
            assert (result["w"] == size * (size + 1) / 2).all() and result["b"][0] == size * (size - 1) / 2


def test_across_replicas_it_is_refused():
    def step():
        with mpidist.MultiWorkerMirroredStrategy().scope(), pytest.raises(RuntimeError, match="inside .strategy.run"):
            mpidist.compression.all_reduce_init("sum", numpy.ones(2), Float16())

    run_ranks(2, step)


def test_replicas_of_several_ranks_are_refused():
    def step():
        topology = mpidist.tpu.experimental.initialize_tpu_system()
        assignment = mpidist.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2])
        strategy = mpidist.TPUStrategy(experimental_device_assignment=assignment)
        with pytest.raises(NotImplementedError, match="TPUStrategy does not reduce over one replica a rank"):
            strategy.run(lambda: mpidist.compression.all_reduce_init("sum", numpy.ones(2), Float16()))

    run_ranks(2, step)


def test_masked_arrays_are_refused_when_it_is_bound_and_when_it_is_called():
    whole, masked = numpy.ma.array([1.0, 2.0]), numpy.ma.array([1.0, 2.0], mask=[0, 1])

    def on_rank():
        with pytest.raises(TypeError, match="a masked array, whose mask would be lost"):
            CompressedAllReduce(world_communicator(), [masked], "sum", Float16())
        bound = CompressedAllReduce(world_communicator(), [whole], "sum", Float16())
        with pytest.raises(TypeError, match="a masked array, whose mask would be lost"):
            bound([masked])
        return bound([whole])[0].tolist()

    assert run_ranks(2, on_rank) == [[2, 4]] * 2
