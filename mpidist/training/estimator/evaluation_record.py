"""The results of evaluations, as lines of JSON in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from mpidist.strategies import workers
from mpidist.training.checkpoint import CHIEF
from mpidist.world import world_communicator

_FILE = "evaluations.jsonl"
_log = logging.getLogger("mpidist")


def record(folder: str, results: Mapping[str, Any]) -> None:
    """Write the results as a line of ``evaluations.jsonl`` in a folder, and to the log, on the chief.  Local.

    A folder that cannot be written to is a warning in the log: an evaluation only reads.
    """
    if world_communicator().rank != CHIEF or not workers.of_job().writes_checkpoints:
        return
    plain = {name: numpy.asarray(value).tolist() for name, value in results.items()}
    _log.info("Saving dict for global step %s: %s", plain["global_step"], plain)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with Path(folder, _FILE).open("a") as file:
            file.write(json.dumps(plain) + "\n")
    except OSError as error:
        _log.warning("the results of an evaluation were not recorded: %s", error)
