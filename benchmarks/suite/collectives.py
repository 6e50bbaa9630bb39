"""``collectives``: the collectives besides all-reduce, and messages between two ranks, each against MPI's own."""

from __future__ import annotations

import argparse
from typing import Any

import numpy

import mpidist
from benchmarks.peers.table import Maker
from benchmarks.suite.contender import Contender
from benchmarks.suite.measured import Measured
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import heading, line
from benchmarks.suite.tensors import PERIOD, STEPS, TensorList
from benchmarks.suite.turns import Budget

WHAT = "the collectives besides all-reduce, and messages between two ranks"

#: Bytes that a turn moves, about, and the most calls it makes.
_TURN_BYTES, _MOST_CALLS = 1 << 22, 100


class Collective(Contender):
    """One of the collectives on one array, by mpidist; `MpiCollective` is the same by MPI.

    An array of `size` bytes is what all ranks have together, as nccl-tests count it.
    """

    name = "mpidist"
    kind = "ours"
    work = ""
    warm_ups = 3

    def prepare(self, gradients: list[Any]) -> Any:
        return gradients[0]

    def expected(self, step: int) -> Any:
        """Return the result of a step on this rank; for all but the barrier."""
        raise NotImplementedError

    def wrong(self, result: Any, step: int) -> int | None:
        expected = self.expected(step)
        return int(numpy.count_nonzero(result != expected)) if result.shape == expected.shape else expected.size

    def values(self, rank: int, step: int, first: int, stop: int) -> Any:
        """Return what `rank` passes as elements `first` to `stop`."""
        return numpy.arange(first, stop) % PERIOD + rank + step % STEPS

    def share(self) -> tuple[int, int]:
        """Return first and last element of this rank's share."""
        rank, size, elements = self.tensors.rank, self.tensors.size, self.tensors.elements
        return rank * elements // size, (rank + 1) * elements // size


class AllGather(Collective):
    """Every rank gets the shares of all, by the public call."""

    work = "all_gather"

    def prepare(self, gradients: list[Any]) -> Any:
        first, stop = self.share()
        return gradients[0][first:stop]

    def run_all(self, batch: Any) -> Any:
        return self.ranks.strategy.run(super().run_all, args=(batch,))

    def run(self, prepared: Any) -> Any:
        return mpidist.get_replica_context().all_gather(prepared, axis=0)

    def expected(self, step: int) -> Any:
        size, elements = self.tensors.size, self.tensors.elements
        cuts = [rank * elements // size for rank in range(size + 1)]
        return numpy.concatenate([self.values(rank, step, cuts[rank], cuts[rank + 1]) for rank in range(size)])


class ReduceScatter(Collective):
    """Every rank gets its share of the sum."""

    work = "reduce_scatter"

    def run(self, prepared: Any) -> Any:
        return self.ranks.communicator.reduce_scatter(prepared)

    def expected(self, step: int) -> Any:
        first, stop = self.share()
        return self.tensors.sums(step, numpy.arange(first, stop) % PERIOD)


class Broadcast(Collective):
    """Every rank gets what rank 0 has."""

    work = "broadcast"

    def run(self, prepared: Any) -> Any:
        self.ranks.communicator.broadcast(prepared)
        return prepared

    def expected(self, step: int) -> Any:
        return self.values(0, step, 0, self.tensors.elements)


class Gather(AllGather):
    """Rank 0 gets the shares of all."""

    work = "gather"

    def run_all(self, batch: Any) -> Any:
        result = None
        for prepared in batch:
            result = self.run(prepared)
        return result

    def run(self, prepared: Any) -> Any:
        return self.ranks.communicator.gather(prepared)

    def wrong(self, result: Any, step: int) -> int | None:
        return super().wrong(result, step) if self.tensors.rank == 0 else 0


class AllToAll(Collective):
    """Every rank gets a share of each."""

    work = "all_to_all"

    def cut(self, rank: int) -> tuple[int, int]:
        """Return first and last element of what each rank gives to a rank; what is left over goes nowhere."""
        length = self.tensors.elements // self.tensors.size
        return rank * length, (rank + 1) * length

    def prepare(self, gradients: list[Any]) -> Any:
        return gradients[0][: self.cut(self.tensors.size - 1)[1]]

    def run(self, prepared: Any) -> Any:
        return self.ranks.communicator.all_to_all(prepared)[0]

    def expected(self, step: int) -> Any:
        size, rank = self.tensors.size, self.tensors.rank
        return numpy.concatenate([self.values(other, step, *self.cut(rank)) for other in range(size)])


class SendReceive(Collective):
    """Every rank sends to the next one, and receives from the one before."""

    work = "send_receive"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self.to, self.source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        if ranks.size > 1 and self.kind == "ours":
            (like,) = ranks.existing(tensors)
            self._send = ranks.communicator.send_init(like, self.to)
            self._receive = ranks.communicator.receive_init(like, self.source)

    def run(self, prepared: Any) -> Any:
        sending = self._send.start(prepared)
        received = self._receive()
        sending.wait()
        return received

    def expected(self, step: int) -> Any:
        return self.values(self.source, step, 0, self.tensors.elements)


class Barrier(Collective):
    """Nobody goes on before all have come."""

    work = "barrier"
    is_reduction = False

    def run(self, prepared: Any) -> Any:
        self.ranks.communicator.barrier()

    def wrong(self, result: Any, step: int) -> int | None:
        return None


class MpiAllGather(AllGather):
    """The same by ``Allgather``, into an array that exists."""

    name, kind = "Allgatherv", "peer"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        (self._out,) = ranks.existing(tensors)
        size, elements = tensors.size, tensors.elements
        cuts = numpy.arange(size + 1) * elements // size
        self._counts = (numpy.diff(cuts), cuts[:-1])

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Allgatherv(prepared, [self._out, self._counts])
        return self._out


class MpiReduceScatter(ReduceScatter):
    """The same by ``Reduce_scatter``, into an array that exists."""

    name, kind = "Reduce_scatter", "peer"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        first, stop = self.share()
        self._out = numpy.zeros(stop - first, tensors.dtype)
        self._counts = numpy.diff(numpy.arange(tensors.size + 1) * tensors.elements // tensors.size).tolist()

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Reduce_scatter(prepared, self._out, self._counts)
        return self._out


class MpiBroadcast(Broadcast):
    """The same by ``Bcast``."""

    name, kind = "Bcast", "peer"

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Bcast(prepared)
        return prepared


class MpiGather(Gather):
    """The same by ``Gatherv``, into an array that exists."""

    name, kind = "Gatherv", "peer"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        (self._out,) = ranks.existing(tensors)
        cuts = numpy.arange(tensors.size + 1) * tensors.elements // tensors.size
        self._counts = (numpy.diff(cuts), cuts[:-1])

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Gatherv(prepared, [self._out, self._counts] if self.tensors.rank == 0 else None)
        return self._out


class MpiAllToAll(AllToAll):
    """The same by ``Alltoall``, into an array that exists."""

    name, kind = "Alltoall", "peer"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self._out = numpy.zeros(self.cut(tensors.size - 1)[1], tensors.dtype)

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Alltoall(prepared, self._out)
        return self._out


class MpiSendReceive(SendReceive):
    """The same by ``Sendrecv``, into an array that exists."""

    name, kind = "Sendrecv", "peer"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        (self._out,) = ranks.existing(tensors)

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Sendrecv(prepared, self.to, 0, self._out, self.source, 0)
        return self._out


class MpiBarrier(Barrier):
    """The same by ``Barrier``."""

    name, kind = "Barrier", "peer"

    def run(self, prepared: Any) -> Any:
        self.ranks.comm.Barrier()


#: Ours, MPI's, and busbw by algbw on P ranks.
COLLECTIVES: dict[str, tuple[type[Collective], type[Collective], Any]] = {
    "all_gather": (AllGather, MpiAllGather, lambda size: (size - 1) / size),
    "reduce_scatter": (ReduceScatter, MpiReduceScatter, lambda size: (size - 1) / size),
    "broadcast": (Broadcast, MpiBroadcast, lambda size: 1.0),
    "gather": (Gather, MpiGather, lambda size: (size - 1) / size),
    "all_to_all": (AllToAll, MpiAllToAll, lambda size: (size - 1) / size),
    "send_receive": (SendReceive, MpiSendReceive, lambda size: 1.0),
    "barrier": (Barrier, MpiBarrier, lambda size: 0.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    from mpidist.commands import quantities  # here, since `benchmarks.pairs` measures older checkouts

    parser.add_argument("--which", nargs="+", choices=list(COLLECTIVES), default=list(COLLECTIVES), help="default: all")
    parser.add_argument(
        "--sizes", nargs="+", type=quantities.count, default=[1 << 10, 1 << 16, 1 << 20, 1 << 24], metavar="BYTES"
    )
    parser.add_argument("--dtype", type=numpy.dtype, default="float32", help="default: float32")


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch.  Collective."""
    measured = Measured()
    works = [(name, nbytes) for name in options.which for nbytes in (options.sizes if name != "barrier" else [4])]
    shown = ""
    for name, nbytes in works:
        ours, theirs, factor = COLLECTIVES[name]
        if name != shown:
            ranks.say(f"# {name}, ratio and more: against {theirs.name}\n{heading()}")
        shown = name
        tensors = TensorList([(max(1, nbytes // options.dtype.itemsize),)], options.dtype, ranks.rank, ranks.size)
        calls = max(1, min(_MOST_CALLS, _TURN_BYTES // tensors.nbytes))
        budget = Budget((options.seconds or 20.0) / len(works), options.rounds or 21, calls)
        pair: list[Maker] = [ours, theirs]
        rows = measured.add(name, pair, tensors, ranks, budget, theirs.name, factor(ranks.size))
        ranks.say("\n".join(map(line, rows)))
    return measured
