"""Random generators in a checkpoint: every kind goes on with the same numbers."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks

KINDS = [numpy.random.PCG64, numpy.random.PCG64DXSM, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64]


def drawn(generator):
    return generator.random(3).tolist(), generator.integers(0, 9, 5, "int32").tolist(), generator.normal()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 1, 7])
def test_it_goes_on(tmp_path, kind, before):
    first, second = (numpy.random.Generator(kind(seed)) for seed in (1, 2))
    first.integers(0, 9, before, "int32")  # an odd number leaves half a word
    mpidist.Checkpoint(random=[first]).save(tmp_path / "c.h5")
    mpidist.Checkpoint(random=[second]).restore(tmp_path / "c.h5")
    assert drawn(first) == drawn(second)


def test_all_ranks_go_on_as_the_chief(tmp_path):
    def run():
        rank = mpidist.MultiWorkerMirroredStrategy().extended.replica_id
        generator = numpy.random.default_rng(rank)
        checkpoint = mpidist.Checkpoint(random=generator)
        checkpoint.save(tmp_path / "c.h5")
        checkpoint.save(tmp_path / "c.h5")
        checkpoint.restore(tmp_path / "c.h5")
        return drawn(generator)

    with pytest.warns(RuntimeWarning, match="'random/state/state' on ranks 1, 2") as told:
        assert run_ranks(3, run) == [drawn(numpy.random.default_rng(0))] * 3
    assert len(told) == 1
    assert "every rank gets it when it is restored" in str(told[0].message)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_is_told_of_generators_that_are_alike(tmp_path, ranks, recwarn):
    def run():
        generator = numpy.random.default_rng(7)
        generator.integers(0, 9, 3, "int32")
        mpidist.Checkpoint(random={"a": generator}).save(tmp_path / "c.h5")

    run_ranks(ranks, run)
    assert not list(recwarn)


def test_another_kind_is_refused(tmp_path):
    mpidist.Checkpoint(random=numpy.random.default_rng(1)).save(tmp_path / "c.h5")
    other = numpy.random.Generator(numpy.random.Philox(1))
    with pytest.raises(CheckpointError, match="random state of PCG64 was saved, this generator is Philox"):
        mpidist.Checkpoint(random=other).restore(tmp_path / "c.h5")
