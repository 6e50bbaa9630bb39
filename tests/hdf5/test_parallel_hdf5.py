"""Checkpoints that all ranks write together; they need an h5py built for parallel HDF5.

``make test-mpio`` builds one (``tests/hdf5/build-parallel-h5py``), and runs this file on several ranks.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy
import pytest

import mpidist
from mpidist.errors import CheckpointError
from mpidist.training import hdf5_file, hdf5_parallel
from mpidist.world import world_communicator

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not h5py.get_config().mpi, reason="h5py is not built for parallel HDF5"),
]

#: Shapes of parameters: cut into rows, even and uneven, or too small, or of too few rows to be cut.
SHAPES = {
    "even": (1200, 256),
    "uneven": (997, 301),
    "long": (2, 300_000),
    "small": (3, 2),
    "empty": (0, 4),
    "scalar": (),
}


@pytest.fixture
def directory(tmp_path) -> Path:
    """Rank 0's directory, on every rank."""
    return Path(world_communicator().exchange(str(tmp_path).encode())[0].decode())


class Run:
    """Parameters of every kind after two steps, or before any."""

    def __init__(self, steps: int) -> None:
        strategy = mpidist.MultiWorkerMirroredStrategy()
        random = numpy.random.default_rng(steps)
        with strategy.scope():
            self.parameters = {
                name: mpidist.Variable(random.normal(size=shape).astype(dtype), name=name)
                for name, shape in SHAPES.items()
                for dtype in ["float16" if name == "long" else "float32"]
            }
            self.optimizer = mpidist.optimizers.Adam(0.1)
        self.random = numpy.random.Generator(numpy.random.MT19937(steps))
        self.checkpoint = mpidist.Checkpoint(model=self.parameters, optimizer=self.optimizer, random=self.random)
        for _ in range(steps):
            strategy.run(lambda: self.optimizer.apply_gradients([(v.value * 1, v) for v in self.parameters.values()]))

    def bits(self):
        slots = [slot for v in self.parameters.values() for slot in self.optimizer.slots(v).values()]
        arrays = [*(v.value for v in self.parameters.values()), *slots]
        return [array.tobytes() for array in arrays], self.optimizer.iterations, self.random.random(4).tolist()


def test_all_ranks_write_what_one_would(directory):
    run = Run(2)
    run.checkpoint.save(directory / "one.h5", parallel=False)
    run.checkpoint.save(directory / "all.h5", parallel=True)
    run.checkpoint.save(directory / "default.h5")
    expected = run.bits()
    if world_communicator().rank == 0:
        one, every, default = (hdf5_file.read(directory / f"{name}.h5") for name in ("one", "all", "default"))
        assert one[1] == every[1] == default[1]
        for name, array in one[0].items():
            assert array.tobytes() == every[0][name].tobytes() == default[0][name].tobytes()
            assert array.dtype == every[0][name].dtype
    for name in ("one", "all"):
        restored = Run(0)
        restored.checkpoint.restore(directory / f"{name}.h5")
        assert restored.bits() == expected


def test_every_rank_has_its_rows():
    communicator, array = world_communicator(), numpy.zeros(SHAPES["uneven"], "float32")
    rows = hdf5_parallel.rows_of(array, communicator.rank, communicator.size)
    found = [int(raw) for raw in communicator.exchange(str(rows.stop - rows.start).encode())]
    assert sum(found) == len(array)
    assert all(count > 0 for count in found)


def test_damage_is_found(directory):
    path = Run(1).checkpoint.save(directory / "c.h5", parallel=True)
    if world_communicator().rank == 0:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="c.h5 is damaged"):
        Run(0).checkpoint.restore(path)


def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(directory):
    if world_communicator().rank == 0:
        (directory / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not saved"):
        Run(0).checkpoint.save(directory / "file" / "c.h5", parallel=True)
