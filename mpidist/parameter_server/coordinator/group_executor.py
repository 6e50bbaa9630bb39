"""A worker that is several ranks: all of them run each function, together; the first speaks with the chief for all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from mpidist.collectives.communicator import Communicator
from mpidist.errors import RemoteReplicaError
from mpidist.parameter_server.coordinator.conversation import Conversation
from mpidist.parameter_server.coordinator.executor import FunctionExecutor
from mpidist.parameter_server.coordinator.failures import Failure
from mpidist.parameter_server.coordinator.functions import PROTOCOL
from mpidist.parameter_server.coordinator.packed import packed

#: After so long without work the first rank shows the others that it is there, before they warn that it is not.
_SIGN_SECONDS = 15.0


class GroupExecutor(FunctionExecutor):
    """What the ranks of a worker are from their `ClusterCoordinator` line on.

    What the chief says is passed on to all ranks.  After each function they tell each other how it ended, so that all
    go on, or none.
    """

    def __init__(
        self, chief: Conversation | None, client: Any, index: int, count: int, name: str, communicator: Communicator
    ) -> None:
        super().__init__(chief or _Silence(), client, index, count, name)
        self._own_client = client.first
        self._communicator = communicator
        self._is_first = chief is not None

    def _heard(self, is_idle: bool, seconds: float = _SIGN_SECONDS) -> Any:
        content = None
        while content is None:
            mine = pickle.dumps(super()._heard(is_idle, seconds), PROTOCOL) if self._is_first else b""
            content = pickle.loads(self._communicator.exchange(mine, "work for a worker of several ranks", 0)[0])
        return content

    def _run(self, batch: int, numbers: Sequence[int], payloads: Sequence[Any], results: list[Any]) -> Failure | None:
        for number, payload in zip(numbers, payloads, strict=True):
            result: Any = b""
            failure, is_consequence = None, False
            try:
                fn = self._function(number)
                self._client.begin_function()
                args, kwargs = ((), {}) if payload is None else self._arguments(payload)
                result = packed(fn(*args, **kwargs))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's
                failure = self._failure(error, numbers, len(results))
                is_consequence = isinstance(error, RemoteReplicaError)  # another rank failed, in a collective of both
            failure = self._agreed(failure, is_consequence)
            if failure is not None:
                return failure
            results.append(result)
            self._pushed.append([end.pushed for end in self._servers])
        return None

    def _agreed(self, failure: Failure | None, is_consequence: bool) -> Failure | None:
        """Return the failure of the first rank that has one of its own; the same on all ranks."""
        mine = b"" if failure is None else pickle.dumps((is_consequence, failure), PROTOCOL)
        answers = self._communicator.exchange(mine, "end of a scheduled function")
        found = sorted((pickle.loads(each) for each in answers if each), key=lambda pair: pair[0])
        return found[0][1] if found else None


class _Silence(Conversation):
    """What the other ranks say to the chief: nothing, the first says it."""

    def __init__(self) -> None:
        pass

    def say(self, *content: Any) -> None:
        pass
