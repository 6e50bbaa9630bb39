"""`SidecarEvaluator`: evaluates each new checkpoint of a training in other processes."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import CheckpointError
from mpidist.runtime import board
from mpidist.runtime.control import ControlChannel
from mpidist.strategies.distribution import framework_of
from mpidist.training.callbacks.base import Callback
from mpidist.training.checkpoint import Checkpoint
from mpidist.training.checkpoint_manager import checkpoints_in
from mpidist.training.given_path import given_path
from mpidist.training.trainer import Trainer

_log = logging.getLogger("mpidist")


class CheckpointResult(NamedTuple):
    """The results of one checkpoint.  `logs` are loss and metrics, by name."""

    path: Path
    logs: Mapping[str, Any]


class SidecarEvaluator:
    """Watches the checkpoint folder of a training, and evaluates each new checkpoint once.

    It is for a rank whose role is evaluator.  Such a rank has variables of its own, outside of the training cluster.
    Each checkpoint sets them.  It also works in a process outside of the job that sees the folder.

    Parameters
    ----------
    model : Trainer, keras.Model or callable
        Its variables are restored, and its `evaluate` is called.  One of Keras must have been built.  A function gets
        `data`, and returns a dict of logs; it needs `checkpoint`.
    data : as for `evaluate` of the model
        For one of Keras a tuple has inputs, labels and weights.
    checkpoint_dir : str or Path
        Where a `CheckpointManager`, or `mpidist.callbacks.ModelCheckpoint`, saves; for a model of Keras, where
        `keras.callbacks.ModelCheckpoint` saves files that end in ``.keras`` or ``.weights.h5``, and nobody else does.
    steps : int, optional
        Evaluate only so many batches.
    max_evaluations : int, optional
        How many checkpoints to evaluate.  None: all, until the training has ended.
    callbacks : sequence of Callback
        For `evaluate` of the model.
    checkpoint : Checkpoint, optional
        What to restore, by the names under which the training saves it.  By default the variables of the trainer, as
        `ModelCheckpoint` names them.  None for a model of Keras.
    ended : callable, optional
        Returns whether the training has ended: what is there by then is evaluated, and no more is waited for.  By
        default, whether the first rank that trains has left.
    poll_seconds : float
        How often it looks.

    Attributes
    ----------
    results : list of CheckpointResult

    Raises
    ------
    TypeError
        The model is a function, and there is no `checkpoint`; or it is one of Keras, and there is one.
    ValueError
        `checkpoint_dir` is empty; `max_evaluations` is less than 1; or there is neither that nor a training of this
        job, and no `ended`: it would never end.
    """

    def __init__(
        self,
        model: Trainer | Callable[[Any], Mapping[str, Any]] | Any,
        data: Any,
        checkpoint_dir: str | Path,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        ended: Callable[[], bool] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        if max_evaluations is not None and max_evaluations < 1:
            raise ValueError(f"max_evaluations must be 1 or more, or None for no limit; got {max_evaluations}")
        self._is_of_keras = is_of_keras = framework_of(model) == "keras"
        if is_of_keras and checkpoint is not None:
            raise TypeError("a model of Keras has its weights in files of Keras, and takes no checkpoint=")
        restored: Any = checkpoint
        if is_of_keras:
            restored = importlib.import_module("mpidist.frameworks.keras.model_files").ModelFiles(model)
        elif not checkpoint:
            if not isinstance(model, Trainer):
                raise TypeError(
                    "a model that is a function needs checkpoint=Checkpoint(...): the variables that it reads, by the "
                    "names under which the training saves them"
                )
            restored = Checkpoint(variables=model.checkpoint_objects()["variables"])
        if ended is None:
            variables = (part for part in restored.parts.values() if hasattr(part, "strategy"))
            ended = end_of_training(next((variable.strategy for variable in variables), None))
        if ended is None and max_evaluations is None:
            raise ValueError(
                "nothing tells when the training has ended: this rank is not the evaluator of a "
                "ParameterServerStrategy; give max_evaluations, or ended=, a function that knows"
            )
        self._model: Any = restored if is_of_keras else model
        self._is_function = not is_of_keras and not isinstance(model, Trainer)
        self._data, self._steps = data, steps
        self._callbacks = tuple(callbacks or ())
        self._checkpoint = restored
        self._files_in = restored.files_in if is_of_keras else checkpoints_in
        self._folder = given_path(checkpoint_dir, "checkpoint_dir")
        self._most = max_evaluations
        self._ended = ended or (lambda: False)
        self._poll_seconds = poll_seconds
        self._seen: set[tuple[Path, int]] = set()
        self.results: list[CheckpointResult] = []

    def start(self) -> list[CheckpointResult]:
        """Evaluate checkpoints as they come, and return the results.  Local to the evaluator.

        Checkpoints that are in the folder already come first, in the order of their saves.  A checkpoint that is
        damaged, or was removed before its turn, is left out with a line in the log.
        """
        while not self._is_done:
            last = self._ended()  # before the look: what was saved before the end is there
            found = written(self._files_in(self._folder))
            if self._is_of_keras:  # names are the user's; checkpoints are in the order of their saves
                found.sort(key=itemgetter(1, 0))
            new = [each for each in found if each not in self._seen]
            for path, moment in new:
                self._seen.add((path, moment))
                self._evaluate(path)
                if self._is_done:
                    break
            if last:
                break
            if not new:
                time.sleep(self._poll_seconds)
        return self.results

    @property
    def _is_done(self) -> bool:
        return self._most is not None and len(self.results) >= self._most

    def _evaluate(self, path: Path) -> None:
        try:
            self._checkpoint.restore(path)
        except CheckpointError as error:
            _log.warning("%s; the evaluator passes it over", error)
            return
        if self._is_function:
            logs = self._model(self._data)
        else:
            logs = self._model.evaluate(
                self._data, steps=self._steps, callbacks=self._callbacks, verbose=0, return_dict=True
            )
        self.results.append(CheckpointResult(path, dict(logs)))
        _log.info("%s: %s", path.name, ", ".join(f"{name} {value}" for name, value in logs.items()))


def written(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return files and when they were written: one that a resumed training has saved again is new.  Local."""
    times = []
    for path in paths:
        with suppress(FileNotFoundError):  # it was removed since, for a newer one
            times.append((path, path.stat().st_mtime_ns))
    return times


def end_of_training(strategy: Any) -> Callable[[], bool] | None:
    """Return a function that asks whether the training has ended; None if this rank is not its evaluator.  Local."""
    roles = getattr(strategy, "_roles", None)
    if strategy is None or roles is None or roles.evaluator != strategy._rank:
        return None
    control, chief = strategy._whole.control, roles.trainers[0][0]
    return lambda: _has_ended(control, chief)


def _has_ended(control: ControlChannel, rank: int) -> bool:
    if rank in control.board_ranks:
        line = control.board_ranks.index(rank)
        return control.board.state(line) not in (board.UNKNOWN, board.RUNNING) or not control.board.alive(line)
    arbiter = control.arbiter
    if arbiter is None:
        return False
    arbiter.poll()
    return rank in arbiter.left_ranks or rank in arbiter.failed_texts
