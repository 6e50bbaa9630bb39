"""A worker of the coordinator style: runs what the chief sends, until there is no more."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy

from mpidist.errors import OutOfRangeError, PeerLostError, ServerError
from mpidist.input.dataset import Dataset
from mpidist.parameter_server import registry
from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.coordinator import failures, functions, recovery
from mpidist.parameter_server.coordinator.conversation import Conversation, Topic
from mpidist.parameter_server.coordinator.failures import Failure
from mpidist.parameter_server.coordinator.functions import NotHere
from mpidist.parameter_server.coordinator.packed import packed, unpacked
from mpidist.parameter_server.coordinator.values import Failed, on_worker

#: Results of these types never change, and are sent all together; others are pickled before the next call begins.
_PLAIN = frozenset(
    [type(None), bool, int, float, complex, str, numpy.bool_, numpy.int32, numpy.int64, numpy.float32, numpy.float64]
)
_NO_KWARGS: dict[str, Any] = {}
#: How often a worker that is busy looks whether its calls have been cancelled.
_LOOK_SECONDS = 1e-3


class FunctionExecutor:
    """What a worker rank is from its `ClusterCoordinator` line on."""

    def __init__(self, chief: Conversation, client: Any, index: int, count: int, name: str) -> None:
        self._chief = chief
        self._client = client
        #: What speaks with the servers, if this rank does.
        self._own_client: Client | None = client
        self._place = index, count
        self._name = name
        self._definitions: dict[int, bytes] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._made: dict[int, Any] = {}
        self._waiting: list[tuple[Any, ...]] = []  # heard while a definition was waited for
        self._cancelled = -1
        #: For each call of the present batch, the pushes to each server when it had returned.
        self._pushed: list[list[int]] = []

    def serve(self) -> None:
        """Run functions until the chief has no more.  Local."""
        while (content := self._next())[0] != Topic.END:
            self.do(*content)

    def do(self, kind: Topic, *content: Any) -> None:
        """Do one thing that the chief has said."""
        on_worker.index, on_worker.count = self._place
        on_worker.made = self._made_here
        try:
            self._do(kind, *content)
        finally:
            on_worker.index = None

    # -- listening ----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[Any, ...]:
        return self._waiting.pop(0) if self._waiting else self._heard(is_idle=True)

    def _heard(self, is_idle: bool, seconds: float = math.inf) -> Any:
        """Return what the chief says next, waiting for it as long as it takes; None after so many seconds."""
        content = self._chief.hear()
        if content is None:
            if is_idle:
                self._client.idle()
            end = time.monotonic() + seconds
            patience = self._chief.patience(f"{self._name} waits for the chief to schedule a function")
            while (content := self._chief.hear()) is None and time.monotonic() < end:
                patience.tick()
                if self._chief.is_lost:
                    raise self._chief.lost(patience.what)
        return content

    def _do(self, kind: Topic, *content: Any) -> None:
        if kind == Topic.CALLS:
            self._calls(*content)
        elif kind == Topic.CANCEL:
            (self._cancelled,) = content
        elif kind == Topic.DATASET:
            self._make_dataset(*content)
        elif kind == Topic.ITERATOR:
            number, dataset = content
            self._make(number, lambda: _WorkerIterator(iter(self._made_here(dataset))), "the iterator of a data set")
        elif kind == Topic.FORGET:
            self._forget(*content)
        elif kind == Topic.SERVER_LOST:
            self._lose_server(*content)
        elif kind == Topic.RESTORED:
            self._forget_gradients()
        elif kind == Topic.MOVED:
            recovery.moved(self._own_client, *content)
        else:
            raise AssertionError(f"{self._name} got a message of kind {kind} out of turn")

    def _lose_server(self, number: int) -> None:
        client = self._own_client
        if client is not None:
            client.lose(number)
            with suppress(PeerLostError, ServerError, ValueError):  # of a push whose function has failed already
                client.flush()
        for sums in registry.served_sums():  # which are restored, or begin anew
            sums.forget()
        self._forget_gradients()
        self._chief.say(Topic.QUIET, number)

    def _forget_gradients(self) -> None:
        """Keep nothing of gradients that are not applied: variables go back to a checkpoint."""
        for optimizer in registry.installed().optimizers.values():
            optimizer.forget_micro_batches()
        if self._own_client is not None:
            self._own_client.plans.residues.drop()

    # -- running functions --------------------------------------------------------------------------------------------

    def _calls(self, batch: int, numbers: Sequence[int], payloads: Sequence[Any], new: dict[int, bytes]) -> None:
        self._definitions.update(new)
        began = time.perf_counter()
        results: list[Any] = []
        self._pushed = []
        failure = self._run(batch, numbers, payloads or [None] * len(numbers), results)
        try:
            for sums in registry.served_sums():
                sums.add()
            self._client.flush()
        except Exception as error:  # noqa: BLE001 - whatever a server says of what a function has pushed
            if results:
                failure = self._failure_at_the_end(error, numbers, results, failure)
        self._chief.say(Topic.RESULTS, batch, time.perf_counter() - began, results, failure)

    def _run(self, batch: int, numbers: Sequence[int], payloads: Sequence[Any], results: list[Any]) -> Failure | None:
        """Run the calls of a batch and add what they return to `results`, up to the first that raises."""
        begin, known, looked = self._client.begin_function, self._functions, time.monotonic()
        servers, pushed = self._servers, self._pushed
        try:
            for number, payload in zip(numbers, payloads, strict=True):
                fn = known.get(number) or self._function(number)
                begin()
                if payload is None:
                    result = fn()
                else:
                    args, kwargs = self._arguments(payload)
                    result = fn(*args, **kwargs)
                results.append(result if type(result) in _PLAIN else packed(result))
                pushed.append([end.pushed for end in servers])
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    if self._is_cancelled(batch):
                        return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's
            return self._failure(error, numbers, len(results))
        return None

    def _failure(self, error: BaseException, numbers: Sequence[int], done: int) -> Failure:
        """Return what to say of an error that a call met when so many before it were done."""
        place = failures.place_of_push(error, self._servers, self._pushed)
        if place is None or place == done:
            return failures.described(error, self._function_name(numbers[min(done, len(numbers) - 1)]))
        return failures.described_of_push(error, self._function_name(numbers[place]), place)

    def _failure_at_the_end(
        self, error: Exception, numbers: Sequence[int], results: list[Any], later: Failure | None
    ) -> Failure | None:
        """Return what to say of an error of the servers after a batch, in which a call may have failed, too."""
        place = failures.place_of_push(error, self._servers, self._pushed)
        if place is not None and place < len(results):
            failure = failures.described_of_push(error, self._function_name(numbers[place]), place)
            name = self._function_name(numbers[min(len(results), len(numbers) - 1)])
            return failure if later is None else failures.followed(failure, later, name)
        if later is None:
            results.pop()  # some call has to be the one that failed
            later = failures.described(error, self._function_name(numbers[len(results)]))
        return later

    @property
    def _servers(self) -> Sequence[ServerEnd]:
        return () if self._own_client is None else self._own_client.servers

    def _arguments(self, payload: Any) -> tuple[Any, Any]:
        if type(payload) is int:  # the usual argument, an iterator
            return (self._made_here(payload),), _NO_KWARGS
        return unpacked(payload)

    def _is_cancelled(self, batch: int) -> bool:
        while (content := self._chief.hear()) is not None:
            if content[0] == Topic.CANCEL:
                (_, self._cancelled) = content
            else:
                self._waiting.append(content)
        return batch <= self._cancelled

    # -- functions ----------------------------------------------------------------------------------------------------

    def _function(self, number: int) -> Any:
        """Return the function, or whatever was sent like one, of a number."""
        made = self._functions.get(number)
        if made is None:
            try:
                made = functions.found(self._definitions[number])
            except NotHere as why:
                made = functions.found(self._asked_for(number, str(why)))
            self._functions[number] = made
            del self._definitions[number]
        return made

    def _function_name(self, number: int) -> str:
        return functions.name_of(self._functions[number]) if number in self._functions else "a function"

    def _asked_for(self, number: int, why: str) -> bytes:
        """Return the definition by value of what this worker does not have."""
        self._chief.say(Topic.UNKNOWN, number, why)
        while (content := self._heard(is_idle=False))[0] != Topic.DEFINE:
            self._waiting.append(content)
        _, _, definition, failure = content
        if definition is None:
            raise pickle.loads(failure)
        return definition

    def _forget(self, numbers: Sequence[int], made: Sequence[int]) -> None:
        for number in numbers:
            self._functions.pop(number, None)
            self._definitions.pop(number, None)
        for number in made:
            self._made.pop(number, None)

    # -- data sets ----------------------------------------------------------------------------------------------------

    def _make_dataset(self, number: int, definition_number: int, definition: bytes) -> None:
        self._definitions[definition_number] = definition
        self._make(number, lambda: _dataset_of(self._function(definition_number)), "the data set of a worker")

    def _make(self, number: int, make: Callable[[], Any], what: str) -> None:
        """Keep what `make` returns, or the error that it raises, which who asks for it will get."""
        try:
            self._made[number] = make()
        except Exception as error:  # noqa: BLE001 - it is the user's function that makes it
            error.__notes__ = [*getattr(error, "__notes__", ()), f"in making {what}"]
            self._made[number] = Failed(error)

    def _made_here(self, number: int) -> Any:
        made = self._made[number]
        if type(made) is Failed:
            raise made.error
        return made


class _WorkerIterator:
    """The iterator that scheduled functions get; `get_next` as TensorFlow's."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._next = iterator.__next__

    def __iter__(self) -> _WorkerIterator:
        return self

    def __next__(self) -> Any:
        return self._next()

    def get_next(self) -> Any:
        try:
            return self._next()
        except StopIteration:
            raise OutOfRangeError("the data set of this worker has no more elements") from None


def _dataset_of(given: Any) -> Any:
    return given() if callable(given) and not isinstance(given, Dataset) else given
