"""What a chief does when a server is gone: bring its variables back, from a checkpoint, on the servers that are left.

All variables and optimizers go back to the checkpoint, so that they belong together.  Before that, every worker must be
done with what it has begun; what it could not finish runs again.  Whatever the chief itself does with variables is
begun again, too, be it a read, a push, or a save: see `Client.undivided`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy

from mpidist.errors import CheckpointError, MpidistError, PeerLostError
from mpidist.parameter_server import registry
from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.layout import Key, VariableSpec
from mpidist.transports.connections.base import Connection
from mpidist.transports.connections.waiting import Patience

if TYPE_CHECKING:
    from mpidist.parameter_server.coordinator.calls import Calls
    from mpidist.training.checkpoint_manager import CheckpointManager
    from mpidist.training.metrics import Metric

_log = logging.getLogger("mpidist")

T = TypeVar("T")


@dataclass(frozen=True)
class Restore:
    """What a chief has restored after servers had died.

    Attributes
    ----------
    servers : tuple of int
        The servers that were gone.
    checkpoint : Path
        What everything was restored from.
    undone : int
        Functions whose results the chief had by then, and whose changes of variables and metrics are undone, since they
        finished after the checkpoint was saved.  All of this job's, if another job has saved it.
    begun_anew : tuple of str
        The metrics that are 0 again, since they are not in the checkpoint: functions that are undone, or run again,
        would count twice.
    """

    servers: tuple[int, ...]
    checkpoint: Path
    undone: int
    begun_anew: tuple[str, ...]


class Recovery:
    """The chief's watch over the servers."""

    def __init__(self, client: Client, connections: Mapping[int, Connection], restores: bool, workers: Calls) -> None:
        self._client = client
        self._connections = dict(connections)
        self._ranks = {connection.presence.name_of(connection.peer) for connection in connections.values()}
        self._restores = restores
        self._workers = workers
        self._is_busy = False
        #: By checkpoint, how many functions had finished when it was saved.
        self._done_at: dict[Path, int] = {}
        self.manager: CheckpointManager | None = None
        self.on_restore: Callable[[Restore], object] | None = None
        self.restores: list[Restore] = []
        client.guard = self._guarded
        registry.installed().on_save = self._saved

    def takes(self, error: BaseException) -> bool:
        """Return whether a function that failed so has met the end of a server, and is to run again."""
        return self._restores and self._is_of_server(error)

    def look(self) -> None:
        """Look whether all servers are there, and do what is to be done if not."""
        if self._is_busy or not any(connection.lost for connection in self._connections.values()):
            return
        self._is_busy = True
        try:
            restore = self._replace()
        finally:
            self._is_busy = False
        self.restores.append(restore)
        if self.on_restore is not None:
            self.on_restore(restore)

    def end(self) -> None:
        """Replace no server any more."""
        self._is_busy = True

    def _is_of_server(self, error: BaseException) -> bool:
        return isinstance(error, PeerLostError) and error.rank in self._ranks

    def _guarded(self, ask: Callable[[], T]) -> T:
        """Return what the client's servers answer, asked again when one of them has been replaced."""
        while True:
            known = len(self._connections)
            try:
                return ask()
            except PeerLostError as error:
                if self._is_busy or not self._is_of_server(error):
                    raise
                self.look()
                if len(self._connections) == known:  # it was not this
                    raise

    def _saved(self, path: Path) -> None:
        self._done_at = {each: done for each, done in self._done_at.items() if each.exists()}
        self._done_at[path.resolve()] = self._workers.done

    # -- replacing ----------------------------------------------------------------------------------------------------

    def _replace(self) -> Restore:
        """Do without the servers that are gone, and without those that go meanwhile."""
        gone: dict[int, MpidistError] = {}
        places: dict[Key, int] = {}
        while True:
            errors = self._lost()
            gone.update(errors)
            try:
                path, begun_anew = self._restore(errors, places)
                break
            except PeerLostError as error:
                if not self._is_of_server(error) or not any(
                    connection.lost for connection in self._connections.values()
                ):
                    raise
        self._workers.go_on(places)
        undone = self._workers.done - self._done_at.get(path.resolve(), 0)
        text = "; ".join(map(str, gone.values()))
        _log.warning(
            "%s; all variables are those of %s, on the servers that are left; %d functions that had finished since are "
            "undone%s",
            text,
            path,
            undone,
            f"; metrics {', '.join(begun_anew)} are not in it, and begin anew" if begun_anew else "",
        )
        return Restore(tuple(gone), path, undone, begun_anew)

    def _lost(self) -> dict[int, MpidistError]:
        """Return the servers that are gone since the last time, each with its error."""
        gone = [number for number, connection in self._connections.items() if connection.lost]
        errors = {}
        for number in gone:
            connection = self._connections.pop(number)
            errors[number] = Patience([connection], f"the chief looked for ps {number}").lost(connection)
        return errors

    def _restore(self, gone: Mapping[int, MpidistError], places: dict[Key, int]) -> tuple[Path, tuple[str, ...]]:
        """Bring back what is on no server any more, and note where; return the checkpoint, and metrics not in it."""
        error = next(iter(gone.values()))
        if not self._restores:
            raise _ended(error, "start the job again, and restore its newest checkpoint")
        if self.manager is None:
            raise _ended(
                error, "nothing says what to restore: call ClusterCoordinator.restore_from(manager) at the start"
            )
        for number in gone:
            self._workers.be_quiet(number)
            self._client.lose(number)
        homeless = [key for key in self._client.specs if self._client.server_of(key) not in self._connections]
        lost = [self._client.specs[key] for key in homeless if key[0] < registry.WORDS]  # old words are of no use
        anew = _check_covered(lost, self.manager, error)
        self._require_optimizers(self.manager, error)
        places.update(self._placed(lost))
        for spec in lost:
            self._client.create(spec, places[spec.key], numpy.zeros(spec.shape, spec.dtype))
        moved(None, places)
        path = self.manager.restore_or_initialize()
        if path is None:
            raise _ended(error, f"there is no checkpoint in {self.manager.directory} to restore its variables from")
        for metric in anew:
            metric.reset_state()
        self._client.flush()
        return path, tuple(sorted(metric.name for metric in anew))

    def _require_optimizers(self, manager: CheckpointManager, error: MpidistError) -> None:
        """Raise CheckpointError if optimizers with slots or a schedule would not go back with their variables."""
        parts = set(map(id, manager.checkpoint.parts.values()))
        for number, optimizer in registry.installed().optimizers.items():
            if (optimizer.slot_names or optimizer.has_schedule) and id(optimizer) not in parts:
                with suppress(KeyError):  # servers that have not met it have nothing of it
                    if steps := self._client.iterations(number):
                        raise CheckpointError(
                            f"{error}; {type(optimizer).__name__}, which has made {steps} steps, is not in the "
                            "checkpoint that is to restore it: give it to Checkpoint(..., optimizer=optimizer)"
                        )

    def _placed(self, specs: Iterable[VariableSpec]) -> dict[Key, int]:
        """Return a server for each variable: the largest first, each where the fewest bytes are."""
        load = dict.fromkeys(self._connections, 0)
        for key, spec in self._client.specs.items():
            if (server := self._client.server_of(key)) in load:
                load[server] += spec.nbytes
        places: dict[Key, int] = {}
        for spec in sorted(specs, key=lambda spec: -spec.nbytes):
            places[spec.key] = min(load, key=lambda server: load[server])
            load[places[spec.key]] += spec.nbytes
        return places


def moved(client: Client | None, places: Mapping[Key, int]) -> None:
    """Take note that variables are on other servers."""
    specs = {} if client is None else client.specs
    for key, server in places.items():
        if client is not None and key in specs:
            client.create(specs[key], server)
    for variable in registry.installed().variables.values():
        at = zip(variable.specs, variable.servers, strict=True)
        variable.servers = tuple(places.get(spec.key, server) for spec, server in at)


def _check_covered(lost: Iterable[VariableSpec], manager: CheckpointManager, error: MpidistError) -> list[Metric]:
    """Return the metrics that are in no checkpoint; CheckpointError if variables are lost that are in none."""
    parts = list(manager.checkpoint.parts.values())
    metrics = {sums.variable.number: sums.metric for sums in registry.served_sums() if sums.is_made}
    saved = {part.number for part in parts if hasattr(part, "number")} | set(metrics)
    missing = sorted({spec.name for spec in lost if spec.key[0] not in saved})
    if missing:
        raise CheckpointError(
            f"{error}; its variables {', '.join(missing)} are not in the checkpoint that is to restore it"
        )
    return [metric for metric in metrics.values() if all(metric is not part for part in parts)]


def _ended(error: MpidistError, what: str) -> PeerLostError:
    return PeerLostError(f"{error}; {what}", getattr(error, "rank", None))
