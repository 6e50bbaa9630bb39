"""Which backend Keras has, and what is done otherwise on each: see `torch_steps` and `jax_steps`."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy

from mpidist.device.waiting import has_links
from mpidist.packages import pip_install

#: Backend -> the module that has its seam.
SEAMS = {"jax": "mpidist.frameworks.keras.jax_steps", "torch": "mpidist.frameworks.keras.torch_steps"}

#: The oldest version of Keras that is tested.
_OLDEST = (3, 12)


def seam() -> Any:
    """Return the module for the backend of Keras.  Local.

    Each has ``reduced(replica, gradients, is_weighted)``, ``is_concrete(value)``, ``own_dropout(thread)``,
    ``buffers(model)``, ``share_buffers(replica, model)``, of a function ``value_and_grad(fn)`` and
    ``without_gradients(fn)``, and, of a model, its replica and the name of a method that it is put over, ``step`` and
    ``make_function``; and ``awaited(value)``, for `to_numpy`. For `own_device` each has ``use_gpu(number)``,
    ``places_of(tensors)``, ``reduced_on_gpu(replica, op, tensors)``, the adapter's module ``cuda``, and for messages
    ``OTHER_DEVICES`` and ``WITHOUT_GPU``.
    """
    return importlib.import_module(SEAMS[keras.backend.backend()])


def to_numpy(value: Any) -> numpy.ndarray:
    """Return the numbers of a tensor or a variable, when the rank's GPU has made them; errors as for `wait_for`.

    Local.
    """
    if has_links():  # Keras would wait without a look at the ranks for whom the GPU may be waiting
        value = seam().awaited(value)
    found: numpy.ndarray = keras.ops.convert_to_numpy(value)
    return found


def version() -> tuple[int, ...]:
    """Return the first two numbers of Keras' version.  Local."""
    return tuple(int(number) for number in keras.__version__.split(".")[:2])


def require_backend() -> None:
    """Raise NotImplementedError unless models of this Keras can be distributed.  Local."""
    if version() < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise NotImplementedError(
            f"models of Keras {keras.__version__} are not distributed: Keras {oldest} is the oldest version that is "
            f"tested; {pip_install('keras')}"
        )
    backend = keras.backend.backend()
    if backend in SEAMS:
        return
    advice = "tf.distribute of TensorFlow itself distributes models with this backend; " * (backend == "tensorflow")
    raise NotImplementedError(
        f"Keras models are distributed with the backends jax and torch, and Keras has the backend {backend}. {advice}"
        "set the environment variable KERAS_BACKEND=jax (or torch) before Keras is imported"
    )
