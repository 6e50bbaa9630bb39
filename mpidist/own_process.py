"""What this process does at signals and at its end, and its forked children do not: they are no ranks.

A child that is forked gets back the handlers and hooks there were before ours.  Where a program has put one of its own
on top, which calls ours, ours passes on to the one before it.  A signal that comes to the child before that waits until
then: Python would take note of it, and find no handler any more.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_ExceptionHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], Any]


class Handler:
    """A handler of a signal in this process, in force from now on.  Only the main thread may make one.

    It calls ``handle(number, frame)``; `previous` is the handler before this one.
    """

    def __init__(self, number: signal.Signals, handle: Callable[[int, FrameType | None], object]) -> None:
        self.number, self._handle, self._process = number, handle, os.getpid()
        self._in_force: object = self
        self.previous = signal.getsignal(number)
        _handlers.append(self)
        signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal; or pass it on, in a child and after `close`."""
        if self in _handlers and os.getpid() == self._process:
            self._handle(number, frame)
        else:
            self.pass_on(number, frame)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what would be done without this handler."""
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def ignore(self) -> None:
        """Ignore the signal from now on, also after Python has taken its handlers away at its end.  Local."""
        self._in_force = signal.SIG_IGN
        signal.signal(self.number, signal.SIG_IGN)

    def close(self) -> None:
        """Put the handler before this one back, unless the program has set another since.  Local."""
        if self in _handlers:
            _handlers.remove(self)
            if signal.getsignal(self.number) is self._in_force:
                signal.signal(self.number, signal.SIG_DFL if self.previous is None else self.previous)


def at_exit(fn: Callable[..., object], *args: Any) -> None:
    """Call a function when this process ends, and not when its forked children do.  Local."""
    _at_exit.append(fn)
    atexit.register(fn, *args)


def not_at_exit(fn: Callable[..., object]) -> None:
    """Do not call a function that was given to `at_exit`.  Local."""
    _at_exit[:] = [each for each in _at_exit if each != fn]
    atexit.unregister(fn)


def on_exception(hook: _ExceptionHook) -> _ExceptionHook:
    """Call `hook` for an exception that nobody catches, in this process; return the hook before it.  Local."""
    before = sys.excepthook
    _hooks.append((hook, before))
    sys.excepthook = hook
    return before


#: In the order in which they were put in place: signal handlers, functions at exit, and hooks with those before them.
_handlers: list[Handler] = []
_at_exit: list[Callable[..., object]] = []
_hooks: list[tuple[_ExceptionHook, _ExceptionHook]] = []


#: By thread, the signals that were blocked before the fork that is under way.
_blocked = threading.local()


def _before_fork() -> None:
    _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {handler.number for handler in _handlers})


def _behind_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


def _in_child() -> None:
    """Take all back, the latest first: what was on top shows what lies below."""
    for handler in _handlers[::-1]:
        handler.close()
    for fn in _at_exit:
        atexit.unregister(fn)
    for hook, before in _hooks[::-1]:
        if sys.excepthook == hook:
            sys.excepthook = before
    _at_exit.clear()
    _hooks.clear()
    _behind_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_behind_fork, after_in_child=_in_child)
