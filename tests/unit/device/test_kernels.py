"""The kernels of CUDA, compiled by the host's C++ compiler where there is one, on NumPy's arrays."""

import ctypes
import importlib
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy
import pytest

from mpidist.device.kernels import CHUNK
from mpidist.optimizers import LAMB, SGD, Adam, AdamW, RMSprop
from mpidist.optimizers.rule import Step

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile kernels")

#: What CUDA gives a kernel.  One thread does the work of a block.
PRELUDE = """
#include <algorithm>
#include <cmath>
#define __global__
#define __device__
using std::sqrt;
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, threadIdx = {0}, blockDim = {1};
extern "C" void set_block(unsigned number) { blockIdx.x = number; }
"""
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
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


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
        flags = ("-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC", f"-I{self.folder}")
        subprocess.run(["g++", *flags, source, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library))

        def launch(grid, threads, arguments):
            self.launched.append(name)
            given = [
                ctypes.c_int(each) if isinstance(each, numpy.int32) else ctypes.c_void_p(getattr(each, "ptr", each))
                for each in (each.data if isinstance(each, Array) else each for each in arguments)
            ]
            for block in range(grid[0]):
                loaded.set_block(ctypes.c_uint(block))
                getattr(loaded, name)(*given)

        return launch


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    library, found = ModuleType("cupy"), Kernels(tmp_path)
    library.ndarray = type("ndarray", (), {})
    library.asarray, library.RawKernel = on_card, found.compiled
    library.ascontiguousarray = lambda array, dtype: on_card(numpy.ascontiguousarray(array, dtype))
    library.cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=0), runtime=SimpleNamespace(getDevice=lambda: 0)
    )
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.delitem(sys.modules, "mpidist.device.cuda", raising=False)
    found.memory = importlib.import_module("mpidist.device.cuda").CudaMemory()
    yield found
    sys.modules.pop("mpidist.device.cuda", None)


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
