"""`Report`: a page about the training, from what every rank notes while it lasts."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

from mpidist.errors import listed
from mpidist.reporting import facts, notes, page
from mpidist.strategies import workers
from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.given_path import given_path
from mpidist.world import world_communicator

#: Within an epoch, a line of notes is written after so many seconds.
_EVERY_SECONDS = 5.0

#: Longer traces are not read at the end of a training: the other ranks would wait for it.
_MOST_TRACE_BYTES = 1 << 26


class Report(Callback):
    """Write ``report.html`` about the training: one file, which opens without a network.

    Every rank writes notes to `folder` while it trains; the chief makes the page at the end.  ``mpidist report FOLDER``
    makes it anew, also of a training that was killed.  With ``MPIDIST_TRACE=FOLDER`` the page also says where the time
    of each rank went.  A training that goes on from a checkpoint goes on in its notes.

    Besides `fit`, a loop of one's own may use it: `begin`, `note` after every epoch, `end`.

    Parameters
    ----------
    folder : str or Path
        One that all ranks can write to; made if it is not there.

    Raises
    ------
    ValueError
        `folder` is empty.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = given_path(folder, "folder")
        self._notes: notes.RunNotes | None = None
        self._has_begun = False

    # -- in `fit` -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin the notes.  Collective."""
        self._rows_before = self.trainer.rows_trained
        self._noted = 0.0
        self.begin(self.trainer.strategy, self.trainer.variables)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        assert self._notes is not None
        if self._notes.seconds - self._noted >= _EVERY_SECONDS:
            self._note(self.trainer.epoch, {f"{name} so far": value for name, value in (logs or {}).items()})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._note(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End the notes; the chief makes the page.  Collective."""
        self.end()

    def _note(self, epoch: int, logs: Logs | None) -> None:
        assert self._notes is not None
        self._noted = self._notes.seconds
        self.note(epoch, self.trainer.steps_made, self.trainer.rows_trained - self._rows_before, logs)

    # -- in a loop of one's own ---------------------------------------------------------------------------------------

    def begin(self, strategy: Any, variables: Iterable[Any] = ()) -> None:
        """Begin the notes, before a checkpoint is restored.

        Collective: every rank calls it in the same order.  With parameter servers local.

        Parameters
        ----------
        strategy : Strategy
        variables : iterable of variables
            What is trained: the page says how its gradients are reduced, and why so.

        Raises
        ------
        OSError
            On all ranks: a rank cannot write to the folder; names it.
        """
        communicator = world_communicator()
        self._strategy, self._variables, self._communicator = strategy, list(variables), communicator
        self._is_together = strategy.extended.spans_ranks and not workers.of_job().train_apart
        run = self._each(uuid.uuid4().hex)[0] if self._is_together else ""
        about, problem = facts.about(strategy, communicator, run) | {"goes_on": self._has_begun}, ""
        try:
            self._notes = notes.RunNotes(self.folder, communicator, about)
        except OSError as error:
            problem = f"rank {communicator.rank} on {about['host']}: {error}"
        if problems := list(filter(None, self._each(problem))):
            raise OSError(f"no report can be written to {self.folder}: {listed(problems, '; ')}")
        assert self._notes is not None
        self._has_begun, self._has_chosen = True, False
        notes.under_way[communicator] = self._notes

    def note(self, epoch: int, step: int, rows: int | None = None, logs: Logs | None = None) -> None:
        """Note how far the training is.  Local.

        Parameters
        ----------
        epoch, step : int
            The epoch, from 0, and how many steps have been made, before a restart too.
        rows : int, optional
            How many rows this rank has trained on since `begin`.
        logs : dict, optional
            Numbers of the training, alike on all ranks.
        """
        assert self._notes is not None, "begin comes first"
        if not self._has_chosen:
            self._notes.add("chosen", facts=facts.chosen(self._strategy, self._communicator, self._variables))
            self._has_chosen = True
        numbers = {
            name: float(value)
            for name, value in (logs or {}).items()
            if isinstance(value, Real) or getattr(value, "shape", None) == ()
        }
        memory = notes.memory_peak()
        self._notes.add("progress", epoch=epoch, step=step, rows=rows, memory=memory, logs=numbers)

    def end(self) -> Path:
        """End the notes, and return the path of the page, which the chief makes.

        Collective: every rank calls it in the same order.  With parameter servers local; the page then has what the
        other ranks had noted when the chief was ready.
        """
        assert self._notes is not None, "begin comes first"
        self._notes.add("end", memory=notes.memory_peak())
        notes.under_way.pop(self._communicator, None)
        self._notes.close()
        self._notes = None
        if self._communicator.observer.trace is not None:
            self._communicator.observer.trace.flush()
        self._each("")  # all have written
        path = self.folder / page.NAME
        if self._strategy.extended.is_chief:
            try:
                page.write(self.folder, most_bytes=_MOST_TRACE_BYTES)
            except Exception as error:  # what was trained counts for more than a page about it
                told = f"{type(error).__name__}: {error}"
                self._communicator.control.warn(f"there is no report; `mpidist report {self.folder}` makes it: {told}")
        return path

    def _each(self, text: str) -> list[str]:
        """Return what each rank said; of this rank only, where the others train by themselves."""
        if not self._is_together:
            return [text]
        return [each.decode() for each in self._communicator.exchange(text.encode(), "report of a training")]
