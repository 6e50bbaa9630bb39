"""The kernels of CUDA, compiled by the host's C++ compiler where there is one, on NumPy's arrays."""

import ctypes
import importlib
import itertools
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy
import pytest

from mpidist.device.answers import Limits
from mpidist.device.kernels import CHUNK
from mpidist.optimizers import LAMB, SGD, Adam, AdamW, RMSprop
from mpidist.optimizers.rule import Step

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile kernels")

#: What CUDA gives a kernel.  The threads of a block are threads of the host.
PRELUDE = """
#include <algorithm>
#include <cmath>
#include <pthread.h>
#define __global__
#define __device__
#define __shared__ static
using std::sqrt;
using std::fabs;
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, blockDim = {1};
static thread_local struct { unsigned x; } threadIdx = {0};
static pthread_barrier_t barrier;
static void __syncthreads() { if (blockDim.x > 1) pthread_barrier_wait(&barrier); }
extern "C" void set_threads(unsigned count) { blockDim.x = count; pthread_barrier_init(&barrier, nullptr, count); }
extern "C" void set_thread(unsigned number) { threadIdx.x = number; }
extern "C" void set_block(unsigned number) { blockIdx.x = number; }
"""
#: Threads of a block that wait for each other.
THREADS = 4
#: A finite float of 16 bits.
HALF = """
struct __half {
    unsigned short bits;
    __half() = default;
    explicit __half(float value) {
        int exponent = value == 0 ? -14 : std::max(std::ilogb(value), -14);
        int count = (int)std::nearbyint(std::ldexp(std::fabs(value), 10 - exponent));
        bits = (std::signbit(value) << 15) | (((exponent + 14) << 10) + count);
    }
    operator float() const {
        int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        float size = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
        return bits >> 15 ? -size : size;
    }
};
"""


class Array(numpy.ndarray):
    """An array of NumPy's that tells its address as CuPy's do."""

    @property
    def data(self):
        address = self.ctypes.data
        return SimpleNamespace(
            ptr=address, device_id=0, copy_to_host_async=lambda target, size: ctypes.memmove(target, address, size)
        )


def on_card(values):
    return numpy.array(values).view(Array)


class Kernels:
    """Compiles kernels, and notes what is launched."""

    def __init__(self, folder):
        self.folder, self.launched = folder, []
        (folder / "cuda_fp16.h").write_text(HALF)

    def compiled(self, text, name, options=()):
        source, library = self.folder / f"{name}.cpp", self.folder / f"{name}{len(list(self.folder.iterdir()))}.so"
        source.write_text(PRELUDE + text)
        flags = ("-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread", f"-I{self.folder}")
        subprocess.run(["g++", *flags, source, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library))
        count = THREADS if "__syncthreads" in text else 1
        loaded.set_threads(ctypes.c_uint(count))

        def work(thread, given):
            loaded.set_thread(ctypes.c_uint(thread))
            getattr(loaded, name)(*given)

        def launch(grid, threads, arguments):
            self.launched.append(name)
            given = list(map(c_argument, arguments))
            for block in range(grid[0]):
                loaded.set_block(ctypes.c_uint(block))
                if count == 1:
                    work(0, given)
                    continue
                with ThreadPoolExecutor(count) as pool:
                    list(pool.map(lambda thread: work(thread, given), range(count)))

        return launch


def c_argument(value):
    """Return what the host's C++ gets for an argument of a kernel."""
    if isinstance(value, (numpy.int32, numpy.float64)):
        return (ctypes.c_int if isinstance(value, numpy.int32) else ctypes.c_double)(value)
    return ctypes.c_void_p(value.data.ptr if isinstance(value, Array) else value)


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    library, found = ModuleType("cupy"), Kernels(tmp_path)
    library.ndarray = type("ndarray", (), {})
    library.asarray, library.RawKernel = on_card, found.compiled

    def multiply(*given, **options):
        found.launched.append("multiply")
        return numpy.multiply(*given, **options)

    library.multiply = multiply
    library.ascontiguousarray = lambda array, dtype: on_card(numpy.ascontiguousarray(array, dtype))
    library.empty = lambda shape: on_card(numpy.full(shape, numpy.nan))
    found.event_states = []
    library.cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=0),
        runtime=SimpleNamespace(getDevice=lambda: 0, eventQuery=lambda event: found.event_states.pop(0)),
        Device=type("Device", (nullcontext,), {"id": 0}),
        alloc_pinned_memory=bytearray,
        Event=lambda disable_timing: SimpleNamespace(ptr=0, record=lambda stream: None),
    )
    monkeypatch.setitem(sys.modules, "cupy", library)
    for name in ("cuda", "pinned"):
        monkeypatch.delitem(sys.modules, f"mpidist.device.{name}", raising=False)
    found.memory = importlib.import_module("mpidist.device.cuda").CudaMemory()
    yield found
    for name in ("cuda", "pinned"):
        sys.modules.pop(f"mpidist.device.{name}", None)


RULES = {
    "sgd": lambda: SGD(0.1, clipvalue=0.5),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.01, clipvalue=0.5),
    "adamw": lambda: AdamW(0.01),
}
SIZES = (1, 0, 7, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
@pytest.mark.parametrize("decays", [(0.0,), (0.0, 0.01, 0.0, 0.0, 0.01, 0.0, 0.0)])
def test_one_launch_has_the_bits_of_numpy(kernels, name, dtype, decays):
    rule, random = RULES[name](), numpy.random.default_rng(0)
    real = "f8" if dtype == "f8" else "f4"
    parameters = [random.normal(size=size).astype(dtype) for size in SIZES]
    slots = [[numpy.zeros(size, real) for _ in rule.slot_names] for size in SIZES]
    own, own_slots = list(map(on_card, parameters)), [list(map(on_card, each)) for each in slots]
    joint = kernels.memory.joint_update(own, own_slots)
    for number in range(3):
        steps = [Step(rule.coefficients(0.1, number), (1.0, 0.5, 2.0)[number], decay) for decay in decays]
        steps = steps if len(steps) > 1 else steps * len(SIZES)
        gradients = [random.normal(size=size).astype(dtype) for size in SIZES]
        for update in zip(parameters, gradients, slots, steps, strict=True):
            rule.update(*update)
        assert len(rule.in_formula(steps)[1]) == len(decays)
        joint.run(rule, list(map(on_card, gradients)), steps)
    assert kernels.launched == ["update"] * 3
    for expected, found in zip([*parameters, *sum(slots, [])], [*own, *sum(own_slots, [])], strict=True):
        assert found.dtype == expected.dtype
        numpy.testing.assert_array_equal(found, expected)


def test_each_dtype_is_a_launch_and_gradients_of_another_are_converted(kernels):
    pairs = [("f4", "f4"), ("f8", "f8"), ("f4", "f2"), ("f2", "f4"), ("f8", "i4")]
    parameters = [on_card(numpy.ones((2, 3), own)) for own, _ in pairs]
    gradients = [on_card(numpy.arange(6).reshape(3, 2).astype(other)).T for _, other in pairs]
    joint = kernels.memory.joint_update([each.reshape(-1) for each in parameters], [[]] * 5)
    joint.run(SGD(0.5), gradients, [Step((0.5,))] * len(pairs))
    assert [each.tolist() for each in parameters] == [[[1, 0, -1], [0.5, -0.5, -1.5]]] * len(pairs)
    assert len(kernels.launched) == 3


def test_a_sum_of_16_bits_in_float32_is_not_cut_down_before_it_is_scaled(kernels):
    """As of micro-batches under a loss scale: 1e5 is no float of 16 bits."""
    parameters = [on_card(numpy.zeros(3, "f2")), on_card(numpy.zeros(2, "f2"))]
    gradients = [on_card(numpy.full(3, 1e5, "f4")), on_card(numpy.full(2, 2, "f2"))]
    steps = [Step((1.0,), 2e-5), Step((1.0,), 0.5)]
    kernels.memory.joint_update(parameters, [[], []]).run(SGD(1.0), gradients, steps)
    assert [each.tolist() for each in parameters] == [[-2] * 3, [-1] * 2]
    assert kernels.launched == ["update"]


def test_names_of_a_formula_are_not_those_of_the_kernel(kernels):
    class Own(SGD):
        slot_names = ("at",)

        def formula(self, coefficients):
            return "real elements = g * k; at = elements; p -= i * elements;", {"k": coefficients[0], "i": 2.0}

    rule, (parameter, slot) = Own(0.5), [on_card(numpy.zeros(CHUNK + 3, "f4")) for _ in range(2)]
    rule.slot_names = Own.slot_names
    gradient = on_card(numpy.arange(CHUNK + 3, dtype="f4"))
    kernels.memory.joint_update([parameter], [[slot]]).run(rule, [gradient], [Step((0.5,))])
    numpy.testing.assert_array_equal(slot, gradient / 2)
    numpy.testing.assert_array_equal(parameter, -gradient)


NORMS = {"each": (2.0, True), "all": (3.0, False), "far": (1e9, False), "none": (None, False)}


@pytest.mark.parametrize("name, dtype", [("momentum", "f4"), ("adamw", "f8"), ("sgd", "f2")])
def test_gradients_are_within_the_limits_of_their_norms(kernels, name, dtype):
    """What is left is a step with the factors that NumPy finds; the factor of 0.5 is in all norms."""
    rule, random = RULES[name](), numpy.random.default_rng(0)
    real, tolerance = ("f8", 1e-14) if dtype == "f8" else ("f4", 1e-6 if dtype == "f4" else 1e-3)
    for norm, is_each in NORMS.values():
        parameters = [random.normal(size=size).astype(dtype) for size in SIZES]
        slots = [[numpy.zeros(size, real) for _ in rule.slot_names] for size in SIZES]
        own, own_slots = list(map(on_card, parameters)), [list(map(on_card, each)) for each in slots]
        gradients = [(random.normal(size=size) * scale).astype(dtype) for scale, size in enumerate(SIZES)]
        norms = numpy.array([numpy.linalg.norm(each.astype("f8")) for each in gradients]) / 2
        largest = numpy.maximum(norms if is_each else numpy.linalg.norm(norms), 1e-9)
        factors = numpy.full(7, 0.5) * (1 if norm is None else numpy.minimum(1, norm / largest))
        for update in zip(parameters, gradients, slots, [Step((0.1,), each, 0.01) for each in factors], strict=True):
            rule.update(*update)
        joint, limits = kernels.memory.joint_update(own, own_slots), Limits(0.5, norm, is_each, skips_nonfinite=False)
        assert joint.run(rule, list(map(on_card, gradients)), [Step((0.1,), 0.5, 0.01)] * len(SIZES), limits) is None
        for expected, found in zip([*parameters, *sum(slots, [])], [*own, *sum(own_slots, [])], strict=True):
            numpy.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert kernels.launched == ["measure", "judge", "update"] * len(NORMS)


@pytest.mark.parametrize("norm, is_each", NORMS.values(), ids=NORMS)
def test_a_rule_without_a_formula_gets_gradients_within_their_limits(kernels, norm, is_each):
    """Also what is empty; a step's factor stays a number."""

    class Noted(SGD):
        def update(self, parameter, gradient, slots, step):
            given.append((parameter.size, gradient.dtype, step.factor))
            parameter -= gradient * step.factor

    dtypes, given = ("f4", "f8", "f2", "f8", "f4", "f2", "f8"), []
    parameters = [on_card(numpy.zeros(size, dtype)) for size, dtype in zip(SIZES, dtypes, strict=True)]
    gradients = [on_card(numpy.full(each.shape, 1 + place, each.dtype)) for place, each in enumerate(parameters)]
    steps, limits = [Step((1.0,), 0.5)] * len(SIZES), Limits(0.5, norm, is_each, skips_nonfinite=False)
    kernels.memory.joint_update(parameters, [[]] * len(SIZES)).run(Noted(1.0), gradients, steps, limits)
    kinds = [numpy.dtype("f4" if each == "f2" and norm is not None else each) for each in dtypes]
    assert given == [(size, kind, 0.5) for size, kind in zip(SIZES, kinds, strict=True)]
    norms = numpy.array([size**0.5 * (1 + place) / 2 for place, size in enumerate(SIZES)])
    largest = numpy.maximum(norms if is_each else numpy.full(7, numpy.linalg.norm(norms)), 1e-9)
    factors = numpy.full(7, 0.5) * (1 if norm is None else numpy.minimum(1, norm / largest))
    for place, (found, factor) in enumerate(zip(parameters, factors, strict=True)):
        numpy.testing.assert_allclose(found, numpy.full(found.shape, -(1 + place) * factor), rtol=1e-3)
    assert kernels.launched == ["measure"] * 3 + ["judge"] + ["multiply"] * (0 if norm is None else 5)


def test_a_rule_without_a_formula_waits_whether_a_step_is_left_out(kernels):
    parameter, rule = on_card(numpy.zeros(CHUNK + 1)), RMSprop(1.0, rho=0.0, epsilon=0.0)
    slots, limits = [on_card(numpy.zeros(CHUNK + 1))], Limits(1.0, None, False, skips_nonfinite=True)
    joint = kernels.memory.joint_update([parameter], [slots])
    for bad, made in ((numpy.nan, 0), (2.0, 1), (-numpy.inf, 1), (3.0, 2)):
        gradient = on_card(numpy.full(CHUNK + 1, 2.0))
        gradient[-1] = bad
        kernels.event_states[:] = [600, 600, 0]
        answer = joint.run(rule, [gradient], [Step((1.0,))], limits)
        assert not kernels.event_states
        kernels.event_states[:] = [0]
        assert answer() == (not numpy.isfinite(bad))
        kernels.event_states[:] = [0]
        assert (parameter == -made).all()


def test_a_step_with_a_gradient_that_is_not_finite_is_left_out(kernels):
    rule = SGD(1.0, momentum=0.5)
    places, bads = [(2, 6), (5, 0), (5, CHUNK), (5, 3 * CHUNK - 2)], [numpy.nan, numpy.inf, -numpy.inf]
    for (norm, is_each), (tensor, element), bad in itertools.product(NORMS.values(), places, bads):
        parameters, slots = [[on_card(numpy.ones(size)) for size in SIZES] for _ in range(2)]
        gradients = [on_card(numpy.full(size, 0.25)) for size in SIZES]
        joint = kernels.memory.joint_update(parameters, [[each] for each in slots])
        limits, steps = Limits(1.0, norm, is_each, skips_nonfinite=True), [Step((1.0,))] * len(SIZES)
        gradients[tensor][element] = bad
        answer = joint.run(rule, gradients, steps, limits)
        kernels.event_states[:] = [600, 600, 0]
        assert answer() and not kernels.event_states
        assert all((each == 1).all() for each in [*parameters, *slots])
        gradients[tensor][element] = 0.25
        kernels.event_states[:] = [0, 0]  # of the first answer, and of the second one
        answer = joint.run(rule, gradients, steps, limits)
        assert not answer()
        assert all((each != 1).all() for each in parameters)
        kernels.memory = type(kernels.memory)()


def test_a_norm_that_is_not_finite_hides_nothing(kernels):
    for is_each, bad in itertools.product((False, True), (numpy.nan, numpy.inf)):
        parameters = [on_card(numpy.zeros(size)) for size in (3, CHUNK + 1, 2)]
        gradients = [on_card(numpy.ones(each.size)) for each in parameters]
        gradients[1][-1] = bad
        joint = kernels.memory.joint_update(parameters, [[], [], []])
        joint.run(SGD(1.0), gradients, [Step((1.0,))] * 3, Limits(1.0, 0.5, is_each, skips_nonfinite=False))
        assert [numpy.isnan(each).all() for each in parameters] == [not is_each, True, not is_each]
        assert not is_each or parameters[0].tolist() == pytest.approx([-0.5 / 3**0.5] * 3)


def test_large_and_small_gradients_are_finite(kernels):
    """Squares of large floats of 64 bits are infinite, the floats are not; of 32 and 16 bits they are finite."""
    cases = [("f8", 1e200, False), ("f4", 3e38, True), ("f2", 6e4, True), ("f8", 5e-324, True)]
    for dtype, value, has_norm in cases:
        parameter, gradient = on_card(numpy.zeros(4, dtype)), on_card(numpy.full(4, value, dtype))
        joint = kernels.memory.joint_update([parameter], [[]])
        kernels.event_states += [0] * 2
        answer = joint.run(SGD(1.0), [gradient], [Step((1.0,))], Limits(1.0, 1.0, False, skips_nonfinite=True))
        assert not answer()
        assert numpy.isnan(parameter).all() != has_norm
        kernels.memory = type(kernels.memory)()
        kernels.event_states.clear()
        if has_norm and value > 1:
            assert parameter.tolist() == pytest.approx([-0.5] * 4)


def test_gradients_of_several_dtypes_have_one_norm(kernels):
    """Of 16 elements of 3 and 9 of 4 it is 12 * 2 ** 0.5."""
    dtypes = ("f8", "f4", "f8", "f2", "f4")
    given = [(16, 3), (0, 1), (4, 4), (3, 4), (2, 4)]
    parameters = [on_card(numpy.zeros(size, dtype)) for dtype, (size, _) in zip(dtypes, given, strict=True)]
    gradients = [on_card(numpy.full(size, value, dtype)) for dtype, (size, value) in zip(dtypes, given, strict=True)]
    for is_each in (False, True):
        for each in parameters:
            each[...] = 0
        joint, launched = kernels.memory.joint_update(parameters, [[]] * 5), len(kernels.launched)
        joint.run(SGD(1.0), gradients, [Step((1.0,))] * 5, Limits(1.0, 1.0, is_each, skips_nonfinite=False))
        assert kernels.launched[launched:] == ["measure"] * 3 + ["judge"] + ["update"] * 3
        for parameter, (size, value) in zip(parameters, given, strict=True):
            norm = value * max(size, 1) ** 0.5 if is_each else 12 * 2**0.5
            numpy.testing.assert_allclose(parameter, numpy.full(size, -value / norm), rtol=1e-3)


def test_the_same_gradients_have_the_same_bits_of_a_norm(kernels):
    random, found = numpy.random.default_rng(0), set()
    gradient = on_card(random.normal(size=5 * CHUNK + 17))
    for _ in range(3):
        parameter = on_card(numpy.zeros(gradient.size))
        joint = kernels.memory.joint_update([parameter], [[]])
        joint.run(SGD(1.0), [gradient], [Step((1.0,))], Limits(1.0, 1.0, False, skips_nonfinite=False))
        found.add(parameter.tobytes())
    assert len(found) == 1


def test_pinned_memory_is_kept_while_an_answer_is_under_way(kernels):
    parameter = on_card(numpy.zeros(3))
    joint, limits = kernels.memory.joint_update([parameter], [[]]), Limits(1.0, None, False, skips_nonfinite=True)
    flags = []
    for state in ([], [600], [0, 600]):
        kernels.event_states += state
        flags.append(weakref.ref(joint.run(SGD(1.0), [parameter], [Step((1.0,))], limits)._flags))
    assert [each() is None for each in flags] == [True, False, False]


def test_what_the_kernel_does_not_take_or_is_empty_is_not_launched(kernels):
    assert kernels.memory.joint_update([on_card(numpy.ones(3, "i4")), on_card(numpy.ones(3))], [[], []]) is None
    kernels.memory.joint_update([on_card([])], [[]]).run(SGD(0.5), [on_card([])], [Step((0.5,))])
    assert not kernels.launched


def test_a_class_with_a_rule_of_its_own_has_not_the_formula_of_its_base():
    class Ruled(Adam):
        def update_slice(self, parameter, gradient, slots, scratch, coefficients):
            parameter -= 2 * gradient

    class Updated(SGD):
        def update(self, parameter, gradient, slots, step):
            parameter[...] = numpy.rint(parameter - gradient)

    class Both(Ruled):
        def update_slice(self, parameter, gradient, slots, scratch, coefficients):
            parameter -= 3 * gradient

        def formula(self, coefficients):
            return "p -= 3 * g;", {}

    class Rated(Both):
        def coefficients(self, learning_rate, iterations):
            return (2 * learning_rate,)

    rules = [Adam, AdamW, SGD, RMSprop, LAMB, Ruled, Updated, Both, Rated]
    assert [kind for kind in rules if kind().has_formula] == [Adam, AdamW, SGD, Both, Rated]


@pytest.mark.parametrize(
    "own, flat", [("f2", "f4"), ("f4", "f4"), ("i4", "f8"), ("u1", "f8"), ("f8", "f4"), ("f2", "f2")]
)
def test_tensors_are_packed_and_unpacked_by_one_launch_each(kernels, own, flat):
    sizes = [1, 0, 70_000, 3]
    ends = numpy.cumsum([0, *sizes])
    values = numpy.arange(ends[-1]) % 101
    tensors = [on_card(values[a:b].astype(own)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    packing, together = kernels.memory.packing(ends.tolist()), on_card(numpy.zeros(ends[-1], flat))
    packing.pack(tensors, together)
    numpy.testing.assert_array_equal(together, values)
    back = [on_card(numpy.zeros_like(each)) for each in tensors]
    packing.unpack(together, back)
    for expected, found in zip(tensors, back, strict=True):
        assert found.dtype == own
        numpy.testing.assert_array_equal(found, expected)
    assert kernels.launched == ["move" if own == flat else "convert"] * 2
    packing = kernels.memory.packing([0, 0, 0])
    packing.pack([on_card(numpy.zeros(0, own))] * 2, on_card(numpy.zeros(0, flat)))
    assert len(kernels.launched) == 2


@pytest.mark.parametrize(
    "own, flat", [("f2", "f4"), ("f4", "f4"), ("f8", "f8"), ("i4", "f8"), ("i8", "f8"), ("u1", "f8"), ("c8", "c8")]
)
@pytest.mark.parametrize("sizes", [[1, 0, 70_000, 3], [1000]], ids=["list", "alone"])
def test_a_factor_is_rounded_as_numpy_does_in_the_same_launch(kernels, own, flat, sizes):
    """Factor and product are each rounded to the dtype of the flat array; 16 bits are rounded after that.

    So NumPy multiplies an array of that dtype by a number of Python's.  Of complex numbers it makes a product of four.
    """
    ends, factor = numpy.cumsum([0, *sizes]), 1 / 3
    values = ((numpy.arange(ends[-1]) * 7 + 1) % 101).astype(own)
    expected = numpy.multiply(values.astype(flat), factor)
    tensors = [on_card(values[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    packing, together = kernels.memory.packing(ends.tolist()), on_card(numpy.zeros(ends[-1], flat))
    packing.pack(tensors, together, factor)
    numpy.testing.assert_array_equal(together, expected)
    back = [on_card(numpy.zeros_like(each)) for each in tensors]
    packing.unpack(together, back, factor)
    found, expected = numpy.concatenate(back), numpy.multiply(expected, factor).astype(own)
    assert found.dtype == own
    numpy.testing.assert_array_equal(found, expected)
    if len(sizes) == 1:
        assert kernels.launched == ["multiply"] * 2
    else:
        assert kernels.launched == (["convert"] * 2 if own != "c8" else ["move", "multiply", "multiply", "move"])


def test_a_factor_that_rounds_to_0_makes_zeros(kernels):
    """A factor of 5e-324 in 64 bits is 0 in 32."""
    packing, together = kernels.memory.packing([0, 2, 3]), on_card(numpy.ones(3, "f4"))
    for factor in (0.0, 5e-324):
        packing.pack([on_card(numpy.ones(2, "f4")), on_card(numpy.ones(1, "f4"))], together, factor)
        assert together.tolist() == [0, 0, 0]
