"""The device of a rank, as Keras has it: where tensors lie, and are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy

from mpidist.cluster.devices import gpu_of_name
from mpidist.frameworks.keras.backends import SEAMS, seam
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.options import ReduceOp


class TensorPlace(NamedTuple):
    """Where tensors lie: a device, by the name that the backend gives it; `gpu` is the number of one of CUDA's."""

    name: str
    is_host: bool
    gpu: int | None


def use_gpu(strategy: Any) -> None:
    """Have Keras work on this rank's GPU from now on, if it has one and Keras works on GPUs.  Local."""
    gpu = gpu_of_name(strategy.extended.device_name)
    if gpu is not None and keras.backend.backend() in SEAMS:
        seam().use_gpu(gpu)


def are_on_gpu(replica: ModelReplica, tensors: Sequence[Any]) -> bool:
    """Return whether tensors lie on this rank's GPU, and not in host memory.  Local.

    NotImplementedError, or MissingDependencyError without CuPy: they lie elsewhere.
    """
    backend = seam()
    places = backend.places_of(tensors)
    if all(place.is_host for place in places):
        return False
    name = replica.strategy.extended.device_name
    own, gpus = gpu_of_name(name), [place.gpu for place in places]
    if len(gpus) == 1 and gpus[0] is not None and own in (None, *gpus):
        backend.cuda.require_cupy(backend.WITHOUT_GPU)
        return True
    told = ", ".join(sorted(place.name for place in places))
    raise NotImplementedError(
        f"{replica.name}: variables or gradients of a distributed Keras model lie on {told}; gradients are reduced in "
        f"host memory, or on one GPU, that of the rank ({name}). Make the model in strategy.scope(), where Keras takes "
        f"the rank's GPU, and without {backend.OTHER_DEVICES}; or {backend.WITHOUT_GPU}"
    )


def over_replicas(
    replica: ModelReplica, op: ReduceOp, tensors: Sequence[Any], notes: Sequence[numpy.ndarray] = ()
) -> tuple[list[Any], list[numpy.ndarray]]:
    """Return tensors and notes, reduced over the replicas.  Collective.

    Notes are small arrays of the host; results of tensors of the host are arrays, too.  In a step this rank's vote for
    an end goes with the notes.  Notes go with tensors of the host, and before those on a GPU: so nobody waits for the
    GPU in order to read them.
    """
    is_step = replica.share is not None
    # `make_function` has looked at all variables; asking for all places took 0.15 ms a step for 200 arrays of JAX
    is_on_gpu = are_on_gpu(replica, tensors[:1] if is_step else tensors)
    arrays = [] if is_on_gpu else [numpy.asarray(tensor) for tensor in tensors]
    votes = [numpy.array([replica.is_vote], arrays[0].dtype if arrays else "float32")] if is_step else []
    given = [*arrays, *notes, *votes]
    results = replica.reduce(op, given) if given else []
    if is_step:
        replica.is_stopped = replica.is_stopped or bool(results.pop()[0])
    if is_on_gpu:
        return seam().reduced_on_gpu(replica, op, tensors), results
    return results[: len(arrays)], results[len(arrays) :]
