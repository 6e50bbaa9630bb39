"""A warning and a deadline for the start of MPI, where nothing else can speak.

MPI waits there for all ranks, without a limit, and mpi4py holds Python's lock while it does: no other thread of Python
runs.  So timers of the C library speak and end the process; they call C functions in a thread of their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.cluster.launchers import Launcher
from mpidist.options import settings

#: Ranks that warn.  Where one rank is missing, one of these is not.
_SPEAKERS = 2
#: The lowest rank that waits ends the job: each rank waits so much longer than the one before, up to so many.  A rank
#: speaks half of that before its end, in another thread: on busy cores a short while is none.
_STAGGER_SECONDS, _STAGGERED = 2.0, 8

_SIGEV_THREAD, _CLOCK_MONOTONIC = 2, 1

#: Texts that timers may print; they stay, since a timer may speak in the moment in which it is deleted.
_texts: list[Any] = []


class _Event(ctypes.Structure):
    """``struct sigevent``, for a function that is called in a thread."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    ]


class _Times(ctypes.Structure):
    """``struct itimerspec``: seconds and nanoseconds of the interval, and until the first call."""

    _fields_ = [(name, ctypes.c_long) for name in ("every", "every_nanoseconds", "first", "first_nanoseconds")]


@contextmanager
def start_deadline(launcher: Launcher | None) -> Iterator[None]:
    """Warn, and end this process, where the body waits too long for other ranks."""
    chosen = settings()
    if launcher is None or chosen.run_folder or not _has_timers():
        yield
        return
    timers: list[ctypes.c_void_p] = []
    try:
        try:
            timers.extend(_timers(launcher, chosen.warn_seconds, chosen.timeout_seconds))
        except OSError as error:
            warnings.warn(f"MPI's start-up has no deadline: {error}", RuntimeWarning, stacklevel=2)
        yield
    finally:
        for timer in timers:
            _library().timer_delete(timer)


def _timers(launcher: Launcher, warn_seconds: float, timeout_seconds: float) -> Iterator[ctypes.c_void_p]:
    """Yield a timer for the warning, and those for the end, which the lowest rank that waits speaks first."""
    if warn_seconds and launcher.rank < _SPEAKERS:
        yield _timer(warn_seconds, "warnx", _text(launcher, warn_seconds, "warning: "))
    if timeout_seconds:
        seconds = timeout_seconds + _STAGGER_SECONDS * min(launcher.rank, _STAGGERED)
        yield _timer(seconds + _STAGGER_SECONDS / 2, "_exit", 1)
        yield _timer(seconds, "warnx", _text(launcher, timeout_seconds, "error: "))


def _text(launcher: Launcher, seconds: float, kind: str) -> bytes:
    """Return what is said after so many seconds; per cent signs are doubled for C."""
    text = (
        f"mpidist: {kind}rank {launcher.rank} of {launcher.size} ({platform.node()}) has waited {seconds:g} s in MPI's "
        "start-up for the other ranks. A rank has ended before it made its strategy, or has not come to it yet. Every "
        "rank must make the strategy; look at what the ranks do (py-spy dump), start with mpidist run, which names the "
        "missing rank, or give more time with MPIDIST_TIMEOUT_SECONDS"
    )
    return text.replace("%", "%%").encode()


def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _has_timers() -> bool:
    """Whether the C library has what is needed; old ones have timers in a library of their own."""
    library = _library()
    return all(hasattr(library, name) for name in ("timer_create", "timer_settime", "timer_delete", "warnx", "_exit"))


def _timer(seconds: float, function: str, argument: bytes | int) -> ctypes.c_void_p:
    """Return a timer that calls a function of the C library, with one argument, after so many seconds."""
    library, timer = _library(), ctypes.c_void_p()
    if isinstance(argument, bytes):
        _texts.append(ctypes.create_string_buffer(argument))
        argument = ctypes.addressof(_texts[-1])
    event = _Event(argument, 0, _SIGEV_THREAD, ctypes.cast(getattr(library, function), ctypes.c_void_p), None)
    whole, rest = divmod(seconds, 1)
    times = _Times(0, 0, int(whole), int(rest * 1e9))
    failed = library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    if failed or library.timer_settime(timer, 0, ctypes.byref(times), None):
        code = ctypes.get_errno()
        raise OSError(code, f"the C library has made no timer: {os.strerror(code)}")
    return timer
