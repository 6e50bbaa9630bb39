"""Which checkpoints a manager keeps, under which numbers, and what it removes."""

from __future__ import annotations

import os
import shutil
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks
from mpidist.training import hdf5_file


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".owner")


def named(*numbers):
    return [f"checkpoint-{number}.h5" for number in numbers]


def manager_of(directory, **options):
    v = mpidist.Variable(numpy.arange(3.0), name="v")
    return mpidist.CheckpointManager(mpidist.Checkpoint(v=v), directory, **options), v


def test_numbers_go_on_from_the_highest(tmp_path):
    def save():
        manager, _ = manager_of(tmp_path, max_to_keep=None)
        return [manager.save(number).name for number in (None, None, 7, 5, None)]

    assert run_ranks(2, save) == [[f"checkpoint-{number}.h5" for number in (1, 2, 7, 5, 8)]] * 2
    assert names(tmp_path) == [*named(1, 2, 5, 7, 8), "checkpoint.order"]
    assert manager_of(tmp_path)[0].checkpoints == [tmp_path / name for name in named(1, 2, 7, 5, 8)]


class Saves:
    """Managers of one directory, one after the other as in jobs of their own; what is saved is the number."""

    def __init__(self, directory, **options):
        self.directory, self.options = directory, options

    def manager(self):
        v = mpidist.Variable(numpy.float64(-1.0), name="v")
        return mpidist.CheckpointManager(mpidist.Checkpoint(v=v), self.directory, **self.options), v

    def save(self, *numbers):
        def on_rank():
            manager, v = self.manager()
            for number in numbers:
                v.assign(float(number))
                manager.save(number)
            return [path.name for path in manager.checkpoints]

        return run_ranks(2, on_rank)[0]  # the chief's: it removes what is old when the others go on

    def restore(self):
        def on_rank():
            manager, v = self.manager()
            path = manager.restore_or_initialize()
            return path.name, manager.latest_checkpoint.name, float(v.value)

        first, second = run_ranks(2, on_rank)
        assert first == second
        return first


def test_the_newest_is_the_one_saved_last_whatever_its_number(tmp_path):
    saves = Saves(tmp_path, max_to_keep=3)
    assert saves.save(10, 20, 30, 40) == named(20, 30, 40)
    assert saves.save(4) == named(30, 40, 4)  # a training that began anew
    assert saves.restore() == ("checkpoint-4.h5", "checkpoint-4.h5", 4.0)
    assert saves.save(8, 12) == named(4, 8, 12)
    assert saves.restore() == ("checkpoint-12.h5", "checkpoint-12.h5", 12.0)
    saves.save(16)
    assert names(tmp_path) == sorted(named(8, 12, 16))  # the numbers tell the order again


def test_the_order_of_the_saves_is_kept_over_several_that_began_anew(tmp_path):
    saves = Saves(tmp_path, max_to_keep=None)
    saves.save(20, 40)
    saves.save(10, 30)
    assert saves.save(5) == named(20, 40, 10, 30, 5)
    assert saves.save(40) == named(20, 10, 30, 5, 40)  # its number is saved again
    (tmp_path / "checkpoint-40.h5").write_bytes(b"damaged")
    assert saves.restore() == ("checkpoint-5.h5", "checkpoint-40.h5", 5.0)


def test_a_directory_that_is_copied_or_thinned_out_keeps_its_order(tmp_path):
    saves = Saves(tmp_path / "run", max_to_keep=None)
    saves.save(20, 40)
    saves.save(4, 8)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    (tmp_path / "copy" / "checkpoint-8.h5").unlink()
    copied = Saves(tmp_path / "copy", max_to_keep=2)
    assert copied.restore() == ("checkpoint-4.h5", "checkpoint-4.h5", 4.0)
    assert copied.save(6) == named(4, 6)


def test_what_was_saved_last_is_the_newest_if_its_process_was_killed_before_it_was_noted(tmp_path):
    saves = Saves(tmp_path, max_to_keep=None)
    saves.save(20, 40)
    saves.save(4)
    before = (tmp_path / "checkpoint.order").read_text()
    saves.save(8)
    (tmp_path / "checkpoint.order").write_text(before)
    assert saves.restore() == ("checkpoint-8.h5", "checkpoint-8.h5", 8.0)


class InSave:
    """A part of a checkpoint that calls a function on the chief in the midst of a save."""

    may_be_missing = True

    def __init__(self, fn):
        self.fn = fn

    def state(self):
        if mpidist.rank() == 0:
            self.fn()
        return {}

    def restore(self, state):
        """Take over nothing."""


@pytest.mark.parametrize(
    ("before", "number", "newest"),
    [([[20, 40]], 4, 40), ([[20, 40]], 20, 40), ([[20, 40], [10]], 20, 10), ([[20, 40], [10, 30]], 30, 30)],
)
def test_a_training_anew_that_is_killed_in_a_save_or_before_its_note(tmp_path, before, number, newest):
    """In the save, the newest before is the newest; before the note, the one just saved is."""
    run, in_save, unnoted = (tmp_path / name for name in ("run", "in_save", "unnoted"))
    for numbers in before:
        Saves(run, max_to_keep=None).save(*numbers)

    def save():
        v = mpidist.Variable(numpy.float64(0.5), name="v")
        part = InSave(lambda: shutil.copytree(run, in_save, copy_function=shutil.copyfile))
        manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=v, part=part), run, max_to_keep=None)
        return manager.save(number)

    saved, _ = run_ranks(2, save)
    shutil.copytree(in_save, unnoted, copy_function=shutil.copyfile)
    shutil.copyfile(saved, unnoted / saved.name)
    assert Saves(in_save).restore() == (f"checkpoint-{newest}.h5", f"checkpoint-{newest}.h5", float(newest))
    assert Saves(unnoted).restore() == (saved.name, saved.name, 0.5)
    assert Saves(run).restore() == (saved.name, saved.name, 0.5)


def test_an_order_is_not_prepared_in_a_directory_of_another_job(tmp_path, monkeypatch):
    Saves(tmp_path).save(20, 40)
    before = names(tmp_path)

    def refuse(self):
        raise CheckpointError("job 7 saves in it")

    monkeypatch.setattr("mpidist.training.owner.Owner.claim", refuse)

    def on_rank():
        manager, _ = manager_of(tmp_path)
        with pytest.raises(CheckpointError, match="checkpoint-20.h5 was not saved: rank 0: job 7 saves in it"):
            manager.save(20)

    run_ranks(2, on_rank)
    assert names(tmp_path) == before


def test_managers_of_other_names_have_orders_of_their_own(tmp_path):
    one, other = Saves(tmp_path), Saves(tmp_path, checkpoint_name="other")
    one.save(20, 40)
    other.save(1, 30)
    one.save(4)
    other.save(50)
    assert one.restore()[0] == "checkpoint-4.h5" and other.restore()[0] == "other-50.h5"
    assert "checkpoint.order" in names(tmp_path) and "other.order" not in names(tmp_path)


def test_a_damaged_file_of_the_order_is_an_error_on_all_ranks(tmp_path):
    saves = Saves(tmp_path)
    saves.save(20, 40)
    saves.save(4)
    (tmp_path / "checkpoint.order").write_text("[20, 40")

    def on_rank():
        with pytest.raises(CheckpointError) as raised:
            saves.manager()
        return str(raised.value), raised.value.on_all_ranks

    for message, on_all_ranks in run_ranks(2, on_rank):
        assert f"{tmp_path}/checkpoint.order is damaged: got '[20, 40', expected the numbers" in message
        assert "rank 0" in message and "or remove it: then the highest number is the newest" in message
        assert on_all_ranks
    (tmp_path / "checkpoint.order").unlink()
    assert saves.restore()[0] == "checkpoint-40.h5"


def test_an_order_that_cannot_be_noted_is_an_error_on_all_ranks(tmp_path):
    Saves(tmp_path).save(20, 40)
    order = tmp_path / "checkpoint.order"

    def hinder():
        if order.is_file():
            order.unlink()
            order.mkdir()

    def on_rank():
        manager = mpidist.CheckpointManager(mpidist.Checkpoint(part=InSave(hinder)), tmp_path)
        manager.save(41)
        messages = []
        for number in (4, 3):
            with pytest.raises(CheckpointError) as raised:
                manager.save(number)
            assert raised.value.on_all_ranks
            messages.append(str(raised.value))
        return messages

    for after, before in run_ranks(2, on_rank):
        assert f"checkpoint {tmp_path}/checkpoint-4.h5 was saved, and not noted as the newest: rank 0: " in after
        assert f"checkpoint {tmp_path}/checkpoint-3.h5 was not saved: rank 0: " in before
    assert "checkpoint-4.h5" in names(tmp_path) and "checkpoint-3.h5" not in names(tmp_path)


def test_clear_removes_the_order_too(tmp_path):
    Saves(tmp_path / "run").save(20, 40)
    manager, _ = manager_of(tmp_path / "run")
    manager.save(4)
    manager.restore_or_initialize()
    manager.clear()
    assert list(tmp_path.iterdir()) == []


def test_clear_leaves_a_damaged_file_of_the_order(tmp_path):
    """Only the chief clears, at the end of a training: an error would end the job that is done."""
    manager, _ = manager_of(tmp_path)
    manager.save(4)
    (tmp_path / "checkpoint.order").write_text("[20, 40")
    manager.clear()
    assert names(tmp_path) == ["checkpoint.order"]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 6), st.integers(1, 9))
def test_as_many_as_asked_for_are_kept(keep, count):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        manager, _ = manager_of(folder, max_to_keep=keep)
        for _ in range(count):
            manager.save()
        kept = range(max(1, count - keep + 1), count + 1)
        assert names(Path(folder)) == [f"checkpoint-{number}.h5" for number in kept]


def test_one_is_kept_for_good_every_so_many_hours(tmp_path):
    manager, _ = manager_of(tmp_path, max_to_keep=2, keep_checkpoint_every_n_hours=1)
    start = time.time()
    for number in range(1, 9):  # one every 25 minutes
        path = manager.save(number)
        os.utime(path, (start, start + number * 25 * 60))
    # 3 is the first an hour after the start, 6 the first an hour after 3; 7 and 8 are the newest
    assert names(tmp_path) == [f"checkpoint-{number}.h5" for number in (3, 6, 7, 8)]

    manager, _ = manager_of(tmp_path, max_to_keep=2, keep_checkpoint_every_n_hours=1)
    for number in range(9, 12):
        path = manager.save(number)
        os.utime(path, (start, start + number * 25 * 60))
    assert names(tmp_path) == sorted(f"checkpoint-{number}.h5" for number in (3, 6, 9, 10, 11))


def test_what_killed_saves_have_left_is_removed(tmp_path):
    (tmp_path / ".checkpoint-3.h5.killed-0123abcd-1-1.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    manager, _ = manager_of(tmp_path)
    assert manager.latest_checkpoint is None and manager.restore_or_initialize() is None
    manager.save()
    assert names(tmp_path) == ["checkpoint-1.h5", "notes.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep must be 1 or more, or None for all; got 0"),
        ({"keep_checkpoint_every_n_hours": 0}, "keep_checkpoint_every_n_hours must be positive, got 0"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        manager_of(tmp_path, **options)
    with pytest.raises(ValueError, match="a checkpoint's number must be 0 or more, got -1"):
        manager_of(tmp_path)[0].save(-1)


#: A part of a checkpoint file -> the bytes to damage: from where, and how many; or what is left of it.
PARTS = {
    "superblock": lambda raw: (0, 8),
    "superblock's end": lambda raw: (40, 8),
    "header of a group": lambda raw: (raw.index(b"OHDR"), 6),
    "name": lambda raw: (raw.index(b"crc32"), 1),
    "data": lambda raw: (raw.index(numpy.arange(3.0).tobytes()) + 8, 8),
    "checksum of the data": lambda raw: (raw.index(b"crc32") + 40, 8),
    "trailer": lambda raw: (raw.rindex(b"format"), 3),
    "checksum of the trailer": lambda raw: (len(raw) - 12, 4),
    "mark": lambda raw: (len(raw) - 4, 2),
}
TRUNCATED = {"nothing": 0, "a few bytes": 20, "half": 0.5, "without its last byte": -1}


@pytest.mark.parametrize("part", [*PARTS, *TRUNCATED])
def test_the_generation_before_is_used_where_any_part_of_the_newest_is_damaged(tmp_path, caplog, part):
    def save():
        manager, v = manager_of(tmp_path)
        manager.save(1)
        v.assign_add(numpy.ones(3))
        v.assign_sub(numpy.ones(3))
        manager.save(2)

    run_ranks(1, save)
    path = tmp_path / "checkpoint-2.h5"
    raw = path.read_bytes()
    if part in PARTS:
        start, count = PARTS[part](raw)
        assert 0 <= start < start + count <= len(raw)
        damaged = raw[:start] + bytes(byte ^ 0x55 for byte in raw[start : start + count]) + raw[start + count :]
    else:
        left = TRUNCATED[part]
        damaged = raw[: int(left * len(raw)) if isinstance(left, float) else left]
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="checkpoint-2.h5 is (damaged|truncated)"):
        hdf5_file.read(path)

    def restore():
        manager, v = manager_of(tmp_path)
        v.assign(numpy.zeros(3))
        return manager.restore_or_initialize().name, v.value.tolist()

    assert run_ranks(2, restore) == [("checkpoint-1.h5", [0, 1, 2])] * 2
    assert "checkpoint-2.h5 is" in caplog.text and "trying the checkpoint before it" in caplog.text


def test_a_fault_of_every_checkpoint_is_told_once(tmp_path, caplog):
    """As after a change of the model: three times the same list of shapes hides what is to be done."""

    def save():
        manager, _ = manager_of(tmp_path)
        for number in (1, 2, 3):
            manager.save(number)

    run_ranks(1, save)

    def restore():
        wider = mpidist.Variable(numpy.zeros(5), name="v")
        mpidist.CheckpointManager(mpidist.Checkpoint(v=wider), tmp_path, 3).restore_or_initialize()

    (raised,) = run_ranks(1, lambda: pytest.raises(CheckpointError, restore))
    message = str(raised.value)
    assert message.count("float64[3]") == caplog.text.count("float64[3]") == 1
    assert message.startswith(f"no checkpoint in {tmp_path} can be restored: checkpoint {tmp_path}/checkpoint-3.h5 ")
    assert " (the same: checkpoint-2.h5, checkpoint-1.h5). To train anew, use another directory" in message
    for number in (1, 2):
        assert f"{tmp_path}/checkpoint-{number}.h5: the same; trying the checkpoint before it" in caplog.text
