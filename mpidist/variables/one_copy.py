"""`OneCopy`: memory in which the ranks of a node keep one copy of each array, and the rule by which it is changed.

Nobody reads while somebody writes: a change begins when all ranks have come to it, and no rank goes on before it is
made.  Between changes an array stays as it is, so reading is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy

from mpidist.arrays import ALIGNMENT
from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.errors import TransportError
from mpidist.transports.node_memory import map_together

#: Short arrays lie together in blocks of so many bytes; longer ones have memory of their own.
_BLOCK_BYTES, _SHORT_BYTES = 1 << 20, 1 << 17


class OneCopy:
    """The memory that the ranks of a node have in common for variables, and for what optimizers keep of them.

    The memory has no name, and goes with the last process that maps it.  The ranks of `communicator` are on one node
    and share memory; rank 0 makes the changes that are not dealt.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self._changed = communicator.call("changed")
        self._block, self._used = numpy.empty(0, numpy.uint8), 0

    def empty(self, shape: Sequence[int], dtype: Any, what: str) -> Any:
        """Return an array that all ranks see, with anything in it.  Collective.

        `what` says in messages what it is for.  TransportError, on all ranks, where there is not so much memory;
        CollectiveMismatchError where they asked for different arrays.
        """
        dtype = numpy.dtype(dtype)
        self._communicator.check(self._communicator.call(what, [("", dtype, shape)]))
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > _SHORT_BYTES:
            raw = self._map(nbytes, what)
        else:
            if self._used + nbytes > len(self._block):
                self._block, self._used = self._map(_BLOCK_BYTES, what), 0
            raw = self._block[self._used :]
            self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return raw[:nbytes].view(dtype).reshape(shape)

    def _map(self, nbytes: int, what: str) -> Any:
        def exchange(raw: bytes) -> list[bytes]:
            return self._communicator.exchange(raw, what)

        try:
            return numpy.frombuffer(map_together(nbytes, self.rank, exchange), numpy.uint8)
        except TransportError as error:
            raise TransportError(
                f"{what}: the ranks of this node cannot share one copy of it: {error}. Give the node, or the "
                "container (its shared memory and its memory limit), more memory; MirroredStrategy needs even more, "
                "as it keeps a copy on each rank"
            ) from error

    @contextmanager
    def changes(self, call: Call, variables: Sequence[Any]) -> Iterator[None]:
        """Let the code inside change arrays: no rank reads meanwhile, and all go on when all have done.  Collective.

        `call` is compared over the ranks; `variables` are torn if it is broken off.
        """
        self._communicator.check(call)
        for variable in variables:
            variable.note_change()  # also where other ranks write it
        try:
            yield
            self._communicator.check(self._changed)
            for variable in variables:
                variable.note_change()
        except BaseException as error:
            for variable in variables:
                variable.tear(f"{call.what} ended with {type(error).__name__}: {error}")
            raise
