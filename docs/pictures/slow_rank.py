"""A training with a slow rank, to be traced; `timeline` draws what ``slow_rank.json`` holds of it.

    MPIDIST_TRACE=/tmp/slow_rank mpidist run -n 4 docs/pictures/slow_rank.py
    mpidist trace /tmp/slow_rank --output docs/pictures/slow_rank.json

Ranks sleep in place of computing, so a machine with fewer cores than ranks does as well.
"""

from __future__ import annotations

import time

import numpy

import mpidist

#: What each rank computes for in a step.
_SECONDS = (0.016, 0.020, 0.036, 0.014)

strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = mpidist.Variable(numpy.zeros(500_000, "float32"), name="weights")
    optimizer = mpidist.optimizers.SGD(0.1)
gradients = numpy.ones(500_000, "float32")


def train_step() -> None:
    time.sleep(_SECONDS[mpidist.rank()])
    optimizer.apply_gradients([(gradients, weights)])


for _ in range(5):
    strategy.run(train_step)
