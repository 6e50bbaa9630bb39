"""Shared files: seen by two mappings, gone without a trace."""

import os
from pathlib import Path

import pytest

from mpidist.runtime.shared_memory import SharedFile, map_file


def _names():
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("mpidist*")} if folder.is_dir() else set()


def test_what_one_mapping_writes_the_other_reads():
    file = SharedFile(8192)
    mine, theirs = file.map(), map_file(file.path)
    file.unlink()
    mine[100:105] = b"hello"
    assert theirs[100:105] == b"hello"
    assert len(mine) == len(theirs) == 8192


def test_fresh_memory_is_zero():
    file = SharedFile(4096)
    assert bytes(file.map()) == bytes(4096)
    file.unlink()


def test_nobody_can_open_it_after_unlink_and_no_name_is_left():
    before = _names()
    file = SharedFile(4096)
    path = file.path
    file.unlink()
    file.unlink()
    with pytest.raises(OSError):
        map_file(path)
    assert _names() == before


def test_too_much_memory_is_an_error_and_leaves_nothing():
    before, open_files = _names(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        SharedFile(1 << 60)
    assert _names() == before
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_named_files_where_the_system_has_no_anonymous_ones(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    before = _names()
    file = SharedFile(4096)
    mine, theirs = file.map(), map_file(file.path)
    mine[0:1] = b"x"
    assert theirs[0:1] == b"x"
    file.unlink()
    assert _names() == before


def test_a_file_that_is_empty_is_not_there():
    """A file that is being made has the number, and so the path, of one that was closed."""
    file = SharedFile(0)
    with pytest.raises(FileNotFoundError, match="is empty: the memory that was there is gone"):
        map_file(file.path)
    file.unlink()
