"""Which strategy is current, and whether the code runs inside a replica or across replicas.

Every thread has its own stack of modes.  A mode is a strategy with a replica context (inside `Strategy.run`) or without
one (inside `Strategy.scope`: cross-replica).  Below the stack lies the default strategy, which is always in a replica
context of one replica; `experimental_set_strategy` puts another strategy there.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

#: What a function given to a strategy returns.
T = TypeVar("T")

#: The module that has the default strategy.  It is above this one, and so is named here and loaded on first use.
_DEFAULT_STRATEGY_MODULE = "mpidist.strategies.default"


class Mode:
    """A strategy, and the replica context in it; None for the replica context is cross-replica."""

    __slots__ = ("strategy", "replica_context", "is_update")

    def __init__(self, strategy: Any, replica_context: Any, is_update: bool = False) -> None:
        self.strategy = strategy
        self.replica_context = replica_context
        self.is_update = is_update


class _ThreadState(threading.local):
    """The modes of one thread."""

    def __init__(self) -> None:
        self.stack: list[Mode] = []
        self.base: Mode | None = None


_state = _ThreadState()


# -- what users ask ---------------------------------------------------------------------------------------------------


def get_strategy() -> Any:
    """Return the current strategy, or the default strategy outside of all scopes; never None.  Local."""
    return current_mode().strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.  Local."""
    return current_mode().strategy is not _default_mode().strategy


def get_replica_context() -> Any:
    """Return the current replica context; None in a cross-replica context.  Local.

    Outside of all scopes it is the default strategy's, with replica 0 of 1.
    """
    stack = _state.stack
    return stack[-1].replica_context if stack else current_mode().replica_context


def in_cross_replica_context() -> bool:
    """Return whether the code runs across replicas: in ``with strategy.scope()`` or in a `merge_call`.  Local."""
    return current_mode().replica_context is None


def experimental_set_strategy(strategy: Any) -> None:
    """Make `strategy` current from here on, without a ``with`` block; None sets the default one.  Local.

    Made for notebooks.  It holds for the calling thread.

    Raises
    ------
    RuntimeError
        Inside the scope of a strategy.
    """
    if _state.stack:
        raise RuntimeError("Must not be called inside a `tf.distribute.Strategy` scope.")
    is_default = strategy is None or strategy is _default_mode().strategy
    _state.base = None if is_default else Mode(strategy, None)


# -- what strategies use ----------------------------------------------------------------------------------------------


def current_mode() -> Mode:
    """Return the mode in force in this thread.  Local."""
    stack = _state.stack
    return (stack[-1] if stack else _state.base) or _default_mode()


def innermost_mode() -> tuple[Mode | None, int]:
    """Return the mode in force in this thread, None for the default one, and in how many blocks that is.  Local."""
    stack = _state.stack
    return (stack[-1], len(stack)) if stack else (_state.base, 0)


def call_inside(mode: Mode, fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> T:
    """Call `fn` with `mode` in force and return what it returns.  Local; errors as for `entered`.

    It does what ``with entered(mode)`` does, by one Python call in place of four, since it is done in every step.
    """
    stack = _state.stack
    stack.append(mode)
    try:
        return fn(*args, **(kwargs or {}))
    finally:
        _leave(stack, mode)


def _leave(stack: list[Mode], mode: Mode) -> None:
    """Take `mode` off the stack, or raise RuntimeError if another one was put there since and not taken off."""
    if stack[-1] is not mode:
        raise RuntimeError("the scopes of strategies must be left in the opposite order of entering them")
    stack.pop()


class entered:  # noqa: N801 - reads as a function
    """Put `mode` in force for the time of a ``with`` block.  Local.

    RuntimeError on leaving, when a block entered after this one has not been left.
    """

    __slots__ = ("_mode",)

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        _state.stack.append(self._mode)

    def __exit__(self, *error: Any) -> None:
        _leave(_state.stack, self._mode)


def is_default(strategy: Any) -> bool:
    """Return whether `strategy` is the default one, which has the variables made outside of all scopes.  Local."""
    return strategy is _default_mode().strategy


def is_inside_replica() -> bool:
    """Return whether the code runs in a replica, or in a cross-replica context inside of one.  Local."""
    return any(mode.replica_context is not None for mode in _state.stack)


def require_cross_replica(strategy: Any) -> None:
    """Raise RuntimeError unless `strategy` is current and cross-replica, or no strategy is.  Local."""
    stack = _state.stack
    mode = (stack[-1] if stack else _state.base) or _default_mode()
    if mode is _default_mode() or (mode.strategy is strategy and mode.replica_context is None):
        return
    if mode.strategy is not strategy:
        raise _wrong_strategy(strategy, mode)
    raise RuntimeError("Method requires being in cross-replica context, use get_replica_context().merge_call()")


def require_replica(replica_context: Any) -> None:
    """Raise RuntimeError unless `replica_context` is the current one.  Local."""
    stack = _state.stack
    mode = stack[-1] if stack else current_mode()
    if mode.replica_context is replica_context:
        return
    if mode.strategy is not replica_context.strategy:
        raise _wrong_strategy(replica_context.strategy, mode)
    raise RuntimeError(
        "Method requires being in the replica context that it is called on: call it inside the function given to "
        "`strategy.run`, and outside of `merge_call`"
    )


def _wrong_strategy(strategy: Any, mode: Mode) -> RuntimeError:
    if not has_strategy():
        return RuntimeError(f'Need to be inside "with strategy.scope()" for {strategy}')
    return RuntimeError(f"Mixing different tf.distribute.Strategy objects: {mode.strategy} is not {strategy}")


@functools.cache
def _default_mode() -> Mode:
    return importlib.import_module(_DEFAULT_STRATEGY_MODULE).MODE
