"""Compressed all-reduces over real ranks: exact sums, bounds, residues, and the same bits on all ranks."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.compression import BFloat16, Float16, TopK, all_reduce_init
from mpidist.compression.compressed import CompressedAllReduce
from mpidist.world import world_communicator

pytestmark = pytest.mark.mpi

SHAPES = [(300, 70), (5,), (40_000,)]
STAGES = [Float16(), BFloat16(error_feedback=True), TopK(0.05), TopK(0.05, values=Float16())]


def place():
    communicator = world_communicator()
    return communicator, communicator.rank, communicator.size


def numbers(rank, step):
    rng = numpy.random.default_rng([rank, step])
    return [rng.normal(size=shape) for shape in SHAPES]


def flat(arrays):
    return numpy.concatenate([each.ravel() for each in arrays])


@pytest.mark.parametrize("stage", [Float16(), BFloat16(), TopK(1.0)], ids=repr)
def test_small_whole_numbers_are_exact(stage):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    size = strategy.num_replicas_in_sync

    def step():
        mine = mpidist.get_replica_context().replica_id_in_sync_group
        value = {"w": numpy.arange(1000, dtype="f4").reshape(10, 100) % 8 + mine, "n": numpy.array([mine])}
        return all_reduce_init("SUM", value, stage)(value)

    found = strategy.run(step)
    ranks = size * (size - 1) // 2
    numpy.testing.assert_array_equal(found["w"].ravel(), (numpy.arange(1000) % 8) * size + ranks)
    assert found["n"].tolist() == [ranks]


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_all_ranks_have_the_same_bits_and_nothing_is_lost(stage, op):
    communicator, rank, size = place()
    bound = CompressedAllReduce(communicator, numbers(0, 0), op, stage)
    results = [flat(bound(numbers(rank, step))) for step in range(5)]
    assert len(set(communicator.exchange(b"".join(each.tobytes() for each in results)))) == 1
    exact = sum(flat(numbers(each, step)) for each in range(size) for step in range(5))
    divisor = size if op == "mean" else 1
    if stage.error_feedback:
        state = bound.state_dict()
        kept = state["float64.residues"].sum(axis=0) / divisor + state.get("float64.sum_residues", 0)
        numpy.testing.assert_allclose(sum(results) + kept, exact / divisor, rtol=1e-12, atol=1e-12)
    else:  # each value is rounded, and each sum: by 2 ** -11 of it at most
        sizes = sum(numpy.abs(flat(numbers(each, step))) for each in range(size) for step in range(5))
        assert (numpy.abs(sum(results) - exact / divisor) <= 2.0**-10 * 1.001 * sizes / divisor + 1e-10).all()


def test_a_restored_all_reduce_goes_on_bit_for_bit():
    communicator, rank, _ = place()
    first, second = (CompressedAllReduce(communicator, numbers(0, 0), "mean", TopK(0.05)) for _ in range(2))
    for step in range(3):
        first(numbers(rank, step))
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        for expected, found in zip(first(numbers(rank, step)), second(numbers(rank, step)), strict=True):
            numpy.testing.assert_array_equal(found, expected)
