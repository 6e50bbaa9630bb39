"""What differs between array libraries: kinds, views, dtypes that can be reduced, devices."""

import subprocess
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import arrays
from mpidist.errors import MissingDependencyError, UnsupportedDtypeError
from mpidist.testing.device import DeviceArray, on_device, pretended_device
from tests.helpers.refused import STRINGS

ROOT = Path(__file__).resolve().parents[2]


def exporter(**methods):
    """Return something that offers its content by these protocols only."""
    return type("Exporter", (), methods)()


@pytest.fixture
def no_cupy(monkeypatch):
    """Make ``import cupy`` fail, whether or not it is installed."""
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.fixture
def pretended_cupy(monkeypatch):
    """Put a module with the few names used here in the place of cupy."""

    class ndarray:  # noqa: N801 - cupy's name
        def __init__(self, source):
            self.source = source

    cupy = types.ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.asarray = cupy.from_dlpack = ndarray
    cupy.asnumpy = lambda array: np.array(array.source)
    cupy.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 3))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_the_namespace_of_an_array_is_the_library_that_made_it(pretended_cupy):
    assert arrays.namespace(np.zeros(2)) is np
    assert arrays.namespace(pretended_cupy.ndarray(0)) is pretended_cupy
    assert not arrays.is_device(np.zeros(2))
    assert arrays.is_device(pretended_cupy.ndarray(0))


def test_other_values_are_no_arrays():
    with pytest.raises(TypeError, match="numpy, cupy, got list"):
        arrays.namespace([1])


def test_another_kind_joins_by_registering_and_leaves():
    array = on_device(np.arange(3))
    with pretended_device():
        assert arrays.is_device(array)
        assert arrays.to_array(array) is array
        assert arrays.empty(2, "f4", array).dtype == np.float32
        np.testing.assert_array_equal(arrays.as_host(array), [0, 1, 2])
    with pytest.raises(TypeError, match="DeviceArray"):
        arrays.is_device(array)


def test_nobody_looks_into_a_device_array_by_accident():
    array = on_device(np.arange(3.0))
    host = np.zeros(3)
    for look in (np.asarray, list, lambda a: np.add(a, host), lambda a: host + a, lambda a: np.copyto(host, a)):
        with pytest.raises(TypeError):
            look(array)
    with pytest.raises(TypeError, match="device memory, got ndarray"):
        array[:] = np.zeros(3)


def test_a_transport_takes_the_memory_it_moves():
    both = frozenset({"host", "device"})
    arrays.check_memory(np.zeros(1), frozenset({"host"}), "x")
    with pretended_device():
        arrays.check_memory(on_device(np.zeros(1)), both, "x")
        with pytest.raises(UnsupportedDtypeError, match="x transport moves host .* pretended array.*as_host"):
            arrays.check_memory(on_device(np.zeros(1)), frozenset({"host"}), "x")
    with pytest.raises(UnsupportedDtypeError, match="got a numpy array in host memory"):
        arrays.check_memory(np.zeros(1), frozenset({"device"}), "x")


# -- to_array ----------------------------------------------------------------------------------------------------------


def test_arrays_pass_as_they_are():
    array = np.arange(6).reshape(2, 3)[:, ::2]
    assert arrays.to_array(array) is array


@pytest.mark.parametrize("value, shape", [(1, ()), (2.5, ()), (True, ()), ([1, 2], (2,)), (((1.0,), (2.0,)), (2, 1))])
def test_python_numbers_and_lists_become_numpy_arrays(value, shape):
    array = arrays.to_array(value)
    assert array.shape == shape
    assert array.tolist() == np.asarray(value).tolist()


def test_the_array_protocol_is_used_without_a_copy():
    array = np.arange(3)
    assert np.shares_memory(arrays.to_array(exporter(__array__=lambda self, dtype=None, copy=None: array)), array)


def test_dlpack_in_host_memory_is_used_without_a_copy():
    array = np.arange(3.0)
    value = exporter(
        __dlpack__=lambda self, **options: array.__dlpack__(**options), __dlpack_device__=lambda self: (1, 0)
    )
    assert np.shares_memory(arrays.to_array(value), array)


def test_device_memory_becomes_a_cupy_array(pretended_cupy):
    by_interface = exporter(__cuda_array_interface__={})
    by_dlpack = exporter(__dlpack_device__=lambda self: (2, 0), __array__=lambda self: pytest.fail("copied to host"))
    for value in (by_interface, by_dlpack):
        array = arrays.to_array(value)
        assert isinstance(array, pretended_cupy.ndarray) and array.source is value


def test_device_memory_without_cupy_is_an_error_that_names_it(no_cupy):
    with pytest.raises(MissingDependencyError, match="CuPy"):
        arrays.to_array(exporter(__cuda_array_interface__={}))


# -- views -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=4), st.sampled_from("CF"))
def test_a_flat_view_shows_a_contiguous_array_in_memory_order(shape, order):
    array = np.arange(float(np.prod(shape, dtype=int))).reshape(shape).copy(order)
    flat = arrays.flat_view(array)
    assert flat.shape == (array.size,)
    np.testing.assert_array_equal(flat, array.ravel(order))
    flat[...] = -1
    assert (array == -1).all()


def test_a_flat_view_of_an_array_with_gaps_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*strides"):
        arrays.flat_view(np.zeros((2, 4))[:, ::2])


@pytest.mark.parametrize("dtype", ["f8", "?", "M8[s]", ml_dtypes.bfloat16, "i4,f8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_byte_view_shares_the_memory_of_any_dtype(dtype, shape):
    array = np.zeros(shape, dtype)
    raw = arrays.byte_view(array)
    assert raw.shape == (array.nbytes,) and raw.dtype == np.uint8
    raw[...] = 1
    assert set(array.tobytes()) <= {1}


def test_a_byte_view_of_objects_or_gaps_is_an_error():
    with pytest.raises(UnsupportedDtypeError, match="object"):
        arrays.byte_view(np.array([{}]))
    with pytest.raises(ValueError, match="C-contiguous"):
        arrays.byte_view(np.zeros((3, 3)).T[::2])


def test_empty_like_is_contiguous_whatever_its_model():
    model = np.zeros((4, 6), "i2")[::2, ::3]
    made = arrays.empty_like(model)
    assert (made.shape, made.dtype, made.flags.c_contiguous) == ((2, 2), np.dtype("i2"), True)


def test_as_host_copies():
    array = np.arange(3)
    copied = arrays.as_host(array)
    assert not np.shares_memory(copied, array)
    np.testing.assert_array_equal(copied, array)


@pytest.mark.parametrize("value", [2.5, np.float64(2.5), np.bool_(True), np.array(2.5, "f4")])
def test_a_number_is_read_where_it_lies(value):
    assert arrays.number(value) == value and not isinstance(arrays.number(value), np.ndarray)
    with pretended_device():
        assert arrays.number(on_device(np.asarray(value))) == value


def test_on_host_copies_what_is_on_a_device_only():
    array = np.arange(3)
    assert arrays.on_host(array) is array
    with pretended_device():
        copied = arrays.on_host(on_device(array))
    assert type(copied) is np.ndarray
    np.testing.assert_array_equal(copied, array)


class Plain(np.ndarray):
    pass


class WithUnit(np.ndarray):
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        raise AssertionError("nobody asks for its arithmetic")


@pytest.mark.parametrize("kind", [np.matrix, np.ma.MaskedArray, np.recarray, Plain])
def test_arrays_that_are_no_more_than_their_numbers_become_plain_ones(kind):
    array = np.ones((1, 2)).view(kind)
    for found in (arrays.plain(array), arrays.to_array(array)):
        assert type(found) is np.ndarray
        assert np.shares_memory(found, array)
        assert found.reshape(-1).shape == (2,)


@pytest.mark.parametrize("array", [np.ones(2), np.ones((2, 3)).T, np.float32(1).reshape(()), 3.0, [1.0]])
def test_what_is_plain_already_stays_as_it_is(array):
    assert arrays.plain(array) is array


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_masked_arrays_does_not_lose_their_masks(kind):
    masked = np.ma.array([1.0, 2.0], mask=[0, 1])
    with pytest.raises(TypeError, match="mask"):
        arrays.to_array(kind([np.ones(2), masked]))
    assert arrays.to_array(kind([np.ones(2), masked.data])).tolist() == [[1, 1], [1, 2]]


def test_a_list_with_an_array_in_gpu_memory_is_refused_with_its_kind():
    with pytest.raises(TypeError, match=r"got a list with a .*Exporter in GPU memory; .* cupy\.stack"):
        arrays.to_array([np.ones(2), exporter(__cuda_array_interface__={})])


@pytest.mark.parametrize(
    ("dtype", "target", "keeps"),
    [
        ("f8", "f2", True),
        ("i4", "f4", True),
        ("?", "f4", True),
        ("c8", "c16", True),
        ("f4", "c8", True),
        ("c8", "f4", False),
        ("O", "f4", False),
        ("M8[s]", "f4", False),
        ("m8[s]", "f4", False),
        ("U3", "f4", False),
        ([("a", "f4")], "f4", False),
    ],
)
def test_which_values_mean_the_same_in_another_dtype(dtype, target, keeps):
    assert arrays.keeps_meaning(np.dtype(dtype), target) is keeps


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.ma.array([1.0, 2.0], mask=[0, 1]), "mask would be lost.*filled"),
        (np.ma.array([1.0, 2.0], mask=[0, 0]), "mask would be lost.*filled"),  # other ranks may have other masks
        (np.ones(2).view(WithUnit), "WithUnit.*arithmetic of its own.*numpy.asarray"),
    ],
)
def test_nothing_that_an_array_means_besides_its_numbers_is_lost_without_a_word(array, said):
    for ask in (arrays.plain, arrays.to_array):
        with pytest.raises(TypeError, match=said):
            ask(array)


# -- reductions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, wire",
    [("f2", "f4"), (ml_dtypes.bfloat16, "f4"), ("f4", "f4"), ("f8", "f8"), ("i1", "i1"), ("u8", "u8"), ("c8", "c8")],
)
def test_sixteen_bit_floats_go_over_the_wire_as_float32(dtype, wire):
    assert arrays.wire_dtype(dtype) == np.dtype(wire)


MINIFLOATS = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]

REDUCIBLE = {
    **dict.fromkeys(["f2", "f4", "f8", "i1", "i8", "u1", "u8", ml_dtypes.bfloat16], {"sum", "min", "max", "prod"}),
    "c8": {"sum", "prod"},
    "?": {"min", "max"},
    **dict.fromkeys(["O", "S3", "U3", "M8[s]", "m8[s]", "V4", "i4,f4", "i4,O", *STRINGS], set()),
    **dict.fromkeys([ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz], set()),
    **dict.fromkeys([ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn], set()),
}


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_which_dtypes_can_be_reduced_how(dtype, op):
    if op in REDUCIBLE[dtype]:
        arrays.check_reducible(dtype, op)
    else:
        with pytest.raises(UnsupportedDtypeError, match=f"no reduction '{op}' of .*(: it has|; cast)"):
            arrays.check_reducible(dtype, op)


@pytest.mark.parametrize("dtype", ["O", "i4,O", *STRINGS, "U0", "V0"])
def test_what_means_nothing_on_another_rank_is_not_moved(dtype):
    with pytest.raises(UnsupportedDtypeError, match="cannot be sent to other ranks: expected numbers"):
        arrays.check_movable(dtype)


@pytest.mark.parametrize(
    "dtype", ["?", "f2", ">f8", "c8", "g", "S3", "U3", "M8[s]", "m8[D]", "V4", "i4,f4", *MINIFLOATS], ids=str
)
def test_what_has_no_reduction_may_still_be_moved(dtype):
    arrays.check_movable(dtype)


@pytest.mark.parametrize("ask", [lambda: arrays.check_reducible("f4", "mean"), lambda: arrays.reduction("mean", np)])
def test_an_unknown_reduction_is_an_error_that_lists_the_known_ones(ask):
    with pytest.raises(ValueError, match="'mean'.*sum, min, max, prod"):
        ask()


@pytest.mark.parametrize("op, result", [("sum", [5, 5]), ("min", [1, 2]), ("max", [4, 3]), ("prod", [4, 6])])
def test_reductions_work_in_place_in_every_namespace(op, result):
    first, second = np.array([1.0, 3.0]), np.array([4.0, 2.0])
    arrays.reduction(op, np)(first, second, out=first)
    np.testing.assert_array_equal(first, result)
    with pretended_device():
        first, second = on_device([1.0, 3.0]), on_device([4.0, 2.0])
        arrays.reduction(op, arrays.namespace(first))(first, second, out=first)
        assert isinstance(first, DeviceArray)
        np.testing.assert_array_equal(arrays.as_host(first), result)


# -- devices -----------------------------------------------------------------------------------------------------------


def test_devices_are_listed_as_tensorflow_lists_them(pretended_cupy):
    cpu = arrays.PhysicalDevice("/physical_device:CPU:0", "CPU")
    gpus = [arrays.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(3)]
    assert arrays.list_physical_devices("cpu") == [cpu]
    assert arrays.list_physical_devices("gpu") == arrays.list_physical_devices("GPU") == gpus
    assert arrays.list_physical_devices() == [cpu, *gpus]
    assert arrays.list_physical_devices("TPU") == []


def test_there_are_no_gpus_without_cupy(no_cupy):
    assert arrays.list_physical_devices("GPU") == []


def test_there_are_no_gpus_without_a_driver(pretended_cupy):
    def fail():
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    pretended_cupy.cuda.runtime.getDeviceCount = fail
    assert arrays.list_physical_devices("GPU") == []


@pytest.mark.parametrize("fails", ["cudaErrorInsufficientDriver: the driver is too old, or there is none", ""])
def test_without_a_driver_or_a_visible_gpu_nobody_is_told_to_install_cupy(pretended_cupy, fails):
    def count():
        if fails:
            raise RuntimeError(fails)
        return 0

    pretended_cupy.cuda.runtime.getDeviceCount = count
    why, cure = arrays.gpu_problem()
    assert why == (f"RuntimeError: {fails}" if fails else "none is visible")
    assert "pip install" not in cure and "nvidia-smi" in cure and "CUDA_VISIBLE_DEVICES" in cure


def test_without_cupy_it_is_told_once_what_to_install(no_cupy):
    why, cure = arrays.gpu_problem()
    assert "pip install" not in why and "cupy" in why and cure.startswith("pip install cupy-cuda13x nvidia-nccl-cu13")


def test_where_there_is_a_gpu_nothing_is_wrong(pretended_cupy):
    assert arrays.gpu_problem() == ("", "")


def test_importing_arrays_imports_neither_cupy_nor_ml_dtypes():
    program = (
        "import sys, mpidist.arrays as a; a.wire_dtype('f2'); print({'cupy', 'ml_dtypes', 'numpy'} & {*sys.modules})"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "{'numpy'}"


def test_a_pretended_device_is_there_while_any_rank_is_in_its_block():
    first, second = pretended_device(), pretended_device()
    first.__enter__()
    second.__enter__()
    array = on_device(np.ones(2))
    first.__exit__(None, None, None)
    assert arrays.kind_of(array).name == "pretended"
    second.__exit__(None, None, None)
    with pytest.raises(TypeError, match="expected an array of numpy"):
        arrays.kind_of(array)
