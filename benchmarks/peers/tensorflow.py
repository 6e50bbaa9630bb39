"""TensorFlow's own ring as a peer: ``MultiWorkerMirroredStrategy`` with RING, on the CPU."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from benchmarks.suite.contender import Contender
from benchmarks.suite.ranks import Ranks, imported
from benchmarks.suite.tensors import TensorList

#: The strategy can be made once in a process, before any operation has run.
_started: list[Any] = []


def started(ranks: Ranks) -> tuple[Any, Any]:
    """Return ``tensorflow`` and a strategy of all ranks.  Collective."""
    if not _started:
        _started.extend(_start(ranks))
    return _started[0], _started[1]


def _start(ranks: Ranks) -> tuple[Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it greets with a page of log lines
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # of no use here, and announced
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ["TF_CONFIG"] = json.dumps(_cluster(ranks))
    tensorflow = imported("tensorflow", "needs TensorFlow: pip install tensorflow-cpu", ranks)
    experimental = tensorflow.distribute.experimental
    options = experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation.RING)
    return tensorflow, tensorflow.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def _cluster(ranks: Ranks) -> dict[str, Any]:
    """Return the ``TF_CONFIG`` of this rank: a port that is free now on each rank's host.  Collective."""
    one_node = ranks.node_count == 1
    host = "127.0.0.1" if one_node else socket.gethostname()
    with socket.socket() as probe:
        probe.bind((host, 0))
        address = f"{host}:{probe.getsockname()[1]}"
    return {"cluster": {"worker": ranks.comm.allgather(address)}, "task": {"type": "worker", "index": ranks.rank}}


class TensorFlowRing(Contender):
    """``all_reduce`` of the replica context inside a ``tf.function``; the tensors are made before it is timed."""

    name = "TensorFlow RING"
    warm_ups = needed_warm_ups = 8  # its first steps take up to six times as long

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        if ranks.size == 1:
            raise ValueError("needs two ranks or more")
        self._tensorflow, strategy = started(ranks)
        self._step = _traced(self._tensorflow, strategy)

    def prepare(self, gradients: list[Any]) -> Any:
        return [self._tensorflow.constant(gradient) for gradient in gradients]

    def run(self, prepared: Any) -> Any:
        return self._step(prepared)

    def arrays(self, result: Any) -> list[Any]:
        return [tensor.numpy() for tensor in result]


def _traced(tensorflow: Any, strategy: Any) -> Any:
    """Return the step as a graph."""

    def on_replica(values: Any) -> Any:
        # arguments of a graph have no device, and the strategy asks each value for one: identity gives it
        placed = [tensorflow.identity(value) for value in values]
        return tensorflow.distribute.get_replica_context().all_reduce("SUM", placed)

    return tensorflow.function(lambda values: strategy.run(lambda: on_replica(values)), autograph=False)
