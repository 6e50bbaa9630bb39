"""A traceback without mpidist's own frames."""

from __future__ import annotations

import re
import traceback

import numpy
import pytest

from mpidist.errors import UnsupportedDtypeError
from mpidist.runtime.short_traceback import shorten
from mpidist.world import world_communicator

PACKAGE = "/site/mpidist/"


def frame(path, line=3, name="f", carets=True):
    return [f'  File "{path}", line {line}, in {name}', "    call()", *(["    ^^^^^^"] if carets else [])]


def block(*frames, error="mpidist.errors.TransportTimeoutError: rank 0 of 4: waited"):
    return ["Traceback (most recent call last):", *[line for lines in frames for line in lines], error]


USER, OWN = frame("/home/me/mpidist/train.py"), frame("/site/mpidist/collectives/engine.py")


def test_what_mpidist_does_to_raise_its_error_is_left_out():
    assert shorten(block(USER, OWN, OWN, frame(f"{PACKAGE}errors.py", carets=False)), PACKAGE) == [
        "Traceback (most recent call last):",
        *USER,
        "  ... 3 frames inside mpidist",
        "mpidist.errors.TransportTimeoutError: rank 0 of 4: waited",
    ]


def test_between_the_program_s_own_frames_all_stay():
    short = shorten(block(USER, OWN, OWN, USER, OWN, OWN), PACKAGE)
    assert short == block(USER, OWN, OWN, USER, ["  ... 2 frames inside mpidist"])


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["no traceback"],
        block(USER, OWN, OWN, error="ValueError: of NumPy, inside mpidist"),
        block(USER, OWN),
        block(USER),
        block(OWN, OWN, OWN),
        block(USER, OWN, OWN)[:-1],
    ],
)
def test_others_stay_as_they_are(lines):
    assert shorten(lines, PACKAGE) == lines


def test_of_chained_tracebacks_each_is_taken_by_itself():
    chain = ["", "During handling of the above exception, another exception occurred:", ""]
    lines = [*block(USER, OWN, OWN), "second line", *chain, *block(USER, OWN, OWN, error="OSError: gone")]
    short = [*block(USER, ["  ... 2 frames inside mpidist"]), "second line", *chain]
    assert shorten(lines, PACKAGE) == [*short, *block(USER, OWN, OWN, error="OSError: gone")]


def test_a_real_error_keeps_the_line_that_called_mpidist():
    with pytest.raises(UnsupportedDtypeError) as caught:
        world_communicator().all_reduce(numpy.array(["a word"]))
    lines = "".join(traceback.format_exception(caught.value)).rstrip().split("\n")
    short = shorten(lines)
    assert re.fullmatch(r"  \.\.\. \d+ frames inside mpidist", short[-2])
    assert short[-1] == lines[-1]
    (frame_of_the_program,) = [line for line in short if line.startswith("  File ")]
    assert __file__ in frame_of_the_program
    assert any("world_communicator().all_reduce(" in line for line in short)
