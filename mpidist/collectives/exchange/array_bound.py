"""What the collectives of one array have in common: which arrays they are for, and those over messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent import Bound
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class ArrayBound(Bound):
    """A collective that is bound to arrays of one kind, dtype and shape.

    No reference to `like` is kept.  Arrays may differ in the length of `axis`.  `is_dealt`: rows are dealt out to the
    ranks, so a call takes an array, or an array and its splits as a tuple; `splits` are for calls that give none.
    """

    splits: Sequence[int] | None = None

    def __init__(
        self, ranks: Communicator, call: Call, like: Any, axis: int | None = None, is_dealt: bool = False
    ) -> None:
        super().__init__(ranks, call)
        self._type, self._dtype, self._shape, self._axis = type(like), like.dtype, tuple(like.shape), axis
        self._size, self.is_dealt = ranks.size, is_dealt
        self._splits: list[int] = []

    def fill(self, given: Any) -> bool:
        """Return True; ValueError for another kind of array.  Local."""
        self.check(given)
        return True

    def check(self, given: Any) -> None:
        """Raise ValueError for another kind of array, or for wrong splits.  Local."""
        array, splits = given if self.is_dealt and type(given) is tuple else (given, self.splits)
        if type(array) is not self._type or array.dtype != self._dtype or not self._is_shaped(array.shape):
            raise self.refused(array)
        if self.is_dealt:
            self._splits = plain.checked_splits(len(array), splits, self._size)

    def start(self, array: Any, timeout_seconds: float | None = None) -> Handle:
        """Take the collective's place in the order of calls; ValueError for another kind of array, else as `Bound`."""
        self.check(array)
        return super().start(array, timeout_seconds)

    def _is_shaped(self, shape: tuple[int, ...]) -> bool:
        if shape == self._shape:
            return True
        axis = self._axis
        if axis is None or len(shape) != len(self._shape):
            return False
        return shape[:axis] == self._shape[:axis] and shape[axis + 1 :] == self._shape[axis + 1 :]

    def refused(self, array: Any) -> ValueError:
        """Return the error for an array that this is not for.  Local."""
        lengths = ["any" if index == self._axis else str(length) for index, length in enumerate(self._shape)]
        expected = f"{self._dtype}[{', '.join(lengths)}] ({self._type.__name__})"
        got = f"{getattr(array, 'dtype', '')}{list(getattr(array, 'shape', ()))} ({type(array).__name__})"
        name = self.call.description["call"]
        return ValueError(f"{name} was bound to {expected}, got {got}; bind another one for such arrays")


class SentCollective(ArrayBound):
    """A collective over messages, or of one rank alone.

    ``move(transport, array, watch)`` returns the result; for rows that are dealt out with the array and its splits.
    """

    def __init__(
        self,
        ranks: Communicator,
        call: Call,
        like: Any,
        axis: int | None,
        move: Callable[..., Any],
        is_dealt: bool = False,
    ) -> None:
        super().__init__(ranks, call, like, axis, is_dealt)
        self._transport, self._move = ranks.transport, move

    def with_splits(self, given: Any) -> Any:
        """Return an array that was checked, with its splits if rows are dealt out.  Local."""
        return (given[0] if type(given) is tuple else given, self._splits) if self.is_dealt else given

    def move(self, watch: Watch, array: Any) -> Any:
        return self._move(self._transport, self.with_splits(array), watch)
