"""A coordinator in a process without others: it is its own worker, which runs a function as soon as it is told to."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

from mpidist.parameter_server.coordinator.conversation import Conversation, Topic
from mpidist.parameter_server.coordinator.executor import FunctionExecutor


class WorkerHere(Conversation):
    """The talk of the chief with itself as a worker."""

    def __init__(self, client: Any) -> None:
        self._answers: deque[tuple[Any, ...]] = deque()
        self._executor = FunctionExecutor(_ChiefHere(self._answers), client, 0, 1, "this process")

    def say(self, *content: Any) -> None:
        """Have it done, now."""
        if content[0] not in (Topic.CANCEL, Topic.END):
            self._executor.do(*content)

    def hear(self) -> tuple[Any, ...] | None:
        return self._answers.popleft() if self._answers else None

    @property
    def peer_name(self) -> str:
        return "this process"

    @property
    def is_lost(self) -> bool:
        return False


class _ChiefHere(Conversation):
    """The other end: what the worker says is an answer, and there is never more to be heard."""

    def __init__(self, answers: deque[tuple[Any, ...]]) -> None:
        self._answers = answers

    def say(self, *content: Any) -> None:
        self._answers.append(content)

    def hear(self) -> None:
        return None

    def patience(self, what: str) -> NoReturn:
        """Raise: a function that this process knows by name uses something that it does not have, nor anybody else."""
        _, _, why = self._answers.pop()
        raise NameError(f"{why}: not defined")
