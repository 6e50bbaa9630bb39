"""The variables in a checkpoint file, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpidist.errors import CheckpointNotFoundError
from mpidist.training import hdf5_file
from mpidist.training.estimator.built_model import POSITION, VARIABLES


def variables_in(path: str | None, directory: Path) -> dict[str, Any]:
    """Return the variables of a checkpoint, and its global step; CheckpointNotFoundError for None.  Local."""
    if path is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {directory}: train first")
    arrays, numbers = hdf5_file.read(Path(path))
    start = f"{VARIABLES}/"
    found: dict[str, Any] = {name[len(start) :]: array for name, array in arrays.items() if name.startswith(start)}
    return {**found, "global_step": int(numbers[f"{POSITION}/global_step"])}
