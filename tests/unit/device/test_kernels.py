"""The kernels of CUDA, compiled by the host's C++ compiler where there is one, on NumPy's arrays."""

import ctypes
import importlib
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy
import pytest

from mpidist.device.kernels import CHUNK, Formula
from mpidist.device.memory import ParameterUpdate
from mpidist.optimizers import SGD, Adam, AdamW, RMSprop
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
SIZES = (1, 0, 7, CHUNK, CHUNK + 1, 3 * CHUNK - 1)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
def test_one_launch_has_the_bits_of_numpy(kernels, name, dtype):
    rule, random = RULES[name](), numpy.random.default_rng(0)
    real = "f8" if dtype == "f8" else "f4"
    theirs = [
        (random.normal(size=size).astype(dtype), [numpy.zeros(size, real) for _ in rule.slot_names]) for size in SIZES
    ]
    ours = [(on_card(parameter), list(map(on_card, slots))) for parameter, slots in theirs]
    for number in range(3):
        coefficients = rule.coefficients(0.1, number)
        steps = [Step(coefficients, 0.5 + number % 2 / 2, decay) for decay in (0, 0.01, 0, 0.01, 0, 0)]
        gradients = [random.normal(size=size).astype(dtype) for size in SIZES]
        for (parameter, slots), gradient, step in zip(theirs, gradients, steps, strict=True):
            rule.update(parameter, gradient, slots, step)
        given = [(p, on_card(g), s, step) for (p, s), g, step in zip(ours, gradients, steps, strict=True)]
        rule.update_all(given, kernels.memory)
    assert kernels.launched == ["update"] * 3
    for (parameter, slots), (own, own_slots) in zip(theirs, ours, strict=True):
        for expected, found in zip([parameter, *slots], [own, *own_slots], strict=True):
            assert found.dtype == expected.dtype
            numpy.testing.assert_array_equal(found, expected)


def test_each_pair_of_dtypes_is_a_launch(kernels):
    pairs = [("f4", "f4"), ("f8", "f8"), ("f4", "f2"), ("f2", "f4"), ("f8", "f2"), ("f4", "f8"), ("f8", "f8")]
    made = [(on_card(numpy.ones(3, p)), on_card(numpy.full(3, 0.5, g)), [], Step((0.5,))) for p, g in pairs]
    SGD(0.5).update_all(made, kernels.memory)
    assert [each[0].tolist() for each in made] == [[0.75] * 3] * len(pairs)
    assert len(kernels.launched) == len(set(pairs))


def test_gradients_that_are_parameters_are_read_before_these_change(kernels):
    """Each of two parts takes away the other, and a third one what lies across both."""
    block = on_card(numpy.arange(8.0))
    parts, last = [block[:4], block[4:]], on_card(numpy.zeros(4))
    gradients = [parts[1], parts[0], block[2:6]]
    step = Step((1.0,))
    SGD(1.0).update_all([(p, g, [], step) for p, g in zip([*parts, last], gradients, strict=True)], kernels.memory)
    numpy.testing.assert_array_equal(block, [-4, -4, -4, -4, 4, 4, 4, 4])
    numpy.testing.assert_array_equal(last, [-2, -3, -4, -5])


def test_a_class_with_a_rule_of_its_own_is_not_updated_by_that_of_its_base(kernels):
    class Twice(Adam):
        def update_slice(self, parameter, gradient, slots, scratch, coefficients):
            parameter -= 2 * gradient

    class Rounded(SGD):
        def update(self, parameter, gradient, slots, step):
            parameter[...] = numpy.rint(parameter - gradient)

    class Named(AdamW):
        pass

    for rule, expected in ((Twice(), 1 - 2 * 0.25), (Rounded(), 1), (Named(), None), (RMSprop(), None)):
        kernels.launched.clear()
        parameter, gradient = on_card([1.0]), on_card([0.25])
        slots = [on_card([0.0]) for _ in rule.slot_names]
        rule.update_all([(parameter, gradient, slots, Step(rule.coefficients(0.1, 0)))], kernels.memory)
        assert expected is None or parameter[0] == expected
        assert kernels.launched == (["update"] if isinstance(rule, Named) else [])


def test_what_has_no_kernel_is_said_so_and_left(kernels):
    parameter = on_card(numpy.ones(3, "i4"))
    formula = Formula("p -= g;", (), ())
    assert not kernels.memory.update(formula, [ParameterUpdate(parameter, parameter, [], (1.0, 0.0, numpy.inf))])
    assert parameter.tolist() == [1, 1, 1] and not kernels.launched
    assert kernels.memory.update(
        formula, [ParameterUpdate(on_card(numpy.ones(0)), on_card(numpy.ones(0)), [], (1, 0, 1))]
    )
    assert not kernels.launched


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
