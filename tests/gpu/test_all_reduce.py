"""All-reduces of arrays on a GPU: closed forms for each dtype, operation, shape, layout; results are the caller's."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.errors import UnsupportedDtypeError
from mpidist.world import world_communicator
from tests.gpu.library import check_on_all_ranks, host, in_replica, place, problem_of, problems_of, strategy

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

OPERATIONS = ["SUM", "MEAN", "MIN", "MAX", "PRODUCT"]
DTYPES = ["float16", "bfloat16", "float32", "float64", "int16", "uint16", "int32", "int64", "uint8", "bool"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 4), (1000,), (257, 129), (300_001,)]
NUMBERS = [("float32", 0), ("float64", 1), ("int32", 2), ("float16", 3), ("int64", 4), ("uint8", 5)]


def dtype_of(name, xp):
    """Return the dtype; skip the test where the library has no arrays of it."""
    if name != "bfloat16":
        return numpy.dtype(name)
    dtype = numpy.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    try:
        xp.asarray(numpy.ones(2, dtype)) + xp.asarray(numpy.ones(2, dtype))
    except (TypeError, ValueError) as error:
        pytest.skip(f"{xp.__name__} has no bfloat16: {error}")
    return dtype


def values(shape, dtype, rank, seed=0):
    """Return ones and twos, whose sums and products are exact; of truth values, that they are twos."""
    found = (numpy.arange(int(numpy.prod(shape))).reshape(shape) * 7 // 3 + rank + seed) % 2
    return found.astype(dtype) if numpy.dtype(dtype) == bool else (found + 1).astype(dtype)


def reduced(op, shape, dtype, seed=0):
    """Return what comes of `values` of all ranks."""
    dtype, size = numpy.dtype(dtype), mpidist.size()
    stack = numpy.stack([values(shape, dtype, rank, seed).astype("f8") for rank in range(size)])
    fn = {"SUM": numpy.sum, "MEAN": numpy.mean, "MIN": numpy.min, "MAX": numpy.max, "PRODUCT": numpy.prod}[op]
    return fn(stack, axis=0).astype("f8" if op == "MEAN" and dtype.kind in "iu" else dtype)


CALLS = {
    "replica": in_replica,
    "strategy": lambda op, value: strategy().reduce(op, value, axis=None),
    "top level": lambda op, value: mpidist.all_reduce(value, op),
}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_operation(xp, name, op):
    dtype = dtype_of(name, xp)
    given = xp.asarray(values((37, 3), dtype, mpidist.rank()))
    if name == "bool" and op not in ("MIN", "MAX"):
        for call in CALLS.values():
            with pytest.raises(UnsupportedDtypeError, match="bool"):
                call(op, given)
        return
    found = [call(op, given) for call in CALLS.values()]
    # a mean may be rounded once, to the dtype
    rtol = 1e-2 if op == "MEAN" and name in ("float16", "bfloat16") else 1e-6 if op == "MEAN" else 0
    check_on_all_ranks(problems_of(xp, found, [reduced(op, (37, 3), dtype)] * 3, rtol=rtol))


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("count", [5, 70_000])
def test_complex_numbers(xp, count, dtype):
    """Both parts of all elements: NCCL is told of real numbers, twice as many."""
    rank, size = place()
    before = (numpy.arange(count) * (rank + 1) - 1j * (numpy.arange(count) + rank)).astype(dtype)
    given = xp.asarray(before)
    total = numpy.arange(count) * (size * (size + 1) / 2) - 1j * (size * numpy.arange(count) + size * (size - 1) / 2)
    found = [in_replica("SUM", given), *in_replica("MEAN", [given, given])]
    expected = [total.astype(dtype), *[(total / size).astype(dtype)] * 2]
    check_on_all_ranks(problems_of(xp, found, expected, rtol=1e-6))


@pytest.mark.parametrize("call, op", [("replica", "SUM"), ("replica", "MEAN"), ("top level", "MAX")])
def test_lists_of_many_shapes_and_dtypes(xp, call, op):
    cases = [(shape, dtype, number) for shape in SHAPES for dtype, number in NUMBERS]
    before = [values(shape, dtype, mpidist.rank(), seed) for shape, dtype, seed in cases]
    given = [xp.asarray(each) for each in before]
    expected = [reduced(op, *case) for case in cases]
    for _ in range(3):  # the first makes plans, the second repeats them
        found = CALLS[call](op, given)
        check_on_all_ranks(problems_of(xp, found, expected, rtol=1e-3 if op == "MEAN" else 0))
    check_on_all_ranks(problems_of(xp, given, before))


def test_nested_structures(xp):
    rank, size = place()
    tree = {"a": xp.asarray(values((3, 4), "f4", rank)), "b": (xp.asarray(values((), "f8", rank)), [])}
    found = in_replica("SUM", tree)
    assert found["b"][1] == [] and type(found["b"]) is tuple
    expected = [reduced("SUM", (3, 4), "f4"), reduced("SUM", (), "f8")]
    check_on_all_ranks(problems_of(xp, [found["a"], found["b"][0]], expected))


LAYOUTS = {
    "Fortran": lambda xp, array: xp.asfortranarray(array),
    "transposed": lambda xp, array: xp.asarray(numpy.ascontiguousarray(host(array).T)).T,
    "every second row": lambda xp, array: xp.repeat(array, 2, axis=0)[::2],
    "every second column": lambda xp, array: xp.repeat(array, 2, axis=1)[:, ::2],
    "backwards": lambda xp, array: xp.ascontiguousarray(array[::-1])[::-1],
    "a part": lambda xp, array: xp.pad(array, 3)[3:-3, 3:-3],
    "not aligned": lambda xp, array: xp.concatenate([xp.zeros(1, array.dtype), array.reshape(-1)])[1:].reshape(
        array.shape
    ),
}


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (300, 700)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(xp, layout, shape, is_list):
    before = values(shape, "f4", mpidist.rank())
    given = LAYOUTS[layout](xp, xp.asarray(before))
    assert (host(given) == before).all()
    # its neighbours in the list are contiguous
    others = [xp.asarray(values((9,), "f4", mpidist.rank())) for _ in range(2)]
    found = in_replica("SUM", [others[0], given, others[1]])[1] if is_list else in_replica("SUM", given)
    problem = problem_of(xp, found, reduced("SUM", shape, "f4")) or problem_of(xp, given, before)
    check_on_all_ranks(problem)


def test_one_row_for_all(xp):
    """An array whose rows are the same memory."""
    rank, size = place()
    given = xp.broadcast_to(xp.asarray(values((50,), "f4", rank)), (40, 50))
    found = in_replica("SUM", given)
    expected = numpy.broadcast_to(reduced("SUM", (50,), "f4"), (40, 50))
    problem = problem_of(xp, found, expected)
    found[0] = 0  # each of the result's rows is its own
    check_on_all_ranks(problem or problem_of(xp, found[1], expected[1]))


def test_a_thousand_small_tensors(xp):
    rank, size = place()
    flat = values((256_000,), "f4", rank)
    given = [xp.asarray(flat)[256 * number :][:256] for number in range(1000)]
    expected = reduced("SUM", (256_000,), "f4").reshape(1000, 256)
    for _ in range(2):
        found = in_replica("SUM", given)
        assert all(isinstance(each, xp.ndarray) and each.shape == (256,) for each in found)
        check_on_all_ranks(problem_of(xp, xp.stack(found), expected))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_100_megabytes(xp, dtype):
    count = (100_000_000 if xp is not numpy else 4_000_000) // numpy.dtype(dtype).itemsize
    rank, size = place()
    given = xp.zeros(count, dtype)
    given += rank + 1
    given[:: 1 << 20] += 1
    found = in_replica("SUM", given)
    total = size * (size + 1) / 2
    expected = numpy.full(count, total, dtype)
    expected[:: 1 << 20] += size
    check_on_all_ranks(problem_of(xp, found, expected))


@pytest.mark.parametrize("shapes", [[(5,), (3, 4)], [(300_000,), (7,), (2000, 100)]], ids=["short", "long"])
def test_results_are_the_callers(xp, shapes):
    """They stay as they are over later calls, may be written to, and share no memory with what was given."""
    rank = mpidist.rank()
    kept, wanted = [], []
    for turn in range(6):
        before = [values(shape, "f4", rank, turn) for shape in shapes]
        given = [xp.asarray(each) for each in before]
        kept.append(in_replica("SUM", given))
        wanted.append([reduced("SUM", shape, "f4", turn) for shape in shapes])
        for each in given:
            each.fill(-1)  # the caller's too
    problems = [problems_of(xp, *pair) for pair in zip(kept, wanted, strict=True)]
    for each in kept[2]:
        each.fill(9)
    problems += [problems_of(xp, kept[turn], wanted[turn]) for turn in (0, 1, 3, 4, 5)]
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_results_of_one_array_are_the_callers(xp, count):
    rank = mpidist.rank()
    given = xp.asarray(values((count,), "f8", rank))
    found = [in_replica("SUM", given) for _ in range(3)]
    found[1].fill(5)
    expected = reduced("SUM", (count,), "f8")
    problems = [problem_of(xp, found[0], expected), problem_of(xp, found[2], expected)]
    check_on_all_ranks("".join([*problems, problem_of(xp, given, values((count,), "f8", rank))]))


@pytest.mark.parametrize("count", [1, 1000, 2_000_003])
def test_in_place(xp, count):
    array = xp.asarray(values((count,), "f4", mpidist.rank()))
    world_communicator().all_reduce(array)
    check_on_all_ranks(problem_of(xp, array, reduced("SUM", (count,), "f4")))


def test_factors_and_none_as_zeros(xp):
    rank, size = place()
    given = [xp.asarray(numpy.full(5, rank + 1.0, "f4")), None if rank else xp.asarray(numpy.full((2, 3), 2.0, "f4"))]
    found = mpidist.all_reduce(given, "sum", prescale=0.5, postscale=4.0, none_as_zeros=True)
    expected = [numpy.full(5, size * (size + 1.0), "f4"), numpy.full((2, 3), 4.0, "f4")]
    check_on_all_ranks(problems_of(xp, found, expected))


FACTORS = [("mean", None, None), ("mean", 0.3, 7.0), ("sum", 0.3, None), ("sum", None, 0.7), ("max", 0.3, 0.7)]


def multiplied(value, dtype, op, prescale, postscale):
    """Return what comes of one value of all ranks: each number is rounded to the dtype of sums, at the end to its own.

    The mean of integers is a float64.
    """
    size, dtype = mpidist.size(), numpy.dtype(dtype)
    result = numpy.dtype("f8") if dtype.kind == "i" else dtype
    work = numpy.float64 if result == "f8" else numpy.float32
    found = work(numpy.array(value, dtype))
    if prescale is not None:
        found *= work(prescale)
    if op != "max":
        found *= work(size)
    if op == "mean" or postscale is not None:
        found *= work((1 / size if op == "mean" else 1) * (postscale or 1))
    return found.astype(result)


@pytest.mark.parametrize(
    "name, op, prescale, postscale",
    [
        (name, *factors)
        for name in ["float16", "bfloat16", "float32", "float64", "int64"]
        for factors in FACTORS
        if name != "int64" or factors[0] == "mean"  # products of integers would be rounded
    ],
)
@pytest.mark.parametrize("shapes", [[(3, 5)], [(3, 5), (), (0,), (70_001,)]], ids=["alone", "list"])
def test_factors_round_in_the_dtype_of_sums(xp, shapes, name, op, prescale, postscale):
    """With a power of two of ranks, sums of equal values are exact."""
    value, dtype = 1001 if name == "int64" else 1.01, dtype_of(name, xp)
    given = [xp.asarray(numpy.full(shape, value, dtype)) for shape in shapes]
    one = multiplied(value, dtype, op, prescale, postscale)
    expected = [numpy.full(shape, one) for shape in shapes]
    rtol = 0 if mpidist.size() in (1, 2, 4, 8) else 1e-3
    for _ in range(2):
        found = mpidist.all_reduce(given, op, prescale=prescale, postscale=postscale)
        check_on_all_ranks(problems_of(xp, found, expected, rtol=rtol))
    check_on_all_ranks(problems_of(xp, given, [numpy.full(shape, value, dtype) for shape in shapes]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shapes", [[(3, 5)], [(3, 5), (), (0,), (70_001,)]], ids=["alone", "list"])
def test_means_in_place(xp, shapes, dtype):
    rank, size = place()
    given = [xp.asarray(numpy.full(shape, rank + 1.5, dtype)) for shape in shapes]
    signatures = [("", each.dtype, each.shape) for each in given]
    bound = world_communicator().engine().bind_in_place(signatures, "mean", given[0])
    bound(given)
    expected = [numpy.full(shape, size / 2 + 1, dtype) for shape in shapes]
    check_on_all_ranks(problems_of(xp, given, expected, rtol=0 if size in (1, 2, 4, 8) else 1e-3))


def test_what_is_not_finite(xp):
    rank, size = place()
    before = numpy.array([numpy.nan if rank == size - 1 else 1, numpy.inf, -0.0], "f4")
    found = {op: in_replica(op, xp.asarray(before)) for op in ("SUM", "MAX", "MIN")}
    expected = {op: numpy.array([numpy.nan, numpy.inf, -0.0], "f4") for op in found}
    check_on_all_ranks(problems_of(xp, list(found.values()), list(expected.values())))
    assert numpy.signbit(host(found["SUM"])[2])


TINY = {"float32": 2e-45, "float64": 1e-320, "float16": 2e-7, "bfloat16": 2e-38}


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("name", TINY)
def test_extremes_keep_what_is_not_finite_and_what_is_tiny(xp, ways, name, op):
    """All ranks have the same bits; in turn each rank has what is special."""
    rank, size = place()
    dtype, tiny = dtype_of(name, xp), TINY[name]
    special = numpy.array([numpy.nan, -numpy.nan, numpy.inf, -numpy.inf, tiny, -tiny, -0.0, 0.0], "f8").astype(dtype)
    stack = numpy.zeros((size, size, len(special)), dtype)
    for each in range(size):
        stack[each] = numpy.array([-1.5, 2.5, 1, -1, -0.0, 0.0, tiny, -tiny], "f8").astype(dtype)
        stack[each, each] = special
    fn = {"MIN": numpy.minimum, "MAX": numpy.maximum}[op]
    expected = fn.reduce(stack.astype("f8"), axis=0).astype(dtype)
    given = [xp.asarray(stack[rank]), xp.asarray(stack[rank, :, ::-1])]
    found = [in_replica(op, given[0]), *in_replica(op, given)]
    problems = problems_of(xp, found, [expected, expected, expected[:, ::-1]])
    bits = mpidist.all_gather_object([host(each).tobytes() for each in found])
    problems += "" if bits == bits[:1] * size else "the ranks' bits differ"
    check_on_all_ranks(problems + ways.problem("reduce"))


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("name", ["int16", "uint16"])
@pytest.mark.parametrize("count", [5, 70_001])
def test_integers_of_16_bits_wrap_as_numpys(xp, ways, count, name, op):
    rank, size = place()
    bounds = numpy.iinfo(name)
    stack = numpy.random.default_rng(count).integers(bounds.min, bounds.max, (size, count), name, endpoint=True)
    stack[:, 0] = bounds.max
    fn = {"SUM": numpy.add, "PRODUCT": numpy.multiply, "MIN": numpy.minimum, "MAX": numpy.maximum}[op]
    expected = fn.reduce(stack, axis=0, dtype=name)
    given = xp.asarray(stack[rank])
    problems = problems_of(xp, [in_replica(op, given), *in_replica(op, [given] * 2)], [expected] * 3)
    check_on_all_ranks(problems + ways.problem("reduce"))


def test_16_bits_are_summed_as_32(xp):
    """2048 + 1 + 1 would stay 2048 in float16."""
    rank, size = place()
    found = in_replica("SUM", [xp.asarray(numpy.full(9, 2048 if rank == 0 else 1, "f2"))])[0]
    check_on_all_ranks(problem_of(xp, found, numpy.full(9, 2048 + size - 1, "f4").astype("f2")))


def test_shapes_that_change_from_call_to_call(xp):
    rank, problems = mpidist.rank(), []
    for turn, count in enumerate([5, 9000, 3, 150_000, 5, 1, 700_000, 9000]):
        found = in_replica("SUM", [xp.asarray(values((count,), "f4", rank, turn)) for _ in range(2)])
        problems.append(problems_of(xp, found, [reduced("SUM", (count,), "f4", turn)] * 2))
    check_on_all_ranks("".join(problems))


def test_memory_of_the_host_and_of_the_card_in_turn(xp):
    rank, problems = mpidist.rank(), []
    for turn in range(6):
        before = [values((n,), "f4", rank, turn) for n in (4, 30_000)]
        expected = [reduced("SUM", (n,), "f4", turn) for n in (4, 30_000)]
        problems.append(problems_of(xp, in_replica("SUM", [xp.asarray(each) for each in before]), expected))
        problems.append(problems_of(numpy, in_replica("SUM", before), expected))
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("axis", [0, (0, 1), -1])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_over_an_axis_of_different_lengths(xp, op, axis):
    rank, size = place()
    rows = rank + 1 if axis != -1 else 3
    given = xp.asarray(numpy.full((rows, 4), rank + 1.0, "f4"))
    found = strategy().reduce(op, given, axis=axis)
    weights = numpy.arange(1, size + 1) if axis != -1 else numpy.ones(size)
    along = {0: 1, (0, 1): 4, -1: 4}[axis]
    total = along * float((weights * numpy.arange(1, size + 1)).sum())
    shape = {0: (4,), (0, 1): (), -1: (3,)}[axis]
    expected = total if op == "SUM" else total / (along * weights.sum())
    wanted = numpy.full(shape, expected, "f4")
    values_of = host(found)
    assert values_of.shape == shape and values_of.dtype == "f4"
    check_on_all_ranks(bool(numpy.allclose(values_of, wanted, rtol=1e-6)) or f"{values_of} in place of {wanted}")
