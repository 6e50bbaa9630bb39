"""The order of calls on several streams, and copies that fail, with a pretended CuPy."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy
import pytest


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append((self.name, event.stream.name))


class Event:
    ptr = 5

    def __init__(self, disable_timing):
        self.stream = None

    def record(self, stream=None):
        self.stream = stream


@pytest.fixture
def cupy(monkeypatch):
    library = ModuleType("cupy")
    library.ndarray = type("ndarray", (), {})
    library.device = 0

    @contextmanager
    def device(number):
        before, library.device = library.device, number
        yield
        library.device = before

    library.cuda = SimpleNamespace(
        Device=device,
        Event=Event,
        get_current_stream=lambda: getattr(library, "current", None),
        runtime=SimpleNamespace(getDevice=lambda: library.device),
    )
    monkeypatch.setitem(sys.modules, "cupy", library)
    for name in ("cuda", "pinned"):
        monkeypatch.delitem(sys.modules, f"mpidist.device.{name}", raising=False)
    yield library
    for name in ("cuda", "pinned"):
        sys.modules.pop(f"mpidist.device.{name}", None)


def _array(device=0):
    return SimpleNamespace(data=SimpleNamespace(device_id=device))


def test_a_call_waits_on_the_device_for_the_one_before_in_another_stream(cupy):
    memory, log = importlib.import_module("mpidist.device.cuda").CudaMemory(), []
    first, second = Stream("first", log), Stream("second", log)
    for cupy.current in (first, first, second, second, first):
        memory.enter([_array()])
    assert log == [("second", "first"), ("first", "second")]


def test_the_work_before_on_another_gpu_is_waited_for_by_an_event_of_that_gpu(cupy, monkeypatch):
    memory, log, made_on = importlib.import_module("mpidist.device.cuda").CudaMemory(), [], []

    def record(event, stream):
        made_on.append(cupy.device)
        event.stream = stream

    monkeypatch.setattr(Event, "record", record)
    for cupy.device, cupy.current in enumerate([Stream("first", log), Stream("second", log)]):
        memory.enter([_array(cupy.device)])
    assert log == [("second", "first")]
    assert made_on == [0] and cupy.device == 1


def test_an_array_on_another_gpu_is_refused_and_changes_nothing(cupy):
    memory, log = importlib.import_module("mpidist.device.cuda").CudaMemory(), []
    cupy.current = Stream("first", log)
    memory.enter([_array()])
    cupy.current = Stream("second", log)
    with pytest.raises(ValueError, match=r"an array on GPU 1 while GPU 0 is .*cupy\.cuda\.Device\(1\)\.use"):
        memory.enter([_array(), _array(1)])
    memory.enter([])
    assert log == [("second", "first")]


def test_a_copy_that_cuda_breaks_off_is_an_error_and_not_waited_for(cupy):
    answers = [600, 600, 0]
    cupy.cuda.runtime = SimpleNamespace(eventQuery=lambda event: answers.pop(0), CUDARuntimeError=RuntimeError)
    array = SimpleNamespace(data=SimpleNamespace(copy_to_host_async=lambda *given: None), set=lambda source: None)
    memory = importlib.import_module("mpidist.device.cuda").CudaMemory()
    arrived = memory.read(array, numpy.zeros(1))
    assert [arrived(), arrived(), arrived()] == [False, False, True]
    answers[:] = [600, 700]
    written = memory.write(None, array)
    assert not written()
    with pytest.raises(RuntimeError, match="700"):
        written()
