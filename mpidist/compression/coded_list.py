"""`CodedList`: the all-reduce of a packed list of one dtype, by a stage of compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.arrays import wire_dtype
from mpidist.collectives.call import Call
from mpidist.collectives.mismatch import fact
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.plan import Signature
from mpidist.compression.base import Compression
from mpidist.compression.code_sums import GatheredCodes, SharedCodes
from mpidist.compression.residues import CodeResidues
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class CodedList(Bound):
    """The all-reduce of tensors of one float dtype, coded.

    On one rank nothing is sent, so nothing is coded.  16-bit floats are coded and added up as float32, and rounded once
    at the end.  `residues` are those of this rank's values; `sums` are None on one rank.
    """

    def __init__(self, ranks: Communicator, signatures: Sequence[Signature], op: str, stage: Compression) -> None:
        super().__init__(ranks, Call(f"all_reduce({op})", [*signatures, fact("compression", stage)]))
        (self._dtype,) = {numpy.dtype(dtype) for _, dtype, _ in signatures}
        self._shapes = [shape for _, _, shape in signatures]
        self._ends = numpy.cumsum([int(numpy.prod(shape, dtype=int)) for shape in self._shapes]).tolist()
        elements, wire = self._ends[-1], wire_dtype(self._dtype)
        self._values = numpy.zeros(elements, wire)
        self._decoded = numpy.zeros(elements if stage.error_feedback else 0, wire)
        self._rank, self._size, self._is_kept = ranks.rank, ranks.size, False
        self._scale = 1.0 / ranks.size if op == "mean" else None
        self.residues = CodeResidues(elements, wire) if stage.error_feedback else None
        way = GatheredCodes if stage.is_gathered else SharedCodes
        self.sums: GatheredCodes | SharedCodes | None = (
            way(ranks.transport, elements, wire, stage) if ranks.size > 1 else None
        )

    @property
    def elements(self) -> int:
        """How many values there are."""
        return self._values.size

    def fill(self, arrays: Sequence[Any]) -> bool:
        """Code the values.  A stage that raises does so before the call is begun, so that this rank stays in step."""
        values = self._values
        numpy.concatenate(arrays, axis=None, out=values)
        if self.residues is not None:
            self.residues.add_to(values)
        if self.sums is not None:
            self.sums.encode(values)
            if self.residues is not None:
                self.sums.decode_own(self._decoded)
                self.residues.note(values, self._decoded)
        elif self.residues is not None:
            self.residues.note(values, values)
        return True

    def move(self, watch: Watch, arrays: Any) -> list[Any]:
        """Add up the codes of all ranks."""
        total = numpy.empty_like(self._values)
        if self.sums is None:
            total[:] = self._values
        else:
            self.sums.sum(watch, total, self._scale)
        found = total.astype(self._dtype, copy=False)
        self._keep_residues(found)
        return self._cut(found)

    def _keep_residues(self, found: Any) -> None:
        """Let residues count, unless the result is not finite: nobody makes a step with it.  The same on all ranks."""
        of_sums = None if self.sums is None else self.sums.residues
        kept = [each for each in (self.residues, of_sums) if each is not None]
        self._is_kept = bool(kept) and bool(numpy.isfinite(found).all())
        if self._is_kept:
            for each in kept:
                each.keep()

    def take_back(self, place: int, result: Any) -> None:
        """Keep for the next call a result of the last one, by its place in the list; an equal part on each rank.

        Local; every rank takes back the same.
        """
        if self._is_kept:
            values = numpy.asarray(result, self._values.dtype)
            self.keep(place, values / self._size if self._scale is None else values)

    def keep(self, place: int, values: Any) -> None:
        """Keep values of an array, by its place in the list, for the next call, besides what is kept.  Local."""
        if self.residues is not None:
            self.residues.kept[(0, *self._ends)[place] : self._ends[place]] += values.reshape(-1)

    def waiting(self) -> list[Any]:
        """Return what this rank keeps of each array, as if all of it were of its own values.  Local."""
        if self.residues is None:
            return []
        kept, of_sums = self.residues.kept.copy(), None if self.sums is None else self.sums.residues
        if of_sums is not None:
            first = self._rank * self.elements // self._size
            kept[first : first + of_sums.kept.size] += of_sums.kept * (1 if self._scale is None else self._size)
        return self._cut(kept)

    def _cut(self, total: Any) -> list[Any]:
        firsts = [0, *self._ends[:-1]]
        return [
            total[first:last].reshape(shape)
            for first, last, shape in zip(firsts, self._ends, self._shapes, strict=True)
        ]
