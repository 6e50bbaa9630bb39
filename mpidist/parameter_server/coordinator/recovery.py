"""What a chief does when a server is gone: bring its variables back, from a checkpoint, on the servers that are left.

All variables and optimizers go back to the checkpoint, so that they belong together.  Before that, every worker must be
done with what it has begun; what it could not finish runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy

from mpidist.errors import CheckpointError, MpidistError, PeerLostError
from mpidist.parameter_server import registry
from mpidist.parameter_server.client import Client
from mpidist.parameter_server.layout import Key, VariableSpec
from mpidist.transports.lines import Line, Patience

_log = logging.getLogger("mpidist")


class Checkpoints(Protocol):
    """What is needed of a `CheckpointManager`."""

    checkpoint: Any
    directory: Path

    def restore_or_initialize(self) -> Path | None:
        """Restore the newest checkpoint that is whole, and return it; None if there is none."""


class Recovery:
    """The chief's watch over the servers.

    Parameters
    ----------
    client : Client
    lines : mapping of int to Line
        To the servers, by number.
    restores : bool
        Whether the user wants a lost server's variables back; else the job ends.
    quiet_fn : callable
        ``quiet_fn(number)`` tells the workers of the loss, and waits until they have done with what they had begun.
    moved_fn : callable
        ``moved_fn(places)`` tells them the servers of variables, by key.

    Attributes
    ----------
    manager : CheckpointManager or None
        Whose newest checkpoint is restored.
    """

    def __init__(
        self,
        client: Client,
        lines: Mapping[int, Line],
        restores: bool,
        quiet_fn: Callable[[int], None],
        moved_fn: Callable[[dict[Key, int]], None],
    ) -> None:
        self._client = client
        self._lines = dict(lines)
        self._ranks = {line.presence.name_of(line.peer) for line in lines.values()}
        self._restores = restores
        self._quiet = quiet_fn
        self._moved = moved_fn
        self.manager: Checkpoints | None = None

    def takes(self, error: BaseException) -> bool:
        """Return whether a function that failed so has met the end of a server, and is to run again."""
        if not self._restores or not isinstance(error, PeerLostError):
            return False
        return error.rank in self._ranks

    def look(self) -> None:
        """Look whether all servers are there, and do what is to be done if not.

        Raises
        ------
        PeerLostError
            A server is gone, and its variables are not to be restored, or cannot be.
        """
        for number, line in list(self._lines.items()):
            if line.lost:
                del self._lines[number]
                self._recover(number, Patience([line], f"the chief looked for ps {number}").lost(line))

    def _recover(self, number: int, error: MpidistError) -> None:
        if not self._restores:
            raise _ended(error, "start the job again, and restore its newest checkpoint")
        if self.manager is None:
            raise _ended(
                error, "nothing says what to restore: call ClusterCoordinator.restore_from(manager) at the start"
            )
        self._quiet(number)
        lost = [spec for spec in self._client.lose(number) if spec.key[0] < registry.WORDS]  # old words are of no use
        _check_covered(lost, self.manager, error)
        places = self._placed(lost)
        for spec in lost:
            self._client.create(spec, places[spec.key], numpy.zeros(spec.shape, spec.dtype))
        moved(None, places)
        path = self.manager.restore_or_initialize()
        if path is None:
            raise _ended(error, f"there is no checkpoint in {self.manager.directory} to restore its variables from")
        self._client.flush()
        self._moved(places)
        _log.warning("%s; all variables are those of %s, on the servers that are left", error, path)

    def _placed(self, specs: Iterable[VariableSpec]) -> dict[Key, int]:
        """Return a server for each variable: the largest first, each where the fewest bytes are."""
        load = dict.fromkeys(self._lines, 0)
        for key, spec in self._client.known():
            if (server := self._client.server_of(key)) in load:
                load[server] += spec.nbytes
        places: dict[Key, int] = {}
        for spec in sorted(specs, key=lambda spec: -spec.nbytes):
            places[spec.key] = min(load, key=lambda server: load[server])
            load[places[spec.key]] += spec.nbytes
        return places


def moved(client: Client | None, places: Mapping[Key, int]) -> None:
    """Take note that variables are on other servers.

    Parameters
    ----------
    client : Client or None
        None on a rank that does not speak with the servers itself.
    places : mapping of key to int
    """
    specs = {} if client is None else dict(client.known())
    for key, server in places.items():
        if client is not None and key in specs:
            client.create(specs[key], server)
    for variable in registry.installed().variables.values():
        at = zip(variable.specs, variable.servers, strict=True)
        variable.servers = tuple(places.get(spec.key, server) for spec, server in at)


def _check_covered(lost: Iterable[VariableSpec], manager: Checkpoints, error: MpidistError) -> None:
    saved = {variable.number for variable in manager.checkpoint.variables if hasattr(variable, "number")}
    missing = sorted({spec.name for spec in lost if spec.key[0] not in saved})
    if missing:
        raise CheckpointError(
            f"{error}; its variables {', '.join(missing)} are not in the checkpoint that is to restore it"
        )


def _ended(error: MpidistError, what: str) -> PeerLostError:
    return PeerLostError(f"{error}; {what}", getattr(error, "rank", None))
