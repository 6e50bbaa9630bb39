"""Children of multiprocessing: those of a rank are none, and those that a program starts as ranks are."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from mpidist.cluster.launchers import detect_launcher
from mpidist.cluster.own_rank import check_is_rank
from mpidist.errors import LaunchError

LAUNCHED = {"PMI_RANK": "1", "PMI_SIZE": "2"}

PARENT = """
import multiprocessing
from tests.unit.cluster.test_own_rank import say, said_by

if __name__ == "__main__":
    print(said_by({how!r}, {environ!r}))
"""


def say(environ, queue):
    """Say whether this process, a child, is a rank by these variables."""
    os.environ.update(environ)
    try:
        check_is_rank(detect_launcher())
        queue.put("a rank" if detect_launcher() else "no launcher")
    except LaunchError as error:
        queue.put(str(error))


def said_by(how, environ):
    """Return what a child says that a process starts which gives it variables."""
    context = multiprocessing.get_context(how)
    queue = context.SimpleQueue()
    child = context.Process(target=say, args=(environ, queue))
    child.start()
    said = queue.get()
    child.join()
    return said


def _said(how, inherited, given):
    result = subprocess.run(
        [sys.executable, "-c", PARENT.format(how=how, environ=given)],
        env={**{name: value for name, value in os.environ.items() if "PMI" not in name}, **inherited},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the variables of other processes are not to be seen")
def test_a_program_may_start_ranks_by_multiprocessing(how):
    assert _said(how, {}, LAUNCHED) == "a rank"


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_a_child_of_a_rank_is_none_whatever_it_is_given(how):
    assert "is a child of rank 1 of 2" in _said(how, LAUNCHED, {})
    assert "is a child of rank 0 of 2" in _said(how, LAUNCHED, {"PMI_RANK": "0"})
    assert _said(how, {}, {}) == "no launcher"
