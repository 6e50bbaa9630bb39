"""How functions travel from the chief to the workers: by name where they have the same one, else by value.

By name is what pickle does: a worker that has run the same script up to its `ClusterCoordinator` line has the function
already, bound to its own variables and optimizers.  It compares the code, and looks whether all global names that the
code uses exist on its side.  Functions inside of functions, lambdas, and functions that the script defines after that
line are carried by value; that takes the package cloudpickle.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from mpidist.errors import MissingDependencyError
from mpidist.packages import pip_install

PROTOCOL = 5

#: What a function is believed to take before it has run for the first time, in seconds: nothing is to wait behind it.
UNKNOWN_SECONDS = 10.0


class NotAnArgument(ValueError):
    """Raised by what must not be sent to workers."""


class NotHere(Exception):
    """A worker does not have the function that it was told by name; the text says what is missing."""


class Function:
    """A function as the chief schedules it."""

    __slots__ = ("fn", "number", "seconds", "definition")

    def __init__(self, fn: Callable[..., Any], number: int) -> None:
        self.fn = fn
        self.number = number
        self.seconds = UNKNOWN_SECONDS
        self.definition = named(fn) or by_value(fn)

    def __str__(self) -> str:
        return name_of(self.fn)


def name_of(fn: Any) -> str:
    """Return how messages call a function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or repr(fn)


def named(fn: Callable[..., Any]) -> bytes | None:
    """Return what a worker needs to find `fn` among what it has; None if pickle cannot name it."""
    try:
        return pickle.dumps((fn, digest(fn)), PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def by_value(fn: Any) -> bytes:
    """Return `fn` with its code and everything that it refers to."""
    return carried((fn, ""), f"function {name_of(fn)}")


def carried(value: Any, what: str) -> bytes:
    """Return `value`, pickled by cloudpickle; errors as for `by_value`, about `what`."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} is not known to the workers by name, and the package cloudpickle, which can carry it to them, is "
            "not installed: define what it needs at the top of a module, or of the script above the "
            f"ClusterCoordinator line, or {pip_install('coordinator')}"
        ) from error
    try:
        return cloudpickle.dumps(value, PROTOCOL)
    except NotAnArgument:
        raise
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to the workers: {type(error).__name__}: {error}") from error


def found(definition: bytes) -> Callable[..., Any]:
    """Return the function of a definition, on a worker."""
    try:
        fn, expected = pickle.loads(definition)
    except (AttributeError, ImportError) as error:
        raise NotHere(str(error)) from error
    if expected and digest(fn) != expected:
        raise NotHere(f"{name_of(fn)} has other code there")
    missing = sorted(unbound(fn)) if expected else []
    if missing:
        raise NotHere(f"{name_of(fn)} uses {', '.join(missing)}")
    return fn


# -- what a function is made of ---------------------------------------------------------------------------------------


def digest(fn: Any) -> str:
    """Return a number for the code of `fn`, the same in every process; ``-`` for what has no code of Python's."""
    code = getattr(_plain(fn), "__code__", None)
    return "-" if code is None else hashlib.sha256(repr(_described(code)).encode()).hexdigest()[:16]


def unbound(fn: Any) -> set[str]:
    """Return the global names that the code of `fn` uses and its module does not have."""
    fn = _plain(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return set()
    return {name for name in _globals_of(code) if name not in fn.__globals__ and not hasattr(builtins, name)}


def _plain(fn: Any) -> Any:
    """Return the function inside of partial functions, methods and decorators."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(getattr(fn, "__func__", fn))


def _described(code: CodeType) -> tuple[Any, ...]:
    constants = [_described(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, constants)


def _constant(value: Any) -> str:
    """Return a constant as text; sets have another order in every process."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _globals_of(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)
