"""`ModelFiles`: what `keras.callbacks.ModelCheckpoint` saves of a model, for an evaluator beside the training."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from mpidist.errors import CheckpointError
from mpidist.frameworks.keras.classes import replica_of

_ENDINGS = (".keras", ".weights.h5")


class ModelFiles:
    """The files of a model, in the place of a `Checkpoint` and of what evaluates it.

    `model`: compiled and built; of the layers of the one that is trained.  `parts`: as those of a checkpoint: what has
    a strategy.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        replica = replica_of(model)
        self.parts: Mapping[str, Any] = {} if replica is None else {"model": replica}

    @staticmethod
    def files_in(directory: Path) -> list[Path]:
        """Return those that are in a directory, in any order; none that is being written.  Local."""
        paths = directory.iterdir() if directory.is_dir() else ()
        return [path for path in paths if path.name.endswith(_ENDINGS) and not path.name.startswith(".")]

    def restore(self, path: Path) -> None:
        """Give the model the weights of a file.

        CheckpointError: it is damaged, or gone.  ValueError: it is of another model.
        """
        try:
            self._model.load_weights(path)
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def evaluate(self, data: Any, **options: Any) -> Mapping[str, Any]:
        """Return loss and metrics of ``data``: inputs, labels and weights, or what gives batches of these."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        found: Mapping[str, Any] = self._model.evaluate(x, y, sample_weight=sample_weight, **options)
        return found
