"""What a rank says is one write, or launchers would put words of other ranks in between."""

from __future__ import annotations

import io
import sys

import pytest

from mpidist.output import say
from mpidist.runtime.control import ControlChannel


class Pipe(io.RawIOBase):
    """Keeps what each write of the system gets."""

    def __init__(self):
        self.pieces = []

    def writable(self):
        return True

    def write(self, piece):
        self.pieces.append(bytes(piece).decode())
        return len(piece)


@pytest.fixture(params=["buffered", "PYTHONUNBUFFERED"])
def writes(request, monkeypatch):
    """A function that calls another one, and returns what each write to standard error got, as Python makes that."""

    def call(fn, *arguments):
        pipe = Pipe()
        is_buffered = request.param == "buffered"
        below = io.BufferedWriter(pipe) if is_buffered else pipe
        with monkeypatch.context() as patch:
            patch.setattr(
                sys, "stderr", io.TextIOWrapper(below, "utf-8", line_buffering=True, write_through=not is_buffered)
            )
            fn(*arguments)
        return pipe.pieces

    return call


@pytest.mark.parametrize("text", ["a line", "two\nlines", "x" * 100_000 + "\n" + "y" * 100_000], ids=["1", "2", "long"])
def test_text_and_end_of_line_are_one_write(writes, text):
    assert writes(say, text) == writes(say, text + "\n") == [text + "\n"]


def test_a_warning_of_a_rank_is_one_write(writes):
    said = writes(ControlChannel.alone().warn, "it waits\nand waits")
    assert said == ["mpidist: rank 0 of 1: it waits\nand waits\n"]


def test_without_standard_error_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    say("a line")
    assert capsys.readouterr().out == ""
