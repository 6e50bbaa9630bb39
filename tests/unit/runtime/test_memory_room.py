"""How much memory is left, from files as Linux has them."""

from __future__ import annotations

import errno

import pytest

from mpidist.runtime import memory_room, shared_memory
from mpidist.runtime.memory_room import room_bytes
from mpidist.runtime.shared_memory import SharedFile


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Return what writes a file of the system's."""
    names = {"_MACHINE": "meminfo", "_OWN_GROUP": "cgroup", "_GROUPS": "groups"}
    for name, file in names.items():
        monkeypatch.setattr(memory_room, name, tmp_path / file)

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("meminfo", "MemTotal:        8000 kB\nMemFree:     10 kB\nMemAvailable:    4000 kB\n")
    return write


def test_a_machine_says_what_is_available(system):
    assert room_bytes() == 4000 * 1024


def test_the_least_limit_of_the_groups_around_it_counts(system):
    system("cgroup", "0::/system.slice/job.scope\n")
    system("groups/system.slice/job.scope/memory.max", "max\n")
    system("groups/system.slice/job.scope/memory.current", "1000\n")
    system("groups/system.slice/memory.max", "500000\n")
    system("groups/system.slice/memory.current", "100000\n")
    system("groups/system.slice/memory.stat", "anon 60000\nfile 40000\ninactive_file 30000\n")
    assert room_bytes() == 500_000 - 100_000 + 30_000


def test_a_group_that_is_full_has_no_room(system):
    system("cgroup", "12:cpu:/x\n0::/\n")
    system("groups/memory.max", "1000\n")
    system("groups/memory.current", "1500\n")
    assert room_bytes() == 0


def test_systems_that_do_not_tell(system, tmp_path):
    (tmp_path / "meminfo").unlink()
    assert room_bytes() is None


def test_shared_memory_beyond_it_is_an_error_before_processes_are_ended(system, monkeypatch):
    system("meminfo", "MemAvailable: 8 kB\n")
    with pytest.raises(OSError, match="12288 bytes asked for, and 8192 are left") as raised:
        SharedFile(12288)
    assert raised.value.errno == errno.ENOMEM
    SharedFile(8192).unlink()
    monkeypatch.setattr(shared_memory, "room_bytes", lambda: None)
    SharedFile(12288).unlink()
