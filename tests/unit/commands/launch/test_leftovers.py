"""Only what is certainly this job's is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from mpidist.commands.launch.leftovers import Leftovers
from mpidist.commands.launch.watchdog import start_watchdog
from mpidist.options import RUN_TOKEN

SHARED = Path("/dev/shm")

pytestmark = pytest.mark.skipif(not (Path("/proc/self/maps").exists() and SHARED.is_dir()), reason="not Linux")

#: A process that makes files, maps the first and keeps the others open, until its input ends.
HOLDER = """
import mmap, sys
files = [open(path, "wb+") for path in sys.argv[1:]]
files[0].truncate(4096)
memory = mmap.mmap(files[0].fileno(), 4096)
files[0].close()
print("ready", flush=True)
sys.stdin.read()
"""


class Holder:
    def __init__(self, token, *paths):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *map(str, paths)],
            env={**os.environ, RUN_TOKEN: token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == b"ready\n"

    def end(self):
        self.process.communicate(b"")


@pytest.fixture
def hold():
    holders = []

    def start(token, *paths):
        holders.append(Holder(token, *paths))
        return holders[-1]

    yield start
    for holder in holders:
        holder.end()


@pytest.fixture
def path():
    """A name as MPICH gives it."""
    found = SHARED / f"mpich_shm_{uuid.uuid4().hex[:8]}_0"
    yield found
    found.unlink(missing_ok=True)


@pytest.fixture
def token():
    return uuid.uuid4().hex


def test_what_the_job_had_mapped_is_removed(hold, token, path):
    leftovers, holder = Leftovers(token), hold(token, path)
    leftovers.look()
    holder.end()
    assert leftovers.remove() == [str(path)]
    assert not path.exists()


def test_what_the_job_had_open_is_removed(hold, token, path, tmp_path):
    leftovers, topology = Leftovers(token), tmp_path / "hydra_hwloc_xmlfile_1aB2cD"
    holder = hold(token, path, topology)
    leftovers.look()
    holder.end()
    assert leftovers.remove() == sorted([str(path), str(topology)])


def test_what_another_job_has_is_left(hold, token, path):
    leftovers, holder = Leftovers(token), hold(uuid.uuid4().hex, path)
    leftovers.look()
    holder.end()
    assert leftovers.remove() == []
    assert path.exists()


def test_what_somebody_still_has_is_left(hold, token, path):
    leftovers, holder = Leftovers(token), hold(token, path)
    leftovers.look()
    with path.open("rb"):
        holder.end()
        assert leftovers.remove() == []
    assert path.exists()
    assert leftovers.remove() == [str(path)]


def test_another_file_of_the_same_name_is_left(hold, token, path):
    leftovers, holder = Leftovers(token), hold(token, path)
    leftovers.look()
    other = path.with_name(f"{path.name}.other")
    other.touch()
    other.replace(path)
    holder.end()
    assert leftovers.remove() == []
    assert path.exists()


def test_files_of_other_names_are_left(hold, token, path):
    leftovers, own = Leftovers(token), path.with_name(path.name.replace("mpich_shm", "my_data"))
    holder = hold(token, own)
    leftovers.look()
    holder.end()
    try:
        assert leftovers.remove() == []
        assert own.exists()
    finally:
        own.unlink()


def test_what_is_gone_is_not_mentioned(hold, token, path):
    leftovers, holder = Leftovers(token), hold(token, path)
    leftovers.look()
    holder.end()
    path.unlink()
    assert leftovers.remove() == []


@pytest.mark.parametrize("same", [True, False])
def test_a_rank_writes_down_what_it_has_mapped(hold, token, path, tmp_path, same):
    holder = hold(token, path)
    maps = Path(f"/proc/{holder.process.pid}/maps").read_text()
    holder.end()
    if not same:
        other = path.with_name(f"{path.name}.other")
        other.touch()
        other.replace(path)
    (tmp_path / "0.joined").write_text(maps)
    leftovers = Leftovers(token)
    leftovers.take_notes(str(tmp_path))
    assert leftovers.remove() == [str(path)] * same


def test_the_watchdog_removes_it_when_mpidist_run_was_killed(hold, token, path, tmp_path):
    hold(token, path)
    watchdog = start_watchdog(token, str(tmp_path / "notes"))
    watchdog.communicate(b"", timeout=20)
    assert watchdog.returncode == 0
    assert not path.exists()


def test_looks_become_seldom(token, monkeypatch):
    leftovers, looks = Leftovers(token), []
    monkeypatch.setattr(leftovers, "look", lambda: looks.append(None))
    per_second = []
    for second in range(100):
        before = len(looks)
        for turn in range(20):
            leftovers.look_at(1000 + second + turn / 20)
        per_second.append(len(looks) - before)
    assert per_second[0] == 4
    assert sum(per_second[60:]) <= 20
