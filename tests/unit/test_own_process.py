"""What a process does at signals and at its end, and its forked children do not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from mpidist import own_process

LIMIT_SECONDS = 60

START = """
import atexit, os, signal, sys
from mpidist import own_process

parent = os.getpid()

def say(what):
    os.write(1, f"{'parent' if os.getpid() == parent else 'child'} {what}\\n".encode())

def child(fn):
    sys.stdout.flush()
    process = os.fork()
    if not process:
        fn()
        sys.exit(0)
    status = os.waitpid(process, 0)[1]
    say(f"saw {-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)}")

def kill():
    os.kill(os.getpid(), signal.SIGTERM)
"""


def _said(body):
    done = subprocess.run([sys.executable, "-c", START + body], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("handlers", [1, 2, 3])
def test_a_child_dies_of_a_signal_that_its_parent_handles(handlers):
    body = f"""
for number in range({handlers}):
    own_process.Handler(signal.SIGTERM, lambda *args, number=number: say(f"handles by {{number}}"))
child(kill)
kill()
"""
    assert _said(body) == ["parent saw -15", f"parent handles by {handlers - 1}"]


def test_a_signal_that_comes_to_a_child_at_once_is_not_lost():
    """As by `Process.start` and `terminate`; a child that lives on sees the end of the pipe."""
    body = """
own_process.Handler(signal.SIGTERM, lambda *args: say("ours"))
ends = set()
for _ in range(200):
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.kill(process, signal.SIGTERM)
    os.close(writer)
    ends.add(os.waitpid(process, 0)[1])
    os.close(reader)
say(ends)
child(lambda: say(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
kill()
"""
    assert _said(body) == ["parent {15}", "child set()", "parent saw 0", "parent ours"]


def test_a_child_has_the_handler_of_the_program_that_was_there_before():
    body = """
signal.signal(signal.SIGTERM, lambda *args: say("program"))
own_process.Handler(signal.SIGTERM, lambda *args: say("ours"))
child(kill)
kill()
"""
    assert _said(body) == ["child program", "parent saw 0", "parent ours"]


def test_a_handler_of_the_program_on_top_stays_and_finds_ours_transparent():
    body = """
own_process.Handler(signal.SIGTERM, lambda *args: say("lowest"))
ours = own_process.Handler(signal.SIGTERM, lambda *args: say("ours"))
def on_top(*args):
    say("program")
    ours(*args)
signal.signal(signal.SIGTERM, on_top)
child(kill)
kill()
ours.close()
kill()
"""
    assert _said(body) == [
        "child program", "parent saw -15", "parent program", "parent ours", "parent program", "parent lowest"
    ]  # fmt: skip


def test_an_ignored_signal_stays_ignored():
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own_process.Handler(signal.SIGTERM, lambda *args: say("ours"))
child(kill)
"""
    assert _said(body) == ["parent saw 0"]


def test_a_signal_is_ignored_to_the_end_of_the_process_and_not_by_its_children():
    body = """
own_process.Handler(signal.SIGTERM, lambda *args: say("ours")).ignore()
kill()
child(kill)
say("goes on")
"""
    assert _said(body) == ["parent saw -15", "parent goes on"]


def test_closing_puts_the_handler_before_back():
    before = signal.getsignal(signal.SIGUSR1)
    handler = own_process.Handler(signal.SIGUSR1, lambda *args: None)
    assert signal.getsignal(signal.SIGUSR1) is handler and handler.previous is before
    handler.ignore()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    handler.close()
    handler.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_functions_at_exit_are_of_the_parent_alone():
    body = """
atexit.register(say, "program's exit")
own_process.at_exit(say, "exit")
own_process.at_exit(print, "never")
own_process.not_at_exit(print)
child(lambda: say("ends"))
"""
    assert _said(body) == ["child ends", "parent saw 0", "parent exit", "parent program's exit"]


def test_a_child_has_the_hook_of_exceptions_that_was_there_before():
    body = """
sys.excepthook = lambda *args: say("program's hook")
before = own_process.on_exception(lambda *args: (say("our hook"), before(*args)))
def fail():
    raise ValueError
child(fail)
fail()
"""
    assert _said(body) == ["child program's hook", "parent saw 1", "parent our hook", "parent program's hook"]
