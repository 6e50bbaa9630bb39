"""`LambdaCallback`: functions in place of a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.training.callbacks.base import Callback


class LambdaCallback(Callback):
    """Functions to be called at the turns of a training.  All methods are Local, as far as the functions are.

    Parameters
    ----------
    **functions
        By the name of the method that they stand for: ``on_epoch_end=lambda epoch, logs: print(epoch, logs)``.

    Raises
    ------
    TypeError
        There is no such method.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                known = ", ".join(sorted(known for known in vars(Callback) if known.startswith("on_")))
                raise TypeError(f"a callback has no {name!r}; known ones: {known}")
            setattr(self, name, function)
