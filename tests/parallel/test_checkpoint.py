"""Checkpoints on the ranks of an mpirun: one writes, all know how it went."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import update
from mpidist.errors import CheckpointError, CheckpointNotFoundError
from mpidist.input import Dataset
from mpidist.world import world_communicator

pytestmark = pytest.mark.mpi

STEPS = 5


@pytest.fixture(params=[1, 1 << 40], ids=["slots in slices", "slots whole"])
def least_bytes(request, monkeypatch):
    """Slots on every rank, or, as those of large models are, each on one rank."""
    monkeypatch.setattr(update, "LEAST_BYTES", request.param)
    return request.param


@pytest.fixture
def directory(tmp_path) -> Path:
    """Rank 0's directory, on every rank."""
    return Path(world_communicator().exchange(str(tmp_path).encode())[0].decode())


class Run:
    """A linear model on 11 rows in batches of 4; its gradients differ from step to step."""

    def __init__(self, strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = mpidist.Variable(numpy.ones((3, 2), "float32"), name="w")
            self.optimizer = mpidist.optimizers.Adam(0.1)
        rows = numpy.sin(numpy.arange(33, dtype="float32")).reshape(11, 3)
        self.batches = strategy.experimental_distribute_dataset(Dataset.from_arrays(rows).shuffle(seed=2).batch(4))
        self.checkpoint = mpidist.Checkpoint(w=self.w, optimizer=self.optimizer, dataset=self.batches)

    def train(self, steps):
        end = self.optimizer.iterations + steps
        while self.optimizer.iterations < end:
            for rows in self.batches:
                self.strategy.run(self.step, args=(rows,))
                if self.optimizer.iterations == end:
                    break
        return self

    def step(self, rows):
        self.optimizer.apply_gradients([(rows.T @ (rows @ self.w.value - 1) / 4, self.w)])

    def is_in_slices(self):
        return any(each.is_active for each in self.optimizer._updates._sharded._active)

    def state(self):
        return self.w.value.tobytes(), [slot.tobytes() for slot in self.optimizer.slots(self.w).values()]


def test_restores_bit_for_bit_and_goes_on_like_one_rank(directory, least_bytes):
    saved = Run(mpidist.MultiWorkerMirroredStrategy()).train(STEPS)
    saved.checkpoint.save(directory / "c.h5")
    restored = Run(mpidist.MultiWorkerMirroredStrategy())
    restored.checkpoint.restore(directory / "c.h5")
    assert restored.state() == saved.state()
    assert restored.batches.state() == saved.batches.state()

    # every rank goes on by itself from the same file, at another number of replicas
    alone = Run(mpidist.OneDeviceStrategy("/cpu:0"))
    alone.checkpoint.restore(directory / "c.h5")
    assert alone.state() == saved.state()
    numpy.testing.assert_allclose(alone.train(STEPS).w.value, restored.train(STEPS).w.value, rtol=1e-5, atol=1e-6)
    assert restored.is_in_slices() == (least_bytes == 1 and world_communicator().size > 1)


@pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing")
def test_what_one_rank_saved_is_gone_on_with_by_all(directory, least_bytes):
    alone = Run(mpidist.OneDeviceStrategy("/cpu:0")).train(STEPS)
    alone.checkpoint.save(directory / "c.h5")  # every rank has the same
    together = Run(mpidist.MultiWorkerMirroredStrategy()).train(2)  # its slots are in slices already
    for run in (alone, together):  # a loop that was left begins anew, unless its position is restored
        run.checkpoint.restore(directory / "c.h5")
    assert together.state() == alone.state()
    numpy.testing.assert_allclose(alone.train(STEPS).w.value, together.train(STEPS).w.value, rtol=1e-5, atol=1e-6)


def test_missing_and_damaged_files_are_errors_on_every_rank(directory):
    run = Run(mpidist.MultiWorkerMirroredStrategy())
    with pytest.raises(CheckpointNotFoundError, match="none.h5"):
        run.checkpoint.restore(directory / "none.h5")
    path = run.checkpoint.save(directory / "c.h5")
    if world_communicator().rank == 0:
        raw = path.read_bytes()
        path.write_bytes(raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
    with pytest.raises(CheckpointError, match=r"c.h5 is damaged: .* has CRC-32 0x\w+, expected 0x\w+"):
        run.checkpoint.restore(path)


def test_a_save_that_fails_on_the_chief_fails_on_every_rank(directory):
    if world_communicator().rank == 0:
        (directory / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not saved: rank 0"):
        Run(mpidist.MultiWorkerMirroredStrategy()).checkpoint.save(directory / "file" / "c.h5")


def test_a_damaged_newest_falls_back_on_every_rank(directory):
    run = Run(mpidist.MultiWorkerMirroredStrategy())
    manager = mpidist.CheckpointManager(run.checkpoint, directory, max_to_keep=2)
    for number in range(1, 4):
        newest = manager.save(run.train(1).optimizer.iterations)
        assert newest.name == f"checkpoint-{number}.h5"
    if world_communicator().rank == 0:
        assert [path.name for path in manager.checkpoints] == ["checkpoint-2.h5", "checkpoint-3.h5"]
        newest.write_bytes(newest.read_bytes()[:-1])
    assert manager.restore_or_initialize().name == "checkpoint-2.h5"
    assert run.optimizer.iterations == 2
