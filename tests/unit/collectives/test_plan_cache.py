"""Which plans are kept: bounded in bytes, by the calls alone, and without anything that needs a garbage collector."""

import gc
import random
import tracemalloc
from types import SimpleNamespace
from weakref import ref

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.collectives.reductions import plan_cache
from mpidist.collectives.reductions.plan_cache import PlanCache
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

#: Bytes of some lists, by key: 40 short ones, some of a few MiB, and large ones of about the same size.
LISTS = [*[1 << 10] * 40, *[3 << 20, 9 << 20] * 8, 33 << 20, 60 << 20, 100 << 20, 120 << 20, 500 << 20, 512 << 20]
SHORT, LARGE, LARGEST = 0, len(LISTS) - 2, len(LISTS) - 1


def _used(cache, calls):
    for key in calls:
        cache.use(cache.find(key) or SimpleNamespace(key=key, nbytes=LISTS[key], last_call=0))
    return {plan.key for plan in cache}


def _bytes(keys):
    return sum(LISTS[key] + (256 << 10) for key in keys)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, LARGEST), min_size=1, max_size=100))
def test_the_same_calls_keep_the_same_plans_of_so_many_bytes(calls):
    kept = _used(PlanCache(), calls)
    assert kept == _used(PlanCache(), calls)
    assert calls[-1] in kept
    assert _bytes(kept) <= max(64 << 20, 3 * max(_bytes([key]) for key in kept))
    ages = {key: calls[::-1].index(key) for key in calls}
    gone = ages.keys() - kept
    assert not gone or max(ages[key] for key in kept) < min(ages[key] for key in gone)  # the least recently used


def test_two_large_lists_may_alternate_with_short_ones():
    calls = [LARGE, LARGEST, *range(50)] * 3
    assert _used(PlanCache(), calls) == set(calls)


def test_no_more_than_a_few_plans_of_one_size_are_kept():
    cache = PlanCache()
    for key in range(64):
        cache.use(SimpleNamespace(key=key, nbytes=100 << 20, last_call=0))
    assert [plan.key for plan in cache] == [62, 63]


def test_ever_new_plans_are_not_sorted_each_time(monkeypatch):
    cache, drop, drops = PlanCache(), PlanCache._drop, []
    monkeypatch.setattr(PlanCache, "_drop", lambda self: (drops.append(len(self)), drop(self)))
    for key in range(2000):
        cache.use(SimpleNamespace(key=key, nbytes=100, last_call=0))
    assert max(drops) <= 256 and len(drops) <= 2000 / 32 + 2000 / 256  # an eighth of 256 at a time, and now and then


def test_what_is_not_used_any_more_is_dropped_whatever_room_there_is():
    cache = PlanCache()
    assert _used(cache, [LARGEST, 1]) == {LARGEST, 1}
    assert _used(cache, [SHORT] * 1000) == {LARGEST, 1, SHORT}
    assert _used(cache, [SHORT] * 300) == {SHORT}


def test_a_plan_that_is_asked_for_now_and_then_stays():
    assert _used(PlanCache(), ([LARGEST] + [SHORT] * 700) * 5) == {LARGEST, SHORT}


def test_a_plan_in_the_place_of_another_drops_nothing():
    cache, other = PlanCache(), PlanCache()
    calls = [LARGEST, *range(50)] * 3
    assert _used(cache, calls) == _used(other, calls)
    cache.use(SimpleNamespace(key=SHORT, nbytes=LISTS[SHORT], last_call=0))
    other.use(other.find(SHORT))
    assert [plan.key for plan in cache] == [plan.key for plan in other]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_hold_results_differently_keep_the_same_plans_of_500_random_lists(size, monkeypatch):
    monkeypatch.setattr(plan_cache, "_LEAST_BYTES", 1 << 17)
    monkeypatch.setattr(plan_cache, "_PLAN_BYTES", 1 << 10)

    def steps():
        communicator = world_communicator()
        fused, rng, own = Engine(communicator), random.Random(1), random.Random(communicator.rank)
        held, kept, most, shapes = [], [], 0, []
        for step in range(500):
            if not shapes or rng.random() < 0.7:
                count = rng.choice([1, 2, 80])
                shapes = [(rng.randint(1, 6000 // count), 2) for _ in range(count)]
            # sometimes this rank alone has them in another order of memory
            order = "F" if own.random() < 0.2 else "C"
            results = fused([numpy.full(shape, communicator.rank + step % 5, "f4", order) for shape in shapes])
            total = size * (step % 5) + size * (size - 1) // 2
            assert [each.shape for each in results] == shapes
            assert all((each == total).all() for each in results)
            if own.random() < communicator.rank / size:
                held.append((own.choice(results), total))
            del held[: -own.randint(1, 30)]
            kept.append([plan.key for plan in communicator.bindings])
            most = max(most, sum(plan.nbytes for plan in communicator.bindings))
        assert all((each == total).all() for each, total in held)
        return kept, most

    (expected, most), *others = run_ranks(size, steps)
    assert all(kept == expected for kept, _ in others)
    assert most <= 3 * (6000 * 2 * 4 + 80 * 1024 + 4096)
    assert len(expected[-1]) < 500


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("count", [1, 90])
@pytest.mark.parametrize("length", [10, 5000])
@pytest.mark.parametrize("algorithm", [None, "ring", "shared_memory"])
def test_a_plan_that_is_dropped_is_gone_at_once(count, length, algorithm, monkeypatch):
    monkeypatch.setattr(plan_cache, "_LEAST_BYTES", 0)

    def steps():
        communicator, known = world_communicator(), []
        fused, rank = Engine(communicator, algorithm=algorithm), communicator.rank
        for step in range(8):
            shape = (length + step * count, 2)
            fused([numpy.asfortranarray(numpy.ones(shape)) if step % 2 == rank else numpy.ones(shape)] * count)
            known += [ref(plan) for plan in communicator.bindings if plan.last_call == step + 1]
        kept = list(communicator.bindings)
        return len(known), [each() in kept for each in known if each() is not None]

    for made, alive in run_ranks(2, steps):
        assert made == 8
        assert all(alive) and 1 <= len(alive) <= 3


@pytest.mark.parametrize("algorithm", ["ring", "rabenseifner"])
def test_all_buckets_of_a_list_are_received_in_one_scratch(algorithm):
    tensors, length = 8, 1 << 20

    def step():
        communicator = world_communicator()
        fused = Engine(communicator, algorithm=algorithm, bytes_per_pack=1)
        communicator.barrier()
        before = tracemalloc.get_traced_memory()[0]
        communicator.barrier()
        results = fused([numpy.ones(length, "f4")] * tensors)
        assert all((each == 2).all() for each in results)
        communicator.barrier()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown = max(run_ranks(2, step))
    finally:
        tracemalloc.stop()
    assert grown < 2 * (4 * length * tensors + (3 << 20))


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("length", [10, 5000])
@pytest.mark.parametrize("algorithm", ["ring", "shared_memory"])
def test_no_part_of_a_bound_list_outlives_it(in_place, length, algorithm):
    def on_rank():
        engine, arrays = Engine(world_communicator(), algorithm=algorithm), [numpy.ones((length, 2)) for _ in range(3)]
        signatures = [("", each.dtype, each.shape) for each in arrays]
        bound = engine.bind_in_place(signatures) if in_place else engine.bind(arrays)
        bound(arrays)
        reductions = list(bound.reductions)
        sinks = [] if in_place else [bound._sink]
        parts = [ref(part) for part in (bound, bound._intake, *sinks, *reductions)]
        del bound, reductions, sinks
        return [part() for part in parts]

    for parts in run_ranks(2, on_rank):
        assert len(parts) >= 3 and set(parts) == {None}


def test_memory_of_results_goes_with_the_strategy_and_later_calls_take_it_anew():
    length = 1 << 20

    def step():
        results = mpidist.get_replica_context().all_reduce("sum", [numpy.ones(length), numpy.ones(3)])
        assert all((each == 2).all() for each in results)

    def on_rank():
        communicator = world_communicator()
        for _ in range(2):
            mpidist.MirroredStrategy().run(step)
            communicator.barrier()
            gc.collect()
            communicator.barrier()
        kept = [bound for bound in communicator.bindings if bound.nbytes > 8 * length]
        return tracemalloc.get_traced_memory()[0], len(kept)

    tracemalloc.start()
    try:
        found = run_ranks(2, on_rank)
    finally:
        tracemalloc.stop()
    assert all(kept == 1 for _, kept in found)  # the plan itself is still there
    assert all(grown < 8 * length for grown, _ in found)  # of two ranks, of which each had as much
