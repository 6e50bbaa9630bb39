"""Where output goes: files by rank, or the terminal."""

from __future__ import annotations

import os
import threading
import time

import pytest

from mpidist.commands.launch.destinations import LogFiles, Terminal
from mpidist.errors import LaunchError


class Quiet(LogFiles):
    def __init__(self, *args):
        self.shown = []
        super().__init__(*args)

    def show(self, descriptor, data):
        self.shown.append((descriptor, data))


def test_each_rank_has_a_file_and_the_launcher_the_terminal(tmp_path):
    folder = tmp_path / "a" / "b"
    for round_number in (1, 2):  # a job that is started again goes on with its files
        logs = Quiet(str(folder), 2)
        for rank in (0, 1):
            logs.take(rank, 1, b"out %d of %d\n" % (round_number, rank))
            logs.take(rank, 2, b"error of %d\n" % rank)
        logs.take(None, 2, b"mpirun says\n")
        logs.close()
        assert logs.shown == [(2, b"mpirun says\n")]
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.log", "rank1.log"]
    assert (folder / "rank1.log").read_text() == "out 1 of 1\nerror of 1\nout 2 of 1\nerror of 1\n"


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "logs").write_text("mine")
    with pytest.raises(LaunchError, match="--log-dir .*logs: .*exists"):
        LogFiles(str(tmp_path / "logs"), 2)


def test_what_cannot_be_written_is_shown(tmp_path):
    logs = Quiet(str(tmp_path), 1)
    logs._files[0].close()
    logs._files[0] = open("/dev/full", "ab")  # noqa: SIM115
    logs.take(0, 1, b"a line\n")
    logs.close()
    ((descriptor, data),) = logs.shown
    assert descriptor == 1 and b"No space left" in data and data.endswith(b"\na line\n")


def test_output_that_does_not_wait_gets_all_of_it_nevertheless():
    """More than a pipe holds, into one that says at once when it is full, as those of Node.js do."""
    source, target = os.pipe()
    os.set_blocking(target, False)
    data, read = b"x" * (1 << 20), []

    def reader():
        time.sleep(0.05)
        while piece := os.read(source, 1 << 16):
            read.append(piece)

    other = threading.Thread(target=reader)
    other.start()
    try:
        Terminal().show(target, data)
    finally:
        os.close(target)
        other.join()
        os.close(source)
    assert b"".join(read) == data
