"""`ModelFunction`: a user's model function with its arguments checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mpidist.errors import quoted
from mpidist.training.estimator.spec import EstimatorSpec

_KNOWN = ("features", "labels", "mode", "params", "config")


class ModelFunction:
    """A model function, called with those arguments that it names.  All Local.

    Parameters
    ----------
    model_fn : callable
        With some of the parameters ``features, labels, mode, params, config``; ``features`` at least.
    params : Any
        What it gets as ``params``.

    Raises
    ------
    TypeError
        It is no function.
    ValueError
        It has other parameters, no ``features``, or no ``params`` where there are some.
    """

    def __init__(self, model_fn: Callable[..., EstimatorSpec], params: Any) -> None:
        if not callable(model_fn):
            raise TypeError(f"model_fn must be a function, got {type(model_fn).__name__}")
        self.fn = model_fn
        self._name = getattr(model_fn, "__name__", type(model_fn).__name__)
        self._accepted = list(inspect.signature(model_fn).parameters)
        if "features" not in self._accepted:
            raise ValueError(f"model_fn ({self._name}) must include features argument.")
        if params is not None and "params" not in self._accepted:
            raise ValueError(
                f"model_fn ({self._name}) does not include params argument, but params {quoted(params)} is given."
            )
        if unknown := [name for name in self._accepted if name not in _KNOWN]:
            raise ValueError(f"model_fn ({self._name}) has following not expected args: {unknown}; known: {_KNOWN}")

    def __call__(self, features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        """Return the model of a mode.

        Raises
        ------
        ValueError
            There are labels, and the function takes none; or the model is of another mode.
        TypeError
            It returns no EstimatorSpec.
        """
        if labels is not None and "labels" not in self._accepted:
            raise ValueError(f"model_fn ({self._name}) does not take labels, but input_fn returns labels.")
        given = dict(zip(_KNOWN, (features, labels, mode, params, config), strict=True))
        spec = self.fn(**{name: given[name] for name in self._accepted})
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(f"model_fn ({self._name}) should return an EstimatorSpec, got {type(spec).__name__}")
        if spec.mode != mode:
            raise ValueError(f"model_fn ({self._name}) returned an EstimatorSpec of mode {spec.mode!r} for {mode!r}")
        return spec
