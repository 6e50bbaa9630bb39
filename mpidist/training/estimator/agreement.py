"""What the ranks of a training decide together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpidist.parameter_server import registry
from mpidist.training.checkpoint import together
from mpidist.training.checkpoint_manager import checkpoints_in


def from_chief(fn: Callable[[], str], what: str) -> str:
    """Return the chief's text on all ranks; its error is raised on all.  Collective.

    Of workers that train by themselves, the first is the chief.
    """
    job = registry.of_job()
    if job is not None:
        return job.extended.by_first_worker(fn) or ""
    return here_from_chief(fn, what)


def here_from_chief(fn: Callable[[], str], what: str) -> str:
    """Return the text of the first rank of this worker.  Collective among its ranks; errors as for `from_chief`."""
    text: str = together(fn, what)
    return text


def newest_in(directory: Path) -> str:
    """Return the path of the newest checkpoint in a directory, "" if there is none.  Local."""
    return str(max(checkpoints_in(directory)[-1:], default=""))


def step_of(path: str) -> int:
    """Return the global step of a checkpoint by its name; 0 where there is none.  Local."""
    return int(Path(path).stem.rpartition("-")[2]) if path else 0
