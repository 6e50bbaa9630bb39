"""Elements made ahead of time: their order, errors where they belong, and threads that end."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import numpy
import pytest

from mpidist import arrays
from mpidist.input import Dataset, DistributedDataset
from mpidist.input.options import InputOptions
from mpidist.input.prefetching import Prefetcher, prefetched
from mpidist.testing.device import on_device, pretended_device


def test_elements_come_in_order_and_end():
    iterator = Prefetcher(iter(range(100)), 3)
    assert list(iterator) == list(range(100))
    with pytest.raises(StopIteration):
        next(iterator)
    elements = iter([1])
    assert prefetched(elements, 0) is elements


def test_so_many_are_made_ahead_and_no_more():
    made, third = [], threading.Event()

    def elements():
        for number in range(10):
            made.append(number)
            if number == 3:
                third.set()
            yield number

    iterator = Prefetcher(elements(), 2)
    assert next(iterator) == 0
    assert third.wait(30)  # one was taken, two lie ready, one is in the thread's hands
    assert made == [0, 1, 2, 3]
    iterator.close()
    iterator.thread.join(30)
    assert made == [0, 1, 2, 3]


def test_an_error_comes_where_its_element_would():
    def elements():
        yield 1
        raise KeyError("gone")

    iterator = Prefetcher(elements(), 4)
    assert next(iterator) == 1
    with pytest.raises(KeyError, match="gone"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("make", [lambda d: iter(d), lambda d: iter(DistributedDataset(d, 0, 1))])
def test_threads_end_when_the_iterator_is_dropped(make):
    before = set(threading.enumerate())
    iterator = make(Dataset.range(10**9).batch(2).prefetch(3))
    assert next(iterator).tolist() == [0, 1]
    (thread,) = set(threading.enumerate()) - before
    del iterator
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_the_position_counts_what_was_handed_out():
    distributed = DistributedDataset(Dataset.range(20).batch(2).prefetch(5), 0, 1)
    iterator = iter(distributed)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    state = iterator.state()
    assert state == distributed.state()
    assert (state["epoch"], state["rows"]) == (0, 4)
    iterator.restore({"epoch": 0, "rows": 2})
    assert next(iterator).tolist() == [2, 3]
    assert distributed.state() == state


def test_parts_are_copied_to_the_device_ahead_of_time():
    with pretended_device():
        dataset = Dataset.from_arrays({"x": numpy.arange(6.0)}).batch(4)
        copies = SimpleNamespace(begin=lambda array: [on_device(array)], end=lambda begun: begun[0])
        parts = list(DistributedDataset(dataset, 1, 2, options=InputOptions(), copies_fn=lambda: copies))
        assert all(arrays.is_device(part["x"]) for part in parts)
        assert [arrays.as_host(part["x"]).tolist() for part in parts] == [[2, 3], [5]]


def test_on_the_host_options_change_nothing():
    from mpidist.strategies.one_device import OneDeviceStrategy

    strategy = OneDeviceStrategy("/cpu:0")
    dataset = Dataset.range(4).batch(2)
    before = threading.active_count()
    iterator = iter(strategy.experimental_distribute_dataset(dataset, InputOptions()))
    assert next(iterator).tolist() == [0, 1]
    assert threading.active_count() == before
