"""A directory belongs to one job, which others name; and a job can always resume."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import CheckpointError
from mpidist.runtime import board
from mpidist.runtime.process_identity import ProcessIdentity
from mpidist.testing import run_ranks
from mpidist.training import hdf5_file, owner
from mpidist.training.owner import Owner
from mpidist.training.temporary_files import temporary


def manager_of(directory, **options):
    v = mpidist.Variable(numpy.arange(3.0), name="v")
    return mpidist.CheckpointManager(mpidist.Checkpoint(v=v), directory, **options)


def claimed_by(directory, identity, age=0.0):
    """Leave the file of another owner, renewed some seconds ago."""
    directory.mkdir(exist_ok=True)
    about = {"job": "Slurm job 4711", "script": "other.py", "since": "2026-01-01 00:00:00"}
    (directory / ".owner").write_text(json.dumps({**identity._asdict(), **about}))
    os.utime(directory / ".owner", (time.time() - age, time.time() - age))


def living():
    """Return the identity of a process of this machine that runs, and is not this one."""
    parent = os.getppid()
    return ProcessIdentity.own()._replace(process=parent, started=board.start_time(parent))


def dead():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ProcessIdentity.own()._replace(process=ended.pid, started=12345)


def elsewhere():
    return ProcessIdentity("node7", "0123abcd", 99, 5)


def test_another_job_at_work_is_named_on_all_ranks(tmp_path):
    claimed_by(tmp_path, living())

    def save():
        with pytest.raises(CheckpointError) as raised:
            manager_of(tmp_path).save()
        return str(raised.value), raised.value.on_all_ranks

    for message, on_all_ranks in run_ranks(2, save):
        assert f"another job saves in {tmp_path}: process {os.getppid()} on " in message and on_all_ranks
        assert "Slurm job 4711, other.py, since 2026-01-01" in message
        assert f"if that job has ended, remove {tmp_path}/.owner" in message
    assert [path.name for path in tmp_path.iterdir()] == [".owner"]


GONE = {
    "its process has ended": lambda: dead(),
    "its process number is another process's": lambda: living()._replace(started=1),
    "its process number is ours": lambda: ProcessIdentity.own()._replace(started=1),
}


@pytest.mark.parametrize("why", GONE)
def test_an_owner_that_died_here_is_followed_at_once(why, tmp_path, caplog):
    claimed_by(tmp_path, GONE[why]())
    manager = manager_of(tmp_path)
    assert manager.save().exists()
    assert "which is gone; this job goes on there" in caplog.text
    assert json.loads((tmp_path / ".owner").read_text())["process"] == os.getpid()


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.binary(), st.sampled_from([b"{}", b"[]", b"null", b'{"host": 3}', b'{"process": "x"}'])))
def test_a_damaged_file_keeps_nobody_out(raw):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".owner").write_bytes(raw)
        manager = manager_of(folder)
        assert manager.save().exists() and manager.save().exists()


def test_an_owner_elsewhere_is_gone_when_it_is_old(tmp_path, monkeypatch):
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: pytest.fail("nothing to wait for"))
    claimed_by(tmp_path, elsewhere(), age=owner.LEASE_SECONDS + 1)
    assert manager_of(tmp_path).save().exists()


@pytest.mark.parametrize("end", ["its lease ends", "it is removed", "its clock is ahead"])
def test_an_owner_elsewhere_is_given_the_time_of_its_lease(end, tmp_path, monkeypatch):
    """Time passes where it is slept."""
    slept, file, now = [], tmp_path / ".owner", time.monotonic()
    claimed_by(tmp_path, elsewhere(), age=-1e6 if end == "its clock is ahead" else 1.0)

    def sleep(seconds):
        slept.append(seconds)
        if end == "it is removed":
            file.unlink(missing_ok=True)

    monkeypatch.setattr(owner.time, "sleep", sleep)
    monkeypatch.setattr(owner.time, "monotonic", lambda: now + sum(slept))
    assert manager_of(tmp_path).save().exists()
    assert 1 <= sum(slept) <= owner.LEASE_SECONDS + 1


@pytest.mark.parametrize("written", [-5.0, 5.0], ids=["later", "by a clock that was set back"])
def test_an_owner_elsewhere_that_saves_meanwhile_is_named(written, tmp_path, monkeypatch):
    claimed_by(tmp_path, elsewhere(), age=10.0)
    renewed = time.time() - 10.0 - written
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: os.utime(tmp_path / ".owner", (renewed, renewed)))
    with pytest.raises(CheckpointError, match="another job saves in .*process 99 on node7, Slurm job 4711"):
        manager_of(tmp_path).save()


@pytest.mark.parametrize("who", [living, elsewhere, dead])
def test_a_job_that_has_lost_its_directory_never_takes_it_back(who, tmp_path):
    manager = manager_of(tmp_path)
    first = manager.save()
    claimed_by(tmp_path, who(), age=1e6)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="another job has taken .*Slurm job 4711"):
            manager.save()
    assert manager.checkpoints == [first]


def test_nor_when_the_other_has_left_again(tmp_path):
    manager = manager_of(tmp_path)
    first = manager.save()
    (tmp_path / ".owner").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="another job has taken .*it has left again"):
            manager.save()
    assert manager.checkpoints == [first]


def test_a_directory_that_was_given_up_or_removed_is_claimed_again(tmp_path):
    manager = manager_of(tmp_path / "run")
    manager.save()
    manager.clear()
    assert not (tmp_path / "run").exists() and manager.save().exists()
    shutil.rmtree(tmp_path / "run")
    assert manager.save().exists()
    (tmp_path / "run" / "notes").write_text("so that the directory stays")
    manager.clear()
    assert manager.save().exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_who_is_quicker_in_following_a_dead_owner_keeps_the_directory(has_links, tmp_path, monkeypatch):
    claimed_by(tmp_path, dead())
    real = Owner._lives

    def lives(*args):
        found = real(*args)
        claimed_by(tmp_path, living())
        return found

    monkeypatch.setattr(Owner, "_lives", lives)
    if not has_links:
        monkeypatch.setattr(owner.os, "link", refuse_links)
    with pytest.raises(CheckpointError, match=rf"another job has just taken .*process {os.getppid()} on"):
        manager_of(tmp_path).save()
    assert json.loads((tmp_path / ".owner").read_text())["process"] == os.getppid()
    assert [path.name for path in tmp_path.iterdir()] == [".owner"]


def refuse_links(*args):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_file_system_without_links_has_owners_too(tmp_path, monkeypatch):
    monkeypatch.setattr(owner.os, "link", refuse_links)
    manager = manager_of(tmp_path)
    assert manager.save().exists() and manager.save().exists()
    assert json.loads((tmp_path / ".owner").read_text())["process"] == os.getpid()


@pytest.mark.parametrize("moment", ["while it is written", "when it gets its name"])
def test_a_directory_lost_in_a_save_is_no_success(moment, tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    first = manager.save()
    name = "add_trailer" if moment == "while it is written" else "_sync_directory"
    real = getattr(hdf5_file, name)

    def lose(*args):
        claimed_by(tmp_path, living())
        return real(*args)

    monkeypatch.setattr(hdf5_file, name, lose)
    with pytest.raises(CheckpointError, match="another job has taken"):
        manager.save()
    expected = [first] if moment == "while it is written" else [first, tmp_path / "checkpoint-2.h5"]
    assert manager.checkpoints == expected
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


@pytest.mark.parametrize("then", ["replaced", "removed"])
def test_a_file_that_is_not_there_as_it_was_written_is_no_success(then, tmp_path, monkeypatch):
    real, path = os.replace, tmp_path / "c.h5"

    def replace(written, target):
        real(written, target)
        os.unlink(target)
        if then == "replaced":
            path.write_text("another job's")

    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(numpy.zeros(3)))
    monkeypatch.setattr(hdf5_file.os, "replace", replace)
    with pytest.raises(CheckpointError, match="another job has replaced .*c.h5 at the same time"):
        checkpoint.save(path)


def test_the_file_goes_with_the_last_manager_and_stays_with_the_process_that_forked(tmp_path):
    managers = [manager_of(tmp_path), manager_of(tmp_path)]
    for number, manager in enumerate(managers):
        manager.save(number)
    child = os.fork()
    if not child:
        try:
            managers.clear()
            gc.collect()
            os._exit(0 if (tmp_path / ".owner").exists() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del manager, managers[0]
    gc.collect()
    assert (tmp_path / ".owner").exists()
    managers.clear()
    gc.collect()
    assert not (tmp_path / ".owner").exists()


def test_who_only_reads_needs_no_directory_of_its_own(tmp_path):
    manager_of(tmp_path).save()
    gc.collect()
    claimed_by(tmp_path, living())
    before = (tmp_path / ".owner").read_text()
    assert manager_of(tmp_path).restore_or_initialize().name == "checkpoint-1.h5"
    assert (tmp_path / ".owner").read_text() == before


def test_managers_of_one_job_share_a_directory(tmp_path):
    """Each keeps as many as it is to; what both have saved is there as long as one of them keeps it."""
    many, few = manager_of(tmp_path, max_to_keep=None), manager_of(tmp_path, max_to_keep=1)
    for number in range(1, 7):
        few.save(number)
        if number % 2:
            many.save(number)
    assert [path.name for path in many.checkpoints] == [f"checkpoint-{number}.h5" for number in (1, 3, 5, 6)]
    few.clear()
    assert [path.name for path in many.checkpoints] == [f"checkpoint-{number}.h5" for number in (1, 3, 5)]
    assert many.save().name == "checkpoint-6.h5"


def test_what_the_dead_have_left_is_removed_and_nothing_else(tmp_path):
    def left(name, identity):
        return f".{name}.{identity.tag}.partial"

    gone = [left("checkpoint-1.h5", dead()), left(".owner", dead())]
    gone += [left("checkpoint-3.h5", elsewhere())]  # the directory is ours now
    kept = [
        left("checkpoint-1.h5", living()),
        ".mine.partial",
        ".checkpoint-2.h5.partial",
        left("theirs.h5", elsewhere()),
        "checkpoint-1.partial",
    ]
    for name in gone + kept:
        (tmp_path / name).write_text("")
    manager = manager_of(tmp_path)
    manager.save(7)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, ".owner", "checkpoint-7.h5"])

    old = left("c.h5", elsewhere())
    for name, age in [
        (old, 7200),
        (left("c.h5", ProcessIdentity("node8", "0123abcd", 1, 1)), 0),
        (left("c.h5", dead()), 0),
    ]:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    manager.checkpoint.save(tmp_path / "c.h5")
    assert [path.name for path in tmp_path.glob(".c.h5.*")] == [
        left("c.h5", ProcessIdentity("node8", "0123abcd", 1, 1))
    ]


def test_temporary_names_are_of_one_process(tmp_path):
    name = temporary(tmp_path / "c.h5").name
    own = ProcessIdentity.own()
    assert name == f".c.h5.{own.tag}.partial" and str(os.getpid()) in name
    assert ProcessIdentity.of_tag(own.tag) == own._replace(host=own.tag.split("-" + own.machine)[0])
    assert own.lives is True and dead().lives is False and elsewhere().lives is None
