"""`Handle`: what `start` of a bound collective returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Handle:
    """A collective that was started.

    Parameters
    ----------
    finish : callable
        ``finish()`` carries the collective out and returns its results.
    on_drop : callable, optional
        ``on_drop()`` is called when the handle dies before it was waited for.
    is_over : callable, optional
        ``is_over()`` tells whether the collective was carried out already; by default `wait` alone carries it out.
    """

    _finish: Callable[[], Any] | None = None

    def __init__(
        self,
        finish: Callable[[], Any],
        on_drop: Callable[[], None] | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self._finish, self._on_drop, self._is_over = finish, on_drop, is_over
        self._results: Any = None

    @classmethod
    def done(cls, results: Any) -> Handle:
        """Return the handle of what has its results already.  Local."""
        handle = cls(lambda: results)
        handle.wait()
        return handle

    def is_ready(self) -> bool:
        """Return whether the collective was carried out, by `wait` or by a later collective.  Local.

        Nothing moves on by being asked: who asks until it is ready, and makes no collective, asks for ever.
        """
        return self._finish is None or (self._is_over is not None and self._is_over())

    def wait(self) -> Any:
        """Carry out what was started, and return the results.

        Collective: every rank waits for its handles, or makes a later call, in the same order.  A second call returns
        the same results.
        """
        if self._finish is not None:
            self._results = self._finish()
            self._finish = self._on_drop = self._is_over = None  # they may keep what this one's results are made of
        return self._results

    def __del__(self) -> None:
        if self._finish is not None and self._on_drop is not None:
            self._on_drop()

    def then(self, fn: Callable[[Any], Any]) -> Handle:
        """Return a handle whose results are ``fn(results)`` of this one's.  Local."""
        return Handle(lambda: fn(self.wait()), is_over=self.is_ready)


def together(handles: Sequence[Handle]) -> Handle:
    """Return a handle whose results are a list of those of `handles`, waited for in this order.  Local."""
    return Handle(
        lambda: [handle.wait() for handle in handles], is_over=lambda: all(handle.is_ready() for handle in handles)
    )
