"""For tests of mpidist and of what is built on it: ranks as threads, a pretended device, conformance suites.

`run_ranks` runs a function on several ranks inside one process, without MPI::

    from mpidist.world import world_communicator
    from mpidist.testing import run_ranks

    def total():
        values = numpy.ones(3)
        world_communicator().all_reduce(values)
        return values.tolist()

    assert run_ranks(4, total) == [[4.0, 4.0, 4.0]] * 4

The suites that every transport and algorithm must pass are in `mpidist.testing.conformance`.
"""

from mpidist.hints import public_module
from mpidist.testing.ranks import RankErrors, run_ranks
from mpidist.transports.loopback import Faults, InjectedFault

__all__ = ["Faults", "InjectedFault", "RankErrors", "run_ranks"]

public_module(__name__)
