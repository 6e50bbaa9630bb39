"""The hooks of a process: where Python ends it, they are called once, and all worlds of the process are told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType, TracebackType

from mpidist import own_process
from mpidist.errors import TransportError
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.exit_hooks import ExitHooks
from mpidist.runtime.short_traceback import shorten


class ProcessHooks:
    """Exception hook, exit hook and SIGTERM hook of one process, for the worlds whose rank it is.

    An exception ends the job by the world whose call raised it, else by the first one; the others are told.
    """

    def __init__(self) -> None:
        self._worlds: list[ExitHooks] = []
        self._is_installed = False
        self._process = os.getpid()
        self._previous = sys.excepthook

    def add(self, hooks: ExitHooks) -> None:
        """Take in what is to be done for one more world; the first one puts the hooks in place.  Local."""
        if not self._is_installed:
            self._install()
        self._worlds.append(hooks)

    def remove(self, control: ControlChannel) -> None:
        """Do nothing more for a world that is closed.  Local."""
        self._worlds[:] = [hooks for hooks in self._worlds if hooks.control is not control]

    def _install(self) -> None:
        """Put the hooks in place; children forked later are not ranks, and have none of them."""
        self._is_installed, self._process = True, os.getpid()
        self._previous = own_process.on_exception(self.on_exception)
        os.register_at_fork(after_in_child=self._in_child)
        own_process.at_exit(self.on_exit)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            own_process.Handler(signal.SIGTERM, self._on_sigterm)

    def _in_child(self) -> None:
        """Be no rank in a forked child: it would speak with its parent's voice."""
        for hooks in self._worlds:
            control = hooks.control
            text = f"this process is a forked child of rank {control.rank}, not a rank itself, and cannot call"
            control.breaks(control.error(TransportError, f"{text} collectives; call them in the parent"))

    @property
    def _armed(self) -> bool:
        return bool(self._worlds) and os.getpid() == self._process

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the job by an exception that nobody caught."""
        if not self._armed:
            self._previous(kind, error, trace)
            return
        text = _text_of(kind, error, trace)
        _flush_output()
        concerned = next((hooks for hooks in self._worlds if hooks.control.has_raised(error)), self._worlds[0])
        self._tell_others(concerned, text)
        concerned.end_by(error, text)

    def _tell_others(self, concerned: ExitHooks, text: str) -> None:
        """Tell the worlds that an exception does not come from that this rank fails."""
        is_quiet = bool(concerned.control.failures.dead())  # MPICH may crash in a message then
        for hooks in self._worlds:
            if hooks is not concerned:
                hooks.control.fail(text, tell=not is_quiet and not hooks.control.failures.dead())

    def on_exit(self) -> None:
        """Say that this rank leaves its worlds, and stay until all of them can do without it."""
        if not self._armed:
            return
        for hooks in self._worlds:
            if hooks.control.broken is not None:
                _flush_output()
                self._tell_others(hooks, str(hooks.control.broken))
            hooks.end_if_broken()
        waiting = [hooks.leave() for hooks in self._worlds]
        while waiting := [may_end for may_end in waiting if not may_end()]:
            time.sleep(0.001)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Name a killed rank before the launcher, which noticed it too, ends this one."""
        if self._armed:
            if not any([hooks.failure_is_known() for hooks in self._worlds]):
                for hooks in self._worlds:
                    hooks.name_dead()
            for hooks in self._worlds:
                hooks.control.end()  # or the others, ended likewise, would take this rank for the one that died first
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


#: Those of this process.
of_process = ProcessHooks()


def _text_of(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return what is printed of an error: where somebody pressed Ctrl-C is no news, where a program failed is."""
    if issubclass(kind, KeyboardInterrupt):
        return "KeyboardInterrupt: the job was interrupted\n"
    lines = "".join(traceback.format_exception(kind, error, trace)).rstrip("\n").split("\n")
    return "\n".join(shorten(lines)) + "\n"


def _flush_output() -> None:
    """Flush standard output, which the program may have closed, or taken away."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
