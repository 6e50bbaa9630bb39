"""Output of ranks through pipes of their own."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from mpidist.commands.launch import output_streams
from mpidist.commands.launch.destinations import Terminal
from mpidist.commands.launch.launcher_options import WORDS
from mpidist.commands.launch.output_streams import STDERR, STDOUT, OutputStreams


class Recorded(Terminal):
    """A terminal that keeps what is shown there."""

    def __init__(self, has_tags=False):
        super().__init__(has_tags)
        self.shown = []

    def show(self, descriptor, data):
        self.shown.append((descriptor, data))


@pytest.fixture
def made():
    """Make output streams of two ranks, which note what they show and pass on."""
    all_made = []

    def make(has_tags=False, vendor=None):
        destination, lines = Recorded(has_tags), []
        tagged = WORDS[vendor].tagged if vendor else None
        take = lambda rank, line: lines.append((rank, line))  # noqa: E731
        all_made.append(OutputStreams(2, (STDOUT, STDERR), destination, take, tagged))
        all_made[-1].shown, all_made[-1].lines = destination.shown, lines
        return all_made[-1]

    yield make
    for streams in all_made:
        if os.path.isdir(streams.folder):
            streams.close()


@pytest.fixture
def streams(made):
    return made()


def start(streams, script, variable, rank):
    """Start a rank the way a launcher does: the command, and the rank in a variable."""
    environ = {"PATH": os.environ["PATH"], variable: str(rank)}
    return subprocess.Popen(streams.command(["sh", "-c", script]), env=environ, stderr=subprocess.PIPE)


def test_a_rank_on_another_machine_that_sees_the_folder_leaves_its_pipes_alone(streams, tmp_path):
    """There nobody reads them, and a rank that opened one would wait for ever; nor does it open one of the user's."""
    os.mkfifo(tmp_path / ".2")
    command = streams.command(["sh", "-c", "echo from 1 >&2"])
    at = command.index(streams.folder) + 1
    command[at] = "another start\npid:[1]"
    environ = {**os.environ, "PMI_RANK": "1"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, timeout=20)
    streams.close()
    assert (done.returncode, done.stderr, streams.lines) == (0, b"from 1\n", [])


def test_a_word_at_which_launchers_begin_another_program_is_one_of_the_programs(streams):
    command = streams.command(["printf", "<%s>", "a", ":", "b c", "", "it's $x"])
    assert ":" not in command
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, timeout=20)
    assert done.stdout == b"<a><:><b c><><it's $x>"


def test_a_rank_on_this_machine_notes_its_process_and_one_on_another_does_not(streams):
    for rank, other in ((0, False), (1, True)):
        command = streams.command(["true"])
        command[command.index(streams.folder) + 1] += "x" if other else ""
        subprocess.run(command, env={**os.environ, "PMI_RANK": str(rank)}, check=True, timeout=20)
    assert list(streams.rank_of_process().values()) == [0]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_lines_come_with_the_rank_that_wrote_them(streams, variable):
    for rank in range(2):
        assert start(streams, f"echo from {rank} >&2", variable, rank).communicate(timeout=20) == (None, b"")
    streams.close()
    assert sorted(streams.lines) == [(0, "from 0"), (1, "from 1")]
    assert sorted(streams.shown) == [(STDERR, b"from 0\n"), (STDERR, b"from 1\n")]


def test_standard_output_is_shown_as_such(streams):
    assert start(streams, "echo out; echo error >&2", "PMI_RANK", 1).wait(timeout=20) == 0
    streams.close()
    assert sorted(streams.shown) == [(STDOUT, b"out\n"), (STDERR, b"error\n")]
    assert streams.lines == [(1, "error")]


def test_the_rank_keeps_the_process_and_its_exit_status(streams):
    process = start(streams, "echo $$ >&2; exit 7", "PMI_RANK", 1)
    assert process.wait(timeout=20) == 7
    streams.close()
    assert streams.lines == [(1, str(process.pid))]


def test_a_rank_without_a_pipe_writes_to_the_launcher(streams):
    process = start(streams, "echo lost >&2", "PMI_RANK", 2)
    assert process.communicate(timeout=20) == (None, b"lost\n")
    streams.close()
    assert streams.lines == []


def test_the_launcher_s_messages_are_text(streams):
    read, write = os.pipe()
    streams.add_launcher(read, STDERR)
    os.write(write, b"rank 1 exited\n\0")
    streams.pump(0)
    os.write(write, b"\0next\n")
    os.close(write)
    with open(os.path.join(streams.folder, "0.1"), "wb", buffering=0) as pipe:
        pipe.write(b"\0 of a rank\n")
    streams.close()
    os.close(read)
    shown = {STDERR: b"", STDOUT: b""}
    for descriptor, data in streams.shown:
        shown[descriptor] += data
    assert shown == {STDERR: b"rank 1 exited\nnext\n", STDOUT: b"\0 of a rank\n"}
    assert streams.lines == [(None, "rank 1 exited"), (None, "next")]


def test_half_lines_of_two_ranks_are_not_mixed(streams):
    pipes = [open(os.path.join(streams.folder, f"{rank}.2"), "wb", buffering=0) for rank in range(2)]
    for part in (b"one ", b"two\n"):
        for pipe in pipes:
            pipe.write(part)
            streams.pump(0)
    for pipe in pipes:
        pipe.close()
    streams.close()
    assert streams.shown == [(STDERR, b"one two\n")] * 2
    assert streams.lines == [(0, "one two"), (1, "one two")]


def test_a_progress_bar_is_shown_as_it_moves(streams):
    with open(os.path.join(streams.folder, "0.2"), "wb", buffering=0) as pipe:
        pipe.write(b" 10 %\r 20 %\r 3")
        streams.pump(0)
        assert streams.shown == [(STDERR, b" 10 %\r 20 %\r")]
        streams.pump(0)  # nothing more has come: what is there is shown
        assert streams.shown[1:] == [(STDERR, b" 3")]
    streams.close()
    assert streams.lines == [(0, " 10 %\r 20 %\r 3")]


def test_nothing_is_left_in_the_file_system(streams):
    streams.close()
    assert not os.path.exists(streams.folder)


# -- the rank in front ------------------------------------------------------------------------------------------------


def into(streams, name, *parts):
    """Write parts into a rank's pipe, each of them seen before the next one comes."""
    with open(os.path.join(streams.folder, name), "wb", buffering=0) as pipe:
        for part in parts:
            pipe.write(part)
            streams.pump(0)
            streams.pump(0)


def test_each_line_has_its_rank_and_no_half_line_is_tagged(made):
    streams = made(has_tags=True)
    into(streams, "1.1", b"one\ntwo\nth", b"ree\n", b" 10 %\r 20 %\r", b"the end")
    into(streams, "0.2", b"an error\n")
    streams.close()
    text = b"".join(data for _, data in streams.shown)
    assert text == b"[1] one\n[1] two\n[1] three\n[1]  10 %\r[1]  20 %\r[0] an error\n[1] the end\n"
    assert streams.lines == [(0, "an error")]


@pytest.mark.parametrize(
    ("vendor", "text"),
    [
        ("Open MPI", b"[1,1]<stderr>: far\n[1,0]<stderr>:near\nmpirun says\n[1,7]<stderr>: no such rank\n"),
        ("MPICH", b"[1] far\n[0] near\nmpirun says\n[7] no such rank\n"),
    ],
)
def test_lines_of_ranks_on_other_machines_are_known_by_the_launchers_tags(made, vendor, text):
    streams = made(has_tags=True, vendor=vendor)
    read, write = os.pipe()
    streams.add_launcher(read, STDERR)
    for part in (text[:5], text[5:]):
        os.write(write, part)
        streams.pump(0)
    os.close(write)
    streams.close()
    os.close(read)
    *_, stray = text.split(b"\n")[:-1]
    assert b"".join(data for _, data in streams.shown) == b"[1] far\n[0] near\nmpirun says\n" + stray + b"\n"
    assert streams.lines == [(1, "far"), (0, "near"), (None, "mpirun says"), (None, stray.decode())]


def test_what_a_rank_on_another_machine_prints_is_no_error_of_it(made):
    streams = made(vendor="Open MPI")
    read, write = os.pipe()
    streams.add_launcher(read, STDOUT)
    os.write(write, b"[1,1]<stdout>: Traceback (most recent call last):\n")
    os.close(write)
    streams.close()
    os.close(read)
    assert streams.lines == []
    assert streams.shown == [(STDOUT, b"Traceback (most recent call last):\n")]


@pytest.mark.parametrize("descriptor", [STDOUT, STDERR])
def test_a_long_line_is_not_copied_again_for_every_piece_of_it(streams, monkeypatch, descriptor):
    """Sixty thousand pieces of 64 bytes: were the line copied each time, 130 GB would be moved."""
    monkeypatch.setattr(output_streams, "_READ_BYTES", 64)
    piece, pieces = b"x" * (1 << 16), 64
    pipe = os.open(os.path.join(streams.folder, f"0.{descriptor}"), os.O_WRONLY)
    start = time.process_time()
    for _ in range(pieces):
        os.write(pipe, piece)
        for _ in range(len(piece) // 64):
            streams.pump(0)
    os.write(pipe, b"\nend")
    os.close(pipe)
    streams.close()
    assert b"".join(data for _, data in streams.shown) == piece * pieces + b"\nend"
    assert streams.lines == ([(0, "x" * (len(piece) * pieces)), (0, "end")] if descriptor == STDERR else [])
    assert time.process_time() - start < 10
