"""Every way through memory on real ranks, in the same grid: values, bits, what callers may do with their arrays.

On one node these are segments of each size, the sum of two in one step, and reading the other ranks' memory; on several
(``MPIDIST_VIRTUAL_NODES``, see `tests/jobs/test_engine.py`) the two levels.  Every rank knows what the others give, so
what is expected is worked out from that, in float64.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import random
import re
import tracemalloc
from functools import reduce

import ml_dtypes
import numpy
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.collectives.reductions import gradient_buffers, plan_cache, update
from mpidist.collectives.reductions.gradient_buffers import GradientBuffers
from mpidist.collectives.reductions.plan_cache import Bindings
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.selection import Way
from mpidist.optimizers import SGD, Adam, AdamW
from mpidist.runtime.board import StatusBoard
from mpidist.schedules.table import names
from mpidist.testing.conformance import assert_same_values, special, special_reduced
from mpidist.transports.node_memory import SharedSegments
from mpidist.world import world_communicator

pytestmark = pytest.mark.mpi

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
FLOATS = [numpy.dtype(name) for name in ("f2", "f4", "f8")] + [BFLOAT16]
INTEGERS = [numpy.dtype(name) for name in ("i1", "u2", "i4", "i8")]

#: What each kind of dtype can be reduced by, and how numpy does it.
NUMPY = {"sum": numpy.add, "mean": numpy.add, "min": numpy.minimum, "max": numpy.maximum, "prod": numpy.multiply}
GRID = [(dtype, op) for dtype in FLOATS + INTEGERS for op in NUMPY]
GRID += [(numpy.dtype("c8"), op) for op in ("sum", "mean", "prod")] + [(numpy.dtype("?"), op) for op in ("min", "max")]


@pytest.fixture
def communicator():
    return world_communicator()


def _all_ways(communicator):
    """Return the ways that work on segments here; on one rank the only one there is."""
    if communicator.size == 1:
        return [Way("none")]
    facts = communicator.facts()
    if facts.topology.node_count > 1:
        return [Way("two_level", selection.SEGMENT_BYTES)] if facts.has_segments else [Way("hierarchical")]
    found = [Way("shared_memory", size) for size in (1 << 20, 1 << 19, 1 << 18)]
    return found[2:] if communicator.size > 4 else found  # many ranks share few cores where this is tested


def _by(way, communicator, monkeypatch):
    """Make one way the only one, and return the fused all-reduce by it."""
    monkeypatch.setattr(communicator, "way", lambda *args: way)
    monkeypatch.setattr(communicator, "bindings", Bindings())  # or what is bound to another way would be found
    return Engine(communicator, algorithm=None if way.algorithm == "none" else way.algorithm)


def _agree(communicator, problem):
    """Fail on all ranks together, so that they stay in step; `problem` is what was wrong here, empty for nothing."""
    answers = communicator.exchange(problem.encode())
    assert answers == [b""] * communicator.size, [answer.decode() for answer in answers]


def _same_bits(communicator, found):
    digest = hashlib.blake2b(b"".join(array.tobytes() for array in found)).digest()
    assert len(set(communicator.exchange(digest))) == 1


def _values(rank, count, dtype):
    """Return what a rank gives: small whole numbers, of which sums and products are exact in every dtype here."""
    pattern = (numpy.arange(count) * 7 + rank * 3) % 5
    if dtype.kind == "b":
        return pattern == rank % 5
    return pattern.astype(dtype)


def _expected(size, count, dtype, op):
    wide = numpy.dtype("?") if dtype.kind == "b" else numpy.dtype("c16" if dtype.kind == "c" else "f8")
    total = reduce(NUMPY[op], [_values(rank, count, dtype).astype(wide) for rank in range(size)])
    if op == "mean":
        total = total / size
    return total.astype("f8" if op == "mean" and dtype.kind in "iu" else dtype)


def _is_exact(dtype, op, size):
    """Whether the result has no rounding, so that the order of additions cannot matter."""
    return not (op == "mean" and size & (size - 1))


def _problem(found, expected, exact):
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype}{found.shape} in place of {expected.dtype}{expected.shape}"
    if exact:
        return "" if numpy.array_equal(found, expected) else "values differ"
    eps = 0 if found.dtype.kind in "iub" else float(ml_dtypes.finfo(found.dtype).eps)
    wide = "c16" if found.dtype.kind == "c" else "f8"
    return "" if numpy.allclose(found.astype(wide), expected.astype(wide), rtol=2 * eps, atol=0) else "values differ"


def _fits(dtype, op, size):
    """Whether the greatest product or sum of the grid is a number of the dtype."""
    most = 4.0**size if op == "prod" else 4.0 * size
    return dtype.kind == "b" or most < float(
        numpy.iinfo(dtype).max if dtype.kind in "iu" else ml_dtypes.finfo(dtype).max
    )


@pytest.mark.parametrize(("dtype", "op"), GRID, ids=[f"{dtype.name}-{op}" for dtype, op in GRID])
def test_every_dtype_operation_and_length(communicator, monkeypatch, dtype, op):
    size, rank = communicator.size, communicator.rank
    if not _fits(dtype, op, size):
        op = "max"
    problems = []
    for way in _all_ways(communicator) + [Way("native")] * (size > 1):
        fused = _by(way, communicator, monkeypatch)
        for count in sorted({0, 1, max(0, size - 1), size, size + 1, 1001}):
            given_one = _values(rank, count, dtype)
            (one,) = fused([given_one], op)
            pair = fused([_values(rank, count, dtype), numpy.array(rank, "f8")], op)
            expected = _expected(size, count, dtype, op)
            found = [_problem(each, expected, _is_exact(dtype, op, size)) for each in (one, pair[0])]
            problems += [f"{way.label}, {count}: {text}" for text in found if text]
            if not numpy.array_equal(given_one, _values(rank, count, dtype)):
                problems.append(f"{way.label}, {count}: the caller's array was changed")
    _agree(communicator, "; ".join(problems))


@pytest.mark.parametrize("dtype", FLOATS, ids=[dtype.name for dtype in FLOATS])
@pytest.mark.parametrize("op", NUMPY)
def test_special_values_by_every_way(communicator, monkeypatch, dtype, op):
    """NaN, infinities, -0.0 and denormals: one meaning, whatever carries them; 16-bit floats are reduced in 32 bits."""
    size, rank = communicator.size, communicator.rank
    by_messages = ["native", *names("all_reduce"), "hierarchical"] if size > 1 else []
    work = "f4" if dtype.itemsize == 2 else dtype
    pattern = special_reduced(op, [special(dtype, each, size).astype(work) for each in range(size)]).astype(dtype)
    problems = []
    for way in _all_ways(communicator) + [Way(name) for name in by_messages]:
        fused = _by(way, communicator, monkeypatch)
        for count in (pattern.size, 40_000):  # of 32 bits, on both sides of what goes in one step
            (found,) = fused([numpy.resize(special(dtype, rank, size), count)], op)
            problems += _unlike(found, numpy.resize(pattern, count), f"{way.label}, {count}")
    _agree(communicator, "; ".join(problems))


@pytest.mark.parametrize("op", NUMPY)
def test_special_values_by_every_verb(communicator, op):
    size, rank = communicator.size, communicator.rank
    total = special_reduced(op, [special("f4", each, size) for each in range(size)])
    mine, problems = special("f4", rank, size), []
    for algorithm in [None, "native", "ring"] if size > 1 else [None]:
        if op != "mean":
            in_place = mine.copy()
            communicator.all_reduce(in_place, op, algorithm)
            problems += _unlike(in_place, total, f"all_reduce, {algorithm}")
        (bound,) = communicator.all_reduce_init([mine], op, algorithm=algorithm).start([mine]).wait()
        problems += _unlike(bound, total, f"all_reduce_init, {algorithm}")
    shares = [slice(each * total.size // size, (each + 1) * total.size // size) for each in range(size)]
    problems += _unlike(communicator.reduce_scatter(mine, op), total[shares[rank]], "reduce_scatter")
    problems += _unlike(communicator.reduce_scatter_init(mine, op)(mine), total[shares[rank]], "reduce_scatter_init")
    public = {"prod": "product"}.get(op, op)
    problems += _unlike(mpidist.all_reduce(mine, public), total, "mpidist.all_reduce")
    problems += _unlike(mpidist.MultiWorkerMirroredStrategy().reduce(public, mine, axis=None), total, "Strategy.reduce")
    _agree(communicator, "; ".join(problems))


def _unlike(found, expected, what):
    """Return a line if special values are not those that are expected."""
    try:
        assert found.dtype == expected.dtype
        assert_same_values(found, expected)
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []


@pytest.mark.parametrize("dtype", [FLOATS[1], BFLOAT16, INTEGERS[2]], ids=["float32", "bfloat16", "int32"])
def test_tensors_that_straddle_segments(communicator, monkeypatch, dtype):
    """Several segments and a bit, in tensors of which none ends where a segment does; another dtype between them."""
    size, rank = communicator.size, communicator.rank
    problems = []
    for way in _all_ways(communicator):
        fused = _by(way, communicator, monkeypatch)
        step = max(way.segment_bytes, 1 << 16) // 4
        counts = [step - 3, 1, 2 * step + 7, 0, 5, step // 2 + 1]
        tensors = [_values(rank, count, dtype) for count in counts]
        tensors.insert(2, _values(rank, 77, numpy.dtype("f8")))
        found = fused(tensors)
        *before, other = [*found[:2], *found[3:], found[2]]
        for result, count in zip(before, counts, strict=True):
            text = _problem(result, _expected(size, count, dtype, "sum"), True)
            problems += [f"{way.label}, {count}: {text}"] if text else []
        problems += [_problem(other, _expected(size, 77, numpy.dtype("f8"), "sum"), True)]
    _agree(communicator, "; ".join(filter(None, problems)))


LAYOUTS = {
    "C": lambda values: values,
    "Fortran": numpy.asfortranarray,
    "gaps": lambda values: numpy.repeat(values, 2, axis=-1)[..., ::2],
    "backwards": lambda values: values[::-1].copy()[::-1],
    "axes turned": lambda values: numpy.moveaxis(numpy.ascontiguousarray(numpy.moveaxis(values, 0, -1)), -1, 0),
}


#: Every rank draws the same, and none looks for a smaller example by itself.
same_everywhere = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)

#: A tensor: shape, dtype, and how it lies in memory on even and odd ranks.
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3) | st.integers(0, 60_000).map(lambda count: [count])
layouts = st.sampled_from(list(LAYOUTS))
tensor = st.tuples(shapes, st.sampled_from(FLOATS), layouts, layouts)


def _laid_out(rank, number, shape, dtype, even, odd):
    values = numpy.random.default_rng([rank, number]).normal(size=shape).astype(dtype)
    return values, LAYOUTS[odd if rank % 2 else even](values)


def _is_near(found, terms, op):
    """Whether the sum is that of the terms in float64, but for the rounding of float32 sums and of the result."""
    exact = sum(term.astype("f8") for term in terms) / (len(terms) if op == "mean" else 1)
    scale = sum(numpy.abs(term.astype("f8")) for term in terms)
    added = 2.0**-53 if found.dtype.itemsize == 8 else 2.0**-24
    bound = (len(terms) + 1) * added * scale + float(ml_dtypes.finfo(found.dtype).eps) * numpy.abs(exact)
    tiny = float(ml_dtypes.finfo(found.dtype).smallest_subnormal)
    return found.shape == exact.shape and bool((numpy.abs(found.astype("f8") - exact) <= bound + tiny).all())


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_random_lists_however_they_lie_in_memory(communicator, op):
    @same_everywhere
    @given(st.lists(tensor, min_size=1, max_size=7), st.integers(0, 20))
    def check(drawn, way_number):
        size, rank = communicator.size, communicator.rank
        way = _all_ways(communicator)[way_number % len(_all_ways(communicator))]
        with pytest.MonkeyPatch.context() as patch:
            fused = _by(way, communicator, patch)
            mine = [_laid_out(rank, number, *each)[1] for number, each in enumerate(drawn)]
            for _ in range(2):  # the second time the plan is there
                found = fused(mine, op)
        near = [
            _is_near(result, [_laid_out(other, number, *each)[0] for other in range(size)], op)
            for number, (each, result) in enumerate(zip(drawn, found, strict=True))
        ]
        _agree(communicator, "" if all(near) else f"{way.label}: {near} of {drawn}")
        _same_bits(communicator, found)

    check()


def test_memory_orders_that_change_from_step_to_step_on_one_rank(communicator):
    """The lists are long enough to go by segments: all ranks must take the same way in the same step."""
    size, rank = communicator.size, communicator.rank
    fused = Engine(communicator)
    problems = []
    for step in range(40):
        layout = list(LAYOUTS)[step % 3] if rank == size - 1 else "C"
        (found,) = fused([LAYOUTS[layout](numpy.full((700, 800), rank + step, "f4"))])
        if not (found == step * size + size * (size - 1) // 2).all():
            problems.append(f"step {step}")
    _agree(communicator, "; ".join(problems))


def test_results_stay_as_they_are_when_the_next_calls_are_made(communicator, monkeypatch):
    size, rank = communicator.size, communicator.rank
    problems = []
    for way in _all_ways(communicator):
        fused = _by(way, communicator, monkeypatch)
        kept = [(step, fused([numpy.full(70_000, rank + step, "f4"), numpy.full(3, step)])) for step in range(6)]
        for step, (long, short) in kept:
            right = (long == step * size + size * (size - 1) // 2).all() and (short == step * size).all()
            problems += [] if right else [f"{way.label}: result {step}"]
            long += 1  # the caller may write to them, and to its own gradients
    _agree(communicator, "; ".join(problems))


def test_a_caller_may_write_to_its_tensors_as_soon_as_the_call_returns(communicator, monkeypatch):
    size, rank = communicator.size, communicator.rank
    problems = []
    for way in _all_ways(communicator):
        fused = _by(way, communicator, monkeypatch)
        tensor, wrong = numpy.empty(300_000, "f4"), 0
        for step in range(8):
            tensor[...] = rank + step
            (found,) = fused([tensor])
            tensor[...] = -1e9
            wrong += not (found == step * size + size * (size - 1) // 2).all()
        problems += [f"{way.label}: {wrong} steps"] if wrong else []
    _agree(communicator, "; ".join(problems))


def test_ways_add_in_the_same_order(communicator, monkeypatch):
    """Segments of every size give the same bits; so do one tensor and a list of its parts."""
    values = numpy.random.default_rng(communicator.rank).normal(size=400_003).astype("f4")
    results = []
    for way in _all_ways(communicator):
        fused = _by(way, communicator, monkeypatch)
        whole = fused([values], "mean")[0].tobytes()
        parts = b"".join(part.tobytes() for part in fused([values[:5], values[5:300_000], values[300_000:]], "mean"))
        results += [whole, parts]
    one_order = communicator.topology.node_count <= 2
    _agree(communicator, "" if len(set(results)) == 1 or not one_order else "bits differ")
    _same_bits(communicator, [values[:0], numpy.frombuffer(results[0], "u1")])


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_gradient_buffers(communicator, dtype, monkeypatch):
    monkeypatch.setattr(gradient_buffers, "_LONG_BYTES", 1 << 18)
    size, rank = communicator.size, communicator.rank
    shapes = [(1000, 300), (), (0,), (3,), (77, 2, 5)]
    with_buffers = communicator.segments is not None
    if with_buffers:
        buffers = GradientBuffers(communicator, [("", numpy.dtype(dtype), shape) for shape in shapes])
        arrays, all_reduce = buffers.hand_out(), lambda op: buffers.reduced(op, None)
    else:
        arrays = [numpy.zeros(shape, dtype) for shape in shapes]
        fused = Engine(communicator)
        all_reduce = lambda op: fused(arrays, op)  # noqa: E731
    kept, problems = [], []
    for step in range(5):
        for number, array in enumerate(arrays):
            array[...] = number + rank + step
        kept.append(all_reduce("max" if step == 3 else "sum"))
        for array in arrays:
            array[...] = -7
    for step, results in enumerate(kept):
        for number, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            total = size * (number + step) + size * (size - 1) // 2
            expected = number + size - 1 + step if step == 3 else total
            if result.shape != shape or not (result == expected).all():
                problems.append(f"step {step}, tensor {number}")
    _agree(communicator, "; ".join(problems))


OPTIMIZERS = {
    "momentum": lambda: SGD(0.5, momentum=0.9, weight_decay=0.1),
    "adam": lambda: Adam(0.1),
    "adamw": lambda: AdamW(0.1, weight_decay=0.01),
}


def _trained(strategy, make, gradients_of, in_buffers=False):
    """Return parameters and slots after three steps; gradients are whole numbers, whose sums are exact."""
    shapes = [(1000, 300), (7,), (), (211, 13)]
    with strategy.scope():
        variables = [mpidist.Variable(numpy.ones(shape, "f4"), name=f"v{n}") for n, shape in enumerate(shapes)]
        optimizer = make()
    buffers = strategy.extended.gradient_buffers(variables) if in_buffers else None
    for step in range(3):
        gradients = [gradients_of(step, number, shape) for number, shape in enumerate(shapes)]
        if buffers is not None:
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer[...] = gradient
            gradients = buffers
        strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    slots = [slot for variable in variables for slot in optimizer.slots(variable).values()]
    return [variable.value.copy() for variable in variables] + [numpy.array(slot) for slot in slots]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("in_buffers", [False, True], ids=["arrays", "buffers"])
def test_sharded_updates_are_those_of_one_rank(communicator, monkeypatch, name, in_buffers):
    size = communicator.size
    monkeypatch.setattr(update, "LEAST_BYTES", 1)

    def one(rank, step, number, shape):
        return (numpy.arange(numpy.prod(shape, dtype=int)) % 7 - rank + step + number).reshape(shape).astype("f4")

    def of_all(*which):
        return sum(one(rank, *which) for rank in range(size))

    alone = _trained(mpidist.OneDeviceStrategy("/cpu:0"), OPTIMIZERS[name], of_all)
    for way in _all_ways(communicator):
        monkeypatch.setattr(communicator, "way", lambda *args, way=way: way)
        monkeypatch.setattr(communicator, "bindings", Bindings())  # ways and segments change for this test only
        for module in (update, gradient_buffers):  # a rank owns the same elements wherever gradients are
            monkeypatch.setattr(module, "SEGMENT_BYTES", way.segment_bytes)
        found = _trained(
            mpidist.MultiWorkerMirroredStrategy(),
            OPTIMIZERS[name],
            lambda *which: one(communicator.rank, *which),
            in_buffers,
        )
        near = [numpy.allclose(ours, theirs, rtol=1e-6, atol=1e-6) for ours, theirs in zip(found, alone, strict=True)]
        _agree(communicator, "" if all(near) else f"{way.label}: {near}")
        _same_bits(communicator, found)


def _growth(step, warm_up, steps):
    """Return by how many bytes memory grew at most during so many calls of `step`, numpy's arrays included."""
    for _ in range(warm_up):
        step()
    tracemalloc.start()
    try:
        step()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(steps):
            step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


#: What a call may take for lists, views, numbers and messages under way.  33,040 bytes were seen; one buffer of the
#: tests below has megabytes.
FEW_BYTES = 1 << 17


def test_no_buffer_is_made_after_the_first_steps_of_an_all_reduce(communicator, monkeypatch):
    gradients = [numpy.ones(shape, "f4") for shape in [(1000, 500), (500,), (300, 700), (7, 11)]]
    gradients += [numpy.ones((300, 200), "f2"), numpy.asfortranarray(numpy.ones((400, 300))), numpy.ones(90_000)[::3]]
    problems, kept = [], []
    for way in _all_ways(communicator):
        fused = _by(way, communicator, monkeypatch)

        def step(fused=fused):
            kept[:] = fused(gradients)  # results are held for a step, as a training loop does

        grown = _growth(step, 4, 10)
        problems += [f"{way.label}: {grown} bytes"] if grown > FEW_BYTES else []
    _agree(communicator, "; ".join(problems))


@pytest.mark.parametrize("in_buffers", [False, True], ids=["arrays", "buffers"])
def test_no_buffer_is_made_after_the_first_steps_of_an_update(communicator, monkeypatch, in_buffers):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)
    problems = []
    for way in _all_ways(communicator):
        monkeypatch.setattr(communicator, "way", lambda *args, way=way: way)
        monkeypatch.setattr(communicator, "bindings", Bindings())
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(numpy.ones(shape, "f4")) for shape in [(1000, 700), (700,), (333, 100)]]
            optimizer = Adam(0.1)
        gradients = [numpy.ones(variable.shape, "f4") for variable in variables]
        gradients[2] = numpy.asfortranarray(gradients[2])
        if in_buffers:
            gradients = strategy.extended.gradient_buffers(variables)
        pairs = list(zip(gradients, variables, strict=True))
        grown = _growth(lambda s=strategy, o=optimizer, p=pairs: s.run(o.apply_gradients, args=(p,)), 4, 10)
        problems += [f"{way.label}: {grown} bytes"] if grown > FEW_BYTES else []
    _agree(communicator, "; ".join(problems))


def test_shared_memory_is_a_few_megabytes_a_rank_however_long_the_buffer(communicator):
    segments = communicator.segments
    if segments is None:
        assert communicator.size == 1 or communicator.topology.node_count > 1
        return
    Engine(communicator, algorithm="shared_memory")([numpy.ones(20_000_000, "f4")])
    with open("/proc/self/smaps") as lines:
        text = lines.read()
    ours = re.findall(r"memfd:mpidist.*\nSize: +(\d+) kB", text)
    world = -(-SharedSegments.nbytes(communicator.size, segments.segment_bytes, segments.place_bytes) // 1024)
    board = 8 + StatusBoard.nbytes(communicator.size) // 1024
    found = any(world <= int(kibibytes) <= world + board for kibibytes in ours)  # others are of gradient buffers
    _agree(communicator, "" if found and world <= 5 * 1024 * communicator.size else f"{world} KiB, mapped {ours}")


def _resident():
    """How many bytes this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc to read the memory from")
def test_memory_is_bounded_however_many_lists_there_are_and_whoever_holds_results(communicator, monkeypatch):
    monkeypatch.setattr(plan_cache, "_LEAST_BYTES", 1 << 24)
    fused, size = Engine(communicator), communicator.size
    every, own = random.Random(1), random.Random(communicator.rank)
    held, wrong, resident = [], 0, 0
    gc.disable()
    try:
        for step in range(500):
            count = every.choice([1, 3, 100])
            shapes = [(every.randint(1, 1_000_000 // count),) for _ in range(count)]
            results = fused([numpy.full(shape, communicator.rank + step % 5, "f4") for shape in shapes])
            total = size * (step % 5) + size * (size - 1) // 2
            wrong += not all((each == total).all() for each in results)
            if own.random() < communicator.rank / size:
                held.append((own.choice(results), total))
            del held[: -own.randint(1, 5)], results
            resident = resident or (step == 20 and _resident())
        wrong += not all((each == total).all() for each, total in held)
        grown = (_resident() - resident) >> 20
    finally:
        gc.enable()
    kept = hashlib.blake2b(repr([plan.key for plan in communicator.bindings]).encode()).digest()
    assert len(set(communicator.exchange(kept))) == 1
    # 500 lists of 2 MB on average; of those that are kept, and held, there are at most some ten.
    _agree(communicator, "" if not wrong and grown < 150 else f"{wrong} wrong, {grown} MiB more")
