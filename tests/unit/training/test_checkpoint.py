"""Checkpoints on several ranks: saved by one, known to all, restored on any number."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy
import pytest

import mpidist
from mpidist import optimizers
from mpidist.collectives.communicator import Communicator
from mpidist.errors import CheckpointError, CheckpointNotFoundError
from mpidist.input import Dataset
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from mpidist.training.checkpoint import Checkpoint, together
from mpidist.training.checkpoint_manager import CheckpointManager
from mpidist.variables import Variable


class Run:
    """A small training run on this rank's part."""

    def __init__(self, kernel_shape=(3, 2)):
        self.strategy = MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.kernel = Variable(numpy.ones(kernel_shape, "float32"), name="kernel")
            self.total = Variable(0.0, name="total", synchronization="ON_READ", aggregation="SUM")
            self.optimizer = optimizers.SGD(0.1, momentum=0.9)
        rows = numpy.arange(21, dtype="float32").reshape(7, 3) / 21
        dataset = Dataset.from_arrays(rows).shuffle(seed=5).batch(3)
        self.distributed = self.strategy.experimental_distribute_dataset(dataset)
        self.checkpoint = Checkpoint(
            model=[self.kernel], total=self.total, optimizer=self.optimizer, dataset=self.distributed
        )

    def step(self, rows):
        self.optimizer.apply_gradients([(rows.T @ (rows @ self.kernel.value) / 3, self.kernel)])
        self.total.assign_add(numpy.float32(rows.sum()))

    def train(self, steps):
        while steps:
            for rows in self.distributed:
                self.strategy.run(self.step, args=(rows,))
                steps -= 1
                if not steps:
                    break
        return self

    def result(self):
        with self.strategy.scope():
            total = float(self.total.value)
        slot = self.optimizer.slots(self.kernel)["momentum"]
        return self.kernel.value.tobytes(), slot.tobytes(), total, self.optimizer.iterations, self.distributed.state()


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (3, 3)])
def test_a_count_of_all_ranks_is_the_same_after_a_restore(tmp_path, before, after, dtype):
    def counted():
        with MultiWorkerMirroredStrategy().scope() as strategy:
            count = Variable(numpy.zeros(3, dtype), synchronization="ON_READ", aggregation="SUM")
        return strategy, count, Checkpoint(count=count)

    def save():
        strategy, count, checkpoint = counted()
        rank = strategy.extended.replica_id
        values = [7, 0, 100] if rank == 0 else [0, 0, 1]
        strategy.run(lambda: count.assign(numpy.array(values, dtype)))
        checkpoint.save(tmp_path / "run.h5")

    def restore():
        strategy, count, checkpoint = counted()
        checkpoint.restore(tmp_path / "run.h5")
        found = count.value.tolist()
        strategy.run(lambda: count.assign_add(numpy.ones(3, dtype)))
        return found, count.value.tolist()

    run_ranks(before, save)
    total = [7, 0, 99 + before]
    assert run_ranks(after, restore) == [(total, [each + after for each in total])] * after


def test_a_negative_count_is_restored_whole(tmp_path):
    Checkpoint(count=Variable(numpy.array([-7, -(2**63)]))).save(tmp_path / "run.h5")

    def restore():
        with MultiWorkerMirroredStrategy().scope():
            count = Variable(numpy.zeros(2, "int64"), synchronization="ON_READ", aggregation="SUM")
        Checkpoint(count=count).restore(tmp_path / "run.h5")
        return count.live.tolist(), count.value.tolist()

    found = run_ranks(2, restore)
    assert [total for _, total in found] == [[-7, -(2**63)]] * 2
    assert [own[0] for own, _ in found] == [-4, -3]


def train_and_save(path, steps):
    run = Run().train(steps)
    run.checkpoint.save(path)
    return run.result()


def restore(path):
    run = Run()
    run.checkpoint.restore(path)
    # the slots are there once the optimizer meets its variable
    run.optimizer.slots(run.kernel)
    return run.result()


def restore_and_train(path, steps):
    run = Run()
    run.checkpoint.restore(path)
    return run.train(steps).kernel.value.copy()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 1), (3, 2), (2, 4)])
def test_restores_bit_for_bit_at_another_number_of_ranks(tmp_path, before, after):
    saved = run_ranks(before, train_and_save, tmp_path / "c.h5", 4)
    restored = run_ranks(after, restore, tmp_path / "c.h5")
    for one in restored:
        assert one[:2] == saved[0][:2]
        assert one[2] == pytest.approx(saved[0][2], rel=1e-6)
        assert one[3:] == (4, saved[0][4])
        assert (one[4]["epoch"], one[4]["rows"]) == (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_goes_on_as_if_it_had_never_stopped(tmp_path, ranks):
    run_ranks(2, train_and_save, tmp_path / "c.h5", 4)
    (straight,) = run_ranks(1, lambda: Run().train(9).kernel.value.copy())
    for kernel in run_ranks(ranks, restore_and_train, tmp_path / "c.h5", 5):
        numpy.testing.assert_allclose(kernel, straight, rtol=1e-6)


def errors_of(size, function, *args):
    """Return the error that `function` raises on every rank."""

    def rank():
        with pytest.raises(CheckpointError) as raised:
            function(*args)
        return raised.value

    return run_ranks(size, rank)


def test_missing_is_known_to_all(tmp_path):
    for error in errors_of(3, restore, tmp_path / "none.h5"):
        assert isinstance(error, CheckpointNotFoundError)
        assert "none.h5" in str(error) and error.on_all_ranks


def test_damage_is_known_to_all(tmp_path):
    path = tmp_path / "c.h5"
    run_ranks(1, train_and_save, path, 1)
    path.write_bytes(path.read_bytes()[:-100])
    for error in errors_of(3, restore, path):
        assert "c.h5 is truncated" in str(error)


def test_a_failed_save_is_known_to_all_with_its_reason(tmp_path):
    (tmp_path / "file").write_text("")
    errors = errors_of(3, train_and_save, tmp_path / "file" / "c.h5", 1)
    assert all("was not saved: rank 0:" in str(error) and str(tmp_path / "file") in str(error) for error in errors)
    assert isinstance(errors[0].__cause__, OSError)


def test_any_failure_of_the_chief_ends_the_wait_of_the_others():
    def fail():
        together(lambda: 1 / 0, "nothing was done")

    assert [str(error) for error in errors_of(2, fail)] == ["nothing was done: rank 0: division by zero"] * 2


def test_another_model_is_refused_and_unchanged(tmp_path):
    run_ranks(1, train_and_save, tmp_path / "c.h5", 1)

    def other():
        run = Run(kernel_shape=(3, 5))
        with pytest.raises(CheckpointError, match=r"'model/0' is float32\[3, 2\] there, expected float32\[3, 5\]"):
            run.checkpoint.restore(tmp_path / "c.h5")
        with pytest.raises(CheckpointError, match="no array 'bias'; it has nothing for 'more'"):
            Checkpoint(bias=Variable([1.0]), more=run.optimizer).restore(tmp_path / "c.h5")
        return run.kernel.value.tolist(), run.optimizer.iterations

    assert run_ranks(2, other) == [([[1.0] * 5] * 3, 0)] * 2


def test_only_what_can_be_saved_is_taken():
    with pytest.raises(TypeError, match="'model/w' is a ndarray"):
        Checkpoint(model={"w": numpy.zeros(3)})


def save_numbers(directory, numbers, max_to_keep):
    run = Run()
    manager = CheckpointManager(run.checkpoint, directory, max_to_keep)
    for number in numbers:
        run.train(1)
        manager.save(number)
    return [path.name for path in manager.checkpoints], manager.latest_checkpoint.name


@pytest.mark.parametrize(("keep", "left"), [(1, [11]), (3, [9, 10, 11]), (5, [8, 9, 10, 11]), (None, [8, 9, 10, 11])])
def test_the_newest_are_kept_by_number(tmp_path, keep, left):
    run_ranks(2, save_numbers, tmp_path / "run", [8, 9, 10, 11], keep)
    expected = [f"checkpoint-{number}.h5" for number in left]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(expected)
    newest = "checkpoint-12.h5"
    assert run_ranks(1, save_numbers, tmp_path / "run", [12], None) == [([*expected, newest], newest)]


def restore_newest(directory):
    run = Run()
    path = CheckpointManager(run.checkpoint, directory).restore_or_initialize()
    return path and path.name, run.optimizer.iterations


def test_a_damaged_newest_falls_back_to_the_one_before_with_a_warning(tmp_path, caplog):
    run_ranks(1, save_numbers, tmp_path, [1, 2, 3], None)
    newest = tmp_path / "checkpoint-3.h5"
    newest.write_bytes(newest.read_bytes()[:1000])
    (tmp_path / ".checkpoint-4.h5.killed-0123abcd-1-1.partial").write_bytes(b"")
    assert run_ranks(2, restore_newest, tmp_path) == [("checkpoint-2.h5", 2)] * 2
    assert caplog.text.count("checkpoint-3.h5 is truncated") == 1


def test_all_damaged_is_an_error_with_every_reason(tmp_path):
    run_ranks(1, save_numbers, tmp_path, [1, 2], None)
    for number, path in enumerate(tmp_path.iterdir()):
        path.write_bytes(bytes(number))
    for error in errors_of(2, restore_newest, tmp_path):
        assert "checkpoint-1.h5" in str(error) and "checkpoint-2.h5" in str(error)


def test_an_empty_or_missing_directory_restores_nothing(tmp_path):
    assert run_ranks(2, restore_newest, tmp_path) == [(None, 0)] * 2
    assert run_ranks(1, restore_newest, tmp_path / "none") == [(None, 0)]
    with pytest.raises(ValueError, match="max_to_keep"):
        CheckpointManager(Checkpoint(), tmp_path, 0)


def test_a_full_disk_is_said_once(tmp_path):
    """A limit on the size of files does here what a full disk does: writing fails, and closing fails again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = Checkpoint(large=Variable(numpy.ones(100_000)), more=Variable(numpy.ones(100_000)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="c.h5 was not saved: rank 0: .*File too large") as raised:
            checkpoint.save(tmp_path / "c.h5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shown = raised.value.__cause__
    assert isinstance(shown, OSError) and (shown.__cause__, shown.__context__) == (None, None)
    assert list(tmp_path.iterdir()) == []


_AFTER_A_FULL_DISK = """
import pathlib, resource, sys
import mpidist
path = pathlib.Path(sys.argv[1], "c.h5")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
try:
    mpidist.Checkpoint().save(path)
except mpidist.errors.CheckpointError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    mpidist.Checkpoint().save(path)
    print(path.exists())
"""


def test_after_a_full_disk_a_program_saves_again_and_ends_with_its_own_status(tmp_path):
    """HDF5 before 1.14.4 crashed the process."""
    command = [sys.executable, "-c", _AFTER_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def make_manager(directory):
    return CheckpointManager(Run().checkpoint, directory).checkpoints


@pytest.mark.parametrize("place", ["there", "new", "new/deep/er"])
def test_a_manager_leaves_nothing_behind_where_it_can_write(tmp_path, place):
    (tmp_path / "there").mkdir()
    assert run_ranks(2, make_manager, tmp_path / place) == [[], []]
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize("place", ["file", "file/below", "file/below/it"])
def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path, place):
    (tmp_path / "file").write_text("")
    for rank, error in enumerate(errors_of(2, make_manager, tmp_path / place)):
        assert isinstance(error, CheckpointError) and error.on_all_ranks, rank
        assert f"no checkpoint can be written to {tmp_path / place}; choose a directory" in str(error)
        assert "rank 0: [Errno" in str(error)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_what_was_made_for_a_try_that_fails_is_removed(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = Checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            CheckpointManager(checkpoint, tmp_path / "new" / "deep")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


class OfArray:
    """An object whose state is one array."""

    def __init__(self, array):
        self.array = array

    def state(self):
        return {"array": self.array}

    def restore(self, state):
        self.array = state["array"]


def test_states_that_differ_by_rank_are_told_of_once_each(tmp_path):
    """Only the chief's is saved: without a word all ranks would go on with it."""

    def on_rank():
        rank = MultiWorkerMirroredStrategy().extended.replica_id
        same, own = OfArray(numpy.arange(3)), OfArray(numpy.array([0.5, 0.5 + (rank == 1)]))
        checkpoint = Checkpoint(same=same, parts={"own": own}, w=Variable(numpy.ones(2)))
        for _ in range(2):
            checkpoint.save(tmp_path / "c.h5")
        same.array = numpy.arange(3, dtype="int64" if rank else "int32")  # equal numbers of another type
        checkpoint.save(tmp_path / "c.h5")

    with pytest.warns(RuntimeWarning) as told:
        run_ranks(3, on_rank)
    first, second = (str(each.message) for each in told)
    assert first.startswith("states differ from that of rank 0: 'parts/own/array' on ranks 1. A checkpoint holds")
    assert second.startswith("states differ from that of rank 0: 'same/array' on ranks 1, 2. A checkpoint holds")


class OfMany(OfArray):
    """An object whose state has 1000 entries: one number under 1000 names."""

    def state(self):
        return {f"entry {place}": self.array for place in range(1000)}


def test_the_states_of_many_entries_are_compared_by_one_number_of_each_rank(tmp_path, monkeypatch):
    """The entries go to all ranks once, where they differ and nobody was told of it."""
    sent = []
    exchange = Communicator.exchange

    def noted(self, payload, *args, **kwargs):
        sent.append(len(payload))
        return exchange(self, payload, *args, **kwargs)

    monkeypatch.setattr(Communicator, "exchange", noted)

    def on_rank():
        part = OfMany(1.5)
        checkpoint, longest = Checkpoint(part=part), []
        barrier = MultiWorkerMirroredStrategy().extended.communicator.barrier
        for is_other in (0, 1, 1):
            part.array = 1.5 + is_other * mpidist.rank()
            barrier()
            sent.clear()
            barrier()
            checkpoint.save(tmp_path / "c.h5")
            barrier()
            longest.append(max(sent))
        return longest

    with pytest.warns(RuntimeWarning, match="states differ from that of rank 0: 'part/entry 0' on ranks 1; "):
        same, differ, told = run_ranks(2, on_rank)[0]
    assert same < 100 and told < 100  # bytes
    assert differ > 1000 * len("entry 0")


def big_endian_round_trip(path):
    """Save a variable and a state from big-endian arrays, as FITS files have them; return what others restore."""
    given = numpy.arange(1, 4, dtype=">f4")
    Checkpoint(variable=Variable(given, name="v"), other=OfArray(given)).save(path)
    variable, other = Variable(numpy.zeros(3, "float32"), name="v"), OfArray(None)
    Checkpoint(variable=variable, other=other).restore(path)
    return variable.value.tolist(), other.array.tolist(), other.array.dtype.name


@pytest.mark.parametrize("size", [1, 2])
def test_arrays_of_the_other_byte_order_come_back_as_the_same_numbers(tmp_path, size):
    assert run_ranks(size, big_endian_round_trip, tmp_path / "c.h5") == [([1, 2, 3], [1, 2, 3], "float32")] * size


def save_text(path):
    with pytest.raises(CheckpointError, match="rank 0: 'other/array' cannot be saved: .* give text as str"):
        Checkpoint(other=OfArray(numpy.array(["cat", "dog"]))).save(path)


def test_arrays_of_text_are_refused_on_all_ranks_when_they_are_saved(tmp_path):
    run_ranks(2, save_text, tmp_path / "c.h5")
    assert not (tmp_path / "c.h5").exists()
