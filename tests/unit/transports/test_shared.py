"""Slots of shared memory, with threads as ranks: the suite of all transports, and messages of the wrong size."""

import numpy as np
import pytest

from mpidist.errors import TransportError
from mpidist.testing import run_ranks
from mpidist.testing.conformance import DeadlineTests, OnRank, Ranks, TransportTests, watch_of
from mpidist.transports import world
from mpidist.transports.shared import SharedTransport

#: Small, so that the suite's longer messages take many slots.
SLOT_BYTES = 1 << 12


class ThreadRanks(Ranks):
    sizes = (1, 2, 3)

    def run(self, size: int, fn: OnRank) -> None:
        memory = bytearray(SharedTransport.nbytes(size, SLOT_BYTES))

        def on_rank() -> None:
            control = world().control
            with SharedTransport(memory, control.rank, size, control, range(size), SLOT_BYTES) as transport:
                fn(transport)

        run_ranks(size, on_rank)


class TestShared(ThreadRanks, TransportTests):
    large_bytes = (1 << 18) + 3


class TestSharedDeadlines(ThreadRanks, DeadlineTests):
    pass


@pytest.mark.parametrize("lengths", [(4, 4), (0, 8), (3 * SLOT_BYTES, 8), (16,)])
def test_an_array_takes_one_message_of_just_its_size(lengths):
    def mismatch(transport):
        sends = [transport.send(np.zeros(length, np.uint8), 0) for length in lengths]
        with pytest.raises(TransportError, match=f"^rank 0 of 1: a message of {lengths[0]} bytes from rank 0 .* 8 byt"):
            transport.wait([transport.receive(np.zeros(8, np.uint8), 0), *sends], watch_of(transport))

    ThreadRanks().run(1, mismatch)
