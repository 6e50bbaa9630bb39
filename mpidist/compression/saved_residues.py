"""CodeResidues in a checkpoint: those of all ranks, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from mpidist.collectives.communicator import Communicator
from mpidist.compression.coded_list import CodedList


def gathered(name: str, vector: CodedList, communicator: Communicator) -> dict[str, Any]:
    """Return the residues of a vector of dtype `name`, of all ranks.  Collective."""
    found = {}
    if vector.residues is not None:
        found[f"{name}.residues"] = communicator.all_gather(vector.residues.kept[None])
    if vector.sums is not None and vector.sums.residues is not None:
        found[f"{name}.sum_residues"] = communicator.all_gather(vector.sums.residues.kept)
    return found


def restored(
    name: str, vector: CodedList, state: dict[str, Any], op: str, communicator: Communicator
) -> Callable[[], None]:
    """Take the residues of a vector out of a state; return what puts them into force.  Local.

    Raises
    ------
    ValueError
        They are not there, or of another length.
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
    found = numpy.asarray(state.pop(key))
    if found.ndim != len(shape) or found.shape[-1] != shape[-1]:
        raise ValueError(
            f"{key} of the state has the shape {found.shape}, expected {shape} (-1 is the number of ranks)"
        )
    return found
