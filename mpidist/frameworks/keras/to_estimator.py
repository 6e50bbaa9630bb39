"""`model_to_estimator`: an `Estimator` of a Keras model."""

from __future__ import annotations

import os
from typing import Any

from mpidist.frameworks.keras.model_function import KerasModelFunction
from mpidist.training.estimator.estimator import Estimator
from mpidist.training.estimator.run_config import RunConfig


def to_estimator(
    keras_model: Any, model_dir: str | os.PathLike[str] | None = None, config: RunConfig | None = None
) -> Estimator:
    """Return an Estimator of a compiled Keras model; see `mpidist.estimator.model_to_estimator`."""
    function = KerasModelFunction(keras_model)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        return function(features, labels, mode)

    return Estimator(model_fn, model_dir, config)
