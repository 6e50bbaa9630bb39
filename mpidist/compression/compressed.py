"""`CompressedAllReduce`: the all-reduce of a list whose floats are coded on the wire, and `bind_all_reduce`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy

from mpidist.arrays import is_device, is_known, plain
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.handle import Handle, together
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.lists import Question, bind_list
from mpidist.compression.base import Compression, require_stage
from mpidist.compression.coded_list import CodedList
from mpidist.errors import UnsupportedDtypeError, quoted

#: The dtypes whose values are coded, by name; all others travel as they are.
_CODED = frozenset({"float16", "bfloat16", "float32", "float64"})

_signature = attrgetter("dtype", "shape")


def is_coded(array: Any) -> bool:
    """Return whether a stage codes the values of such an array; all others travel as they are."""
    return bool(array.size) and array.dtype.name in _CODED


class CompressedAllReduce:
    """An all-reduce bound to lists like one list, in which float16, bfloat16, float32 and float64 arrays are coded.

    Each dtype is packed and coded as one vector.  Arrays of other dtypes are reduced as they are.  All ranks get the
    same bits.

    Collective: every rank makes it in the same order.

    Parameters
    ----------
    communicator : Communicator
    like : sequence of array
        Host arrays; their shapes and dtypes count, and no reference to them is kept.
    op : str
        ``"sum"`` or ``"mean"``.
    compression : Compression
        With the same settings on all ranks.
    names : sequence of str, optional
        For messages; the same on all ranks.

    Raises
    ------
    ValueError
        Another reduction, or another number of names than arrays.
    UnsupportedDtypeError
        Arrays in device memory.
    """

    def __init__(
        self,
        communicator: Communicator,
        like: Sequence[Any],
        op: str,
        compression: Compression,
        names: Sequence[str] | None = None,
    ) -> None:
        like = list(map(plain, like))
        _check(like, op, compression, names)
        self._communicator, self._op, self._names = communicator, op, names
        self._signatures = list(map(_signature, like))
        groups: dict[str, list[int]] = {} if like else {"": []}  # no array is a call too
        for position, array in enumerate(like):
            groups.setdefault(array.dtype.name if is_coded(array) else "", []).append(position)
        self._parts: list[tuple[str, list[int], Bound]] = [
            (name, positions, self._bind(name, positions, like, compression)) for name, positions in groups.items()
        ]

    def _bind(self, group: str, positions: list[int], like: Sequence[Any], compression: Compression) -> Bound:
        """Return what reduces the arrays of one dtype, or those that are not coded."""
        labels = None if self._names is None else tuple(self._names[position] for position in positions)
        if not group:
            members, question = [like[position] for position in positions], Question(self._op, labels)
            return bind_list(self._communicator, members, question, in_memory_order=False, any_strides=True)
        names = labels or [""] * len(positions)
        pairs = zip(names, positions, strict=True)
        signatures = [(name, like[position].dtype, tuple(like[position].shape)) for name, position in pairs]
        return CodedList(self._communicator, signatures, self._op, compression)

    def __call__(self, arrays: Sequence[Any], timeout_seconds: float | None = None) -> list[Any]:
        """Reduce arrays like those that this was bound to.

        Collective: every rank calls it in the same order.

        Returns
        -------
        list of array
            New arrays that are the caller's, in the given dtypes (means of integers are float64).

        Raises
        ------
        ValueError
            Other shapes or dtypes; before any communication.
        CollectiveMismatchError
            On all ranks: they differ in names, shapes, dtypes or in the stage.
        """
        return self.start(arrays, timeout_seconds).wait()

    def start(self, arrays: Sequence[Any], timeout_seconds: float | None = None) -> Handle:
        """Start the reduction; its handle's ``wait()`` returns the results.

        Collective: every rank starts, or calls, its collectives in the same order.  The arrays must not change before
        `wait` returns.  Errors as for a call, and RuntimeError where it is under way already.
        """
        arrays = list(map(plain, arrays))
        found = list(map(_signature, arrays))
        if found != self._signatures:
            raise ValueError(
                f"this all-reduce was bound to {_shown(self._signatures)}, got {_shown(found)}; bind another"
            )
        started = [
            bound.start([arrays[position] for position in positions], timeout_seconds)
            for _, positions, bound in self._parts
        ]
        return together(started).then(self._in_order)

    def _in_order(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the results of all parts in the order of the list."""
        results: list[Any] = [None] * len(self._signatures)
        for (_, positions, _), part in zip(self._parts, parts, strict=True):
            for position, result in zip(positions, part, strict=True):
                results[position] = result
        return results

    def take_back(self, results: Mapping[int, Any]) -> None:
        """Keep for the next call those results of the last one, by their places in the list, that nobody takes.

        Local; every rank takes back the same.  With error feedback nothing is lost of them; without it nothing is kept.
        """
        for position, (bound, place) in self._coded():
            if position in results:
                bound.take_back(place, results[position])

    def keep(self, waiting: Mapping[int, Any]) -> None:
        """Keep for the next call what `waiting` of another one has returned, by the places in this list.  Local."""
        for position, (bound, place) in self._coded():
            if position in waiting:
                bound.keep(place, waiting[position])

    def waiting(self) -> dict[int, Any]:
        """Return what error feedback keeps on this rank, by the places of the arrays in the list.  Local."""
        lists = [(positions, bound.waiting()) for _, positions, bound in self._parts if isinstance(bound, CodedList)]
        return {at: values for positions, kept in lists for at, values in zip(positions, kept, strict=False)}

    def _coded(self) -> Iterator[tuple[int, tuple[CodedList, int]]]:
        """Yield the place of each coded array in the list, with its own list and its place there."""
        for _, positions, bound in self._parts:
            if isinstance(bound, CodedList):
                yield from ((position, (bound, place)) for place, position in enumerate(positions))

    def state_dict(self) -> dict[str, Any]:
        """Return what error feedback keeps, of all ranks: for a checkpoint that any number of ranks may load.

        Collective: every rank calls it in the same order, and gets the same.

        Returns
        -------
        dict
            ``"ranks"``: the number of ranks.  With error feedback, for each dtype ``"DTYPE.residues"``, an array of
            shape (ranks, elements), and where sums are coded again ``"DTYPE.sum_residues"``, of shape (elements,).
        """
        found: dict[str, Any] = {"ranks": self._communicator.size}
        for name, vector in self._vectors():
            found |= gathered(name, vector, self._communicator)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned.  Local; every rank gives the same.

        At the same number of ranks all values are what they were.  At another one, each rank takes an equal part of
        what the ranks had, so that nothing is lost of the sums to come.

        Raises
        ------
        ValueError
            It is of other dtypes or lengths, or of an all-reduce without error feedback.
        """
        found = {key: value for key, value in state.items() if key != "ranks"}
        changes = [restored(name, vector, found, self._op, self._communicator) for name, vector in self._vectors()]
        if found:
            raise ValueError(f"the state has {', '.join(sorted(found))}, and this all-reduce keeps no such residues")
        for change in changes:
            change()

    def _vectors(self) -> list[tuple[str, CodedList]]:
        return [(name, bound) for name, _, bound in self._parts if isinstance(bound, CodedList)]


def bind_all_reduce(
    communicator: Communicator,
    like: Sequence[Any],
    op: str = "sum",
    compression: Compression | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """Return the all-reduce of lists like this one, to be called or started; with a stage, a `CompressedAllReduce`.

    Collective: every rank calls it in the same order.  Parameters as for `CompressedAllReduce`.  It returns new arrays;
    ValueError for arrays of other shapes or dtypes, before any communication.
    """
    if compression is not None:
        return CompressedAllReduce(communicator, like, op, compression, names)
    question = Question(op, None if names is None else tuple(names))
    return bind_list(communicator, like, question, in_memory_order=False, any_strides=True)


def _check(like: Sequence[Any], op: str, compression: Any, names: Sequence[str] | None) -> None:
    require_stage(compression)
    if op not in ("sum", "mean"):
        raise ValueError(f"compressed values are added up: op must be 'sum' or 'mean', got {quoted(op)}")
    if names is not None and len(names) != len(like):
        raise ValueError(f"got {len(like)} arrays and {len(names)} names; give each array a name, or none")
    if odd := [type(array).__name__ for array in like if type(array) is not numpy.ndarray and not is_known(array)]:
        raise TypeError(f"a list to be reduced has plain arrays only, got a {odd[0]}; pass numpy.asarray(array)")
    if any(map(is_device, like)):
        raise UnsupportedDtypeError(
            "wire compression codes arrays in host memory, got arrays in device memory; pass compression=None, or "
            "host copies (mpidist.arrays.as_host)"
        )


def _shown(signatures: Sequence[tuple[Any, tuple[int, ...]]]) -> str:
    shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in signatures[:4])
    return f"{len(signatures)} arrays ({shown}{', ...' if len(signatures) > 4 else ''})"


def gathered(name: str, vector: CodedList, communicator: Communicator) -> dict[str, Any]:
    """Return the residues of a vector of dtype `name`, of all ranks.  Collective."""
    residues = {}
    if vector.residues is not None:
        residues[f"{name}.residues"] = communicator.all_gather(vector.residues.kept[None])
    if vector.sums is not None and vector.sums.residues is not None:
        residues[f"{name}.sum_residues"] = communicator.all_gather(vector.sums.residues.kept)
    return residues


def restored(
    name: str, vector: CodedList, state: dict[str, Any], op: str, communicator: Communicator
) -> Callable[[], None]:
    """Take the residues of a vector out of a state; return what puts them into force.  Local.

    ValueError where they are not there, or of another length.
    """
    if vector.residues is None:
        return lambda: None
    rank, size, elements = communicator.rank, communicator.size, vector.elements
    own = _taken(state, f"{name}.residues", (-1, elements))
    of_sums = _taken(state, f"{name}.sum_residues", (elements,)) if f"{name}.sum_residues" in state else None
    saved = len(own)
    if saved == size:
        mine = own[rank]
    else:  # of a sum, an equal part; of a mean, the mean
        mine = own.sum(axis=0) / (size if op == "sum" else saved)
    total = numpy.zeros(elements) if of_sums is None else of_sums
    sums = None if vector.sums is None else vector.sums.residues
    if sums is None:  # no rank codes sums here: what the saving ranks kept of them goes to the values
        mine = mine + (total / size if op == "sum" else total)
    first, last = rank * elements // size, (rank + 1) * elements // size

    def put() -> None:
        assert vector.residues is not None
        vector.residues.kept[:] = mine
        if sums is not None:
            sums.kept[:] = total[first:last]

    return put


def _taken(state: dict[str, Any], key: str, shape: tuple[int, ...]) -> Any:
    """Return an entry of a state, which is then no longer in it; ValueError unless it has the shape."""
    if key not in state:
        raise ValueError(f"the state has no {key}: it was saved without error feedback, or of other dtypes")
    entry = numpy.asarray(state.pop(key))
    if entry.ndim != len(shape) or entry.shape[-1] != shape[-1]:
        raise ValueError(
            f"{key} of the state has the shape {entry.shape}, expected {shape} (-1 is the number of ranks)"
        )
    return entry
