"""One rank alone, by the suites of all transports."""

import numpy as np
import pytest

from mpidist.errors import TransportError
from mpidist.testing.conformance import CollectiveTests, DeadlineTests, OnRank, RankRunner, TransportTests
from mpidist.transports.single import SingleTransport


class SingleRank(RankRunner):
    sizes = (1,)

    def run(self, size: int, fn: OnRank) -> None:
        fn(SingleTransport())


class TestSingle(SingleRank, TransportTests):
    pass


class TestSingleDeadlines(SingleRank, DeadlineTests):
    pass


class TestSingleCollectives(SingleRank, CollectiveTests):
    sizes = (1,)


def test_messages_must_be_as_long_as_the_array_that_receives_them():
    transport = SingleTransport()
    transport.send(np.zeros(2), 0)
    with pytest.raises(TransportError, match="16 bytes from rank 0 does not fit the 8 bytes"):
        transport.receive(np.zeros(1), 0)
