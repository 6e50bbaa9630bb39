"""`PersistentCollective`: a collective of nested values that is bound once and called, or started, every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpidist import nest
from mpidist.collectives.call import Call
from mpidist.collectives.handle import Handle, together
from mpidist.collectives.persistent import Bound, Once
from mpidist.collectives.structures import one_by_one, without_arrays

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class PersistentCollective:
    """A collective for values of one structure, leaf by leaf.

    Parameters
    ----------
    ranks : Communicator
    verb : str
        Which collective: what the method ``{verb}_init`` of `ranks` binds, to each leaf of `like`.
    arguments : tuple
        What that method gets after the array.
    like : array, or nested tuples, lists and dicts of arrays
        Its structure counts; no reference to it is kept.
    array_of : callable
        ``array_of(leaf)`` returns the array that a leaf of a value is.
    timeout_seconds : float, optional
        Of each call.
    """

    def __init__(
        self,
        ranks: Communicator,
        verb: str,
        arguments: tuple[Any, ...],
        like: Any,
        array_of: Callable[[Any], Any],
        timeout_seconds: float | None = None,
    ) -> None:
        self._array_of, self._structure = array_of, nest.numbered(like)
        self._bounds: list[Bound] = []
        bind = getattr(ranks, f"{verb}_init")
        for leaf, paths in one_by_one(*nest.with_paths(like)):
            bound = bind(array_of(leaf), *arguments)
            bound.call, bound.timeout_seconds = bound.call.with_paths(paths), timeout_seconds
            self._bounds.append(bound)
        self._count = len(self._bounds)
        if not self._bounds:  # a call nevertheless, or the next one of this rank would be taken for it
            self._bounds.append(Once(ranks, Call(without_arrays(verb))))
            self._bounds[0].timeout_seconds = timeout_seconds

    def __call__(self, value: Any) -> Any:
        """Carry it out for a value like the one that this was made for.

        Collective: every rank calls it in the same order.

        Returns
        -------
        array or nested structure
            As `value`, with new arrays that are the caller's.

        Raises
        ------
        ValueError
            The structure, a shape or a dtype is another one.
        CollectiveMismatchError
            On all ranks: they called something else.
        """
        pairs = zip(self._bounds, self._leaves(value), strict=True)
        return self._packed([bound(leaf) for bound, leaf in pairs])

    def start(self, value: Any) -> Handle:
        """Take its place in the order of calls; parameters and errors as for a call.

        Collective: every rank starts, or calls, its collectives in the same order.  The arrays must not change
        before the handle's ``wait()`` has returned the results.
        """
        pairs = zip(self._bounds, self._leaves(value), strict=True)
        started = together([bound.start(leaf) for bound, leaf in pairs])
        return started.then(self._packed)

    def _packed(self, results: list[Any]) -> Any:
        return nest.pack(self._structure, results[: self._count])

    def _leaves(self, value: Any) -> list[Any]:
        leaves = nest.flatten(value)
        numbered = nest.numbered(value)
        if numbered != self._structure:
            raise ValueError(
                f"this collective was bound to arrays as {self._structure}, got {numbered} (numbers stand for arrays); "
                "bind another one"
            )
        return [self._array_of(leaf) for leaf in leaves] or [None]
