"""The chief's side: calls that wait, calls that workers have, and what came of them.

Calls go to workers in *batches*, in one message each.  A worker is given the next one a moment before it is expected
to have done the first: two at most.  So a call goes out at once where somebody is idle, and hundreds go together where
calls come quicker than they are run.  Results of a batch come back together.  Nothing here has a thread: any call
of the coordinator moves the connections on.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mpidist.errors import CancelledError, FunctionTimeoutError, MpidistError, PeerLostError
from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.coordinator import failures, functions
from mpidist.parameter_server.coordinator.conversation import Conversation, Topic
from mpidist.parameter_server.coordinator.failures import Failure
from mpidist.parameter_server.coordinator.functions import PROTOCOL, UNKNOWN_SECONDS, Function
from mpidist.parameter_server.coordinator.packed import size_of
from mpidist.parameter_server.coordinator.recovery import Recovery
from mpidist.parameter_server.coordinator.values import PENDING, Failed, RemoteValue
from mpidist.parameter_server.coordinator.worker_end import CallBatch, WorkerEnd
from mpidist.parameter_server.layout import Key
from mpidist.transports.connections.base import Connection
from mpidist.transports.connections.waiting import Patience

T = TypeVar("T")

_log = logging.getLogger("mpidist")

#: What a batch may take.
_BATCH_SECONDS = 8e-3
_MOST_CALLS, _MOST_BYTES = 512, 1 << 20
#: How long the chief sleeps between looks while all workers have more to do than that: at least, and at most.
_NAP_SECONDS, _LONG_NAP_SECONDS = 1e-4, 2e-3
#: How late the chief may hear of a batch, as a share of what the batch takes.
_LATE_SHARE = 1 / 16
#: How much a new measurement of a function's time counts.
_WEIGHT = 0.3
#: How many functions workers keep; those that they have had for longest are forgotten.
_MOST_FUNCTIONS = 1000


class Calls:
    """All calls that were scheduled and are not done."""

    def __init__(
        self, workers: Mapping[int, Conversation], capacity: int, name: str, refresh: Callable[[], object]
    ) -> None:
        self._name = name
        self._refresh = refresh
        #: What watches over the servers, in jobs that may go on without one.
        self.recovery: Recovery | None = None
        self._is_quiet = False  # no calls are given to workers
        self._to_be_quiet: set[WorkerEnd] = set()
        self.worker_ends = [WorkerEnd(index, talk) for index, talk in workers.items()]
        self.waiting: deque[RemoteValue] = deque()
        self.error: BaseException | None = None
        self.done = 0
        #: Whether some worker has room for calls, as far as is known.
        self.hungry = True
        self._capacity = capacity
        self._functions: dict[Any, Function] = {}
        self._numbers = 0
        self._batches = 0
        self._cancelled = -1  # errors of batches up to this one are consequences of no interest

    # -- what the coordinator asks for --------------------------------------------------------------------------------

    def function(self, fn: Any) -> Function:
        """Return what stands for `fn`, a new one if it has not been scheduled before.  Local."""
        try:
            key = fn
            function = self._functions.get(key)
        except TypeError:  # not hashable; it is kept, so that nothing else gets its id
            key = id(fn)
            function = self._functions.get(key)
        if function is None:
            if len(self._functions) >= _MOST_FUNCTIONS:
                self._forget_function(next(iter(self._functions)))
            function = self._functions[key] = Function(fn, self.new_number())
        return function

    def new_number(self) -> int:
        """Return a number for something that chief and workers both name by it."""
        self._numbers += 1
        return self._numbers

    def tell(self, *content: Any) -> None:
        """Say something to all workers."""
        for end in list(self.worker_ends):
            self._say(end, *content)

    def pump(self) -> bool:
        """Take in what workers have answered, and give them work; return whether there was either.  Local."""
        heard = False
        for end in list(self.worker_ends):
            if end.is_gone:  # since this look began
                continue
            content = end.talk.hear()
            if content is None and end.talk.is_lost:
                self._lose(end)
            while content is not None and not end.is_gone:
                heard = True
                self._take(end, *content)
                content = end.talk.hear()
        if heard:
            self._refresh()
        if self.recovery is not None:
            self.recovery.look()
        return (bool(self.waiting) and self.feed()) or heard

    def feed(self) -> bool:
        """Give waiting calls to workers that have room; return whether any was given."""
        if self._is_quiet:
            return False
        now = time.monotonic()
        with_room = [end for end in self.worker_ends if end.has_room(now)]
        with_room.sort(key=lambda end: bool(end.batches))
        before = self._batches
        while self.waiting and with_room:
            for end in with_room:
                if self.waiting and not end.is_gone:
                    self._give(end)
            with_room = [end for end in with_room if end.has_room(now)]
        self.hungry = bool(with_room)
        return self._batches > before

    def make_room(self) -> None:
        """Wait until there are fewer calls waiting than the capacity, or one has failed.  Local."""
        what = "for room in the queue of scheduled functions"
        self._until(lambda: len(self.waiting) < self._capacity or self.error is not None, what)

    def wait_for(self, call: RemoteValue) -> None:
        """Wait until a call is done."""
        self._until(lambda: call._result is not PENDING, f"for the result of {call._function}")

    def wait_for_all(self, timeout: float | None = None) -> None:
        """Wait until no call waits or runs; FunctionTimeoutError when so many seconds have passed."""
        self._until(lambda: not self.waiting and not self.running, "for all scheduled functions", timeout)

    def between_calls(self, restore: Callable[[], T]) -> T:
        """Return what `restore` returns, called when no call waits or runs; workers keep no gradients from before."""
        if not self._is_quiet:  # else servers are being replaced: none is running
            self.wait_for_all()
        found = restore()
        self.tell(Topic.RESTORED)
        return found

    @property
    def running(self) -> int:
        """How many calls workers have."""
        return sum(len(batch.calls) for end in self.worker_ends for batch in end.batches)

    def surface(self) -> None:
        """Raise the first error, if there is one, and forget it."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Wait for what runs, and tell the workers that there is no more to do.  Local."""
        if self.waiting:
            _log.warning("%d functions were never run: call join() before the program ends", len(self.waiting))
        before = self._cancelled
        self._cancel_all("the program of the chief ended")
        self._cancelled = before  # errors of what still runs are of interest
        self._until(lambda: not self.running, "for the functions that still run, at the end of its program")
        if self.error is not None:
            _log.error(
                "a function failed, and nothing has asked since: call join() before the program ends",
                exc_info=self.error,
            )
        self.tell(Topic.END)
        self.worker_ends = []
        if self.recovery is not None:
            self.recovery.end()

    # -- giving -------------------------------------------------------------------------------------------------------

    def _give(self, end: WorkerEnd) -> None:
        """Send a worker its part of the waiting calls, as much as it does in a moment."""
        waiting, seconds, nbytes = self.waiting, 0.0, 0
        calls: list[RemoteValue] = []
        most = min(_MOST_CALLS, -(-len(waiting) // len(self.worker_ends)))
        while len(calls) < most and seconds < _BATCH_SECONDS and nbytes < _MOST_BYTES:
            if calls and waiting[0]._function.seconds >= UNKNOWN_SECONDS:
                break  # results of a batch come together: none is to wait for one that may take long
            call = waiting.popleft()
            calls.append(call)
            seconds += call._function.seconds
            nbytes += size_of(call._payload)
        self._batches += 1
        begin = max(time.monotonic(), end.batches[-1].end if end.batches else 0.0)
        end.batches.append(CallBatch(self._batches, calls, seconds, begin))
        numbers = [call._function.number for call in calls]
        payloads = [call._payload for call in calls]
        if not any(payload is not None for payload in payloads):
            payloads = []
        self._say(end, Topic.CALLS, self._batches, numbers, payloads, self._definitions(end, calls, numbers))

    def _definitions(self, end: WorkerEnd, calls: Sequence[RemoteValue], numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the definitions of the functions that a worker does not know, by number."""
        new = set(numbers) - end.known
        end.known |= new
        return {call._function.number: call._function.definition for call in calls if call._function.number in new}

    def _forget_function(self, key: Any) -> None:
        number = self._functions.pop(key).number
        for end in self.worker_ends:
            if number in end.known:
                end.known.discard(number)
                self._say(end, Topic.FORGET, [number], [])

    # -- taking -------------------------------------------------------------------------------------------------------

    def _take(self, end: WorkerEnd, kind: Topic, *content: Any) -> None:
        if kind == Topic.RESULTS:
            self._results(end, *content)
        elif kind == Topic.UNKNOWN:
            self._define(end, *content)
        elif kind == Topic.QUIET:
            self._to_be_quiet.discard(end)
        else:
            raise AssertionError(f"{end} sent a message of kind {kind} out of turn")

    def _results(
        self, end: WorkerEnd, number: int, seconds: float, results: Sequence[Any], failure: Failure | None
    ) -> None:
        batch = end.batches.popleft()
        assert batch.number == number, (batch.number, number)
        calls = batch.calls
        if end.batches:
            end.batches[0].began = time.monotonic()
            end.batches[0].end = end.batches[0].began + end.batches[0].seconds
        if results:
            _learn(batch, seconds, len(results))
        self.done += len(results) - (failure is not None and failure.place is not None)
        for call, result in zip(calls, results, strict=False):
            call._result = result
            call._payload = None
        if len(results) < len(calls) or failure is not None:
            self._not_run(end, batch, calls[len(results) :], failure)

    def _not_run(self, end: WorkerEnd, batch: CallBatch, calls: Sequence[RemoteValue], failure: Failure | None) -> None:
        """Settle the calls of a batch from the one that failed, or was cancelled, on."""
        if failure is not None:
            failed = calls[0] if failure.place is None else batch.calls[failure.place]
            error = failures.raised(failure, str(end), str(failed._function))
            if self.recovery is not None and self.recovery.takes(error):
                self.waiting.extendleft(reversed(calls))
                return
            calls = [call for call in calls if call is not failed]
            failed._result, failed._payload = Failed(error), None
            if self.error is None and batch.number > self._cancelled:
                self.error = error
                self._cancel_all(f"{failed._function}, scheduled earlier, failed")
        _cancel(calls, "a function that was scheduled earlier failed")

    def _cancel_all(self, why: str) -> None:
        """Cancel what waits, and what workers have and have not begun."""
        _cancel(self.waiting, why)
        self.waiting.clear()
        self._cancelled = self._batches
        for end in self.worker_ends:
            if end.batches:
                self._say(end, Topic.CANCEL, self._cancelled)

    def _define(self, end: WorkerEnd, number: int, why: str) -> None:
        """Send a function by value to a worker that does not have it by name."""
        function = next(function for function in self._all_functions(end) if function.number == number)
        try:
            function.definition = functions.by_value(function.fn)  # for the workers that will ask next
        except (MpidistError, TypeError, ValueError) as error:
            kind = type(error)
            told = kind(f"{end} does not have {function} ({why}). {error}")
            self._say(end, Topic.DEFINE, number, None, pickle.dumps(told, PROTOCOL))
            end.known.discard(number)
            return
        self._say(end, Topic.DEFINE, number, function.definition, None)

    def _all_functions(self, end: WorkerEnd) -> list[Function]:
        of_calls = [call._function for batch in end.batches for call in batch.calls if call._function is not None]
        return [*of_calls, *self._functions.values()]

    # -- servers that are gone ----------------------------------------------------------------------------------------

    def watch_servers(self, client: Client, connections: Mapping[int, Connection], restores: bool) -> None:
        """Watch over the servers from now on; see `Recovery`."""
        self.recovery = Recovery(client, connections, restores, self)

    def be_quiet(self, server: int) -> None:
        """Have the workers finish, as far as they can, what they have; give them nothing more."""
        self._is_quiet = True
        self._to_be_quiet = set(self.worker_ends)
        self.tell(Topic.SERVER_LOST, server)
        self._until(lambda: not self._to_be_quiet & set(self.worker_ends), f"for the workers to do without ps {server}")

    def go_on(self, places: dict[Key, int]) -> None:
        """Tell the workers the servers of variables that were moved, and give them work again."""
        self.tell(Topic.MOVED, places)
        self._is_quiet = False

    # -- workers that are gone ----------------------------------------------------------------------------------------

    def _say(self, end: WorkerEnd, *content: Any) -> None:
        try:
            end.talk.say(*content)
        except PeerLostError:
            if not end.is_gone:
                self._lose(end)

    def _lose(self, end: WorkerEnd) -> None:
        """Take a worker out; what it had to do waits again, before all else, and runs on another."""
        error = end.talk.lost(f"{self._name} schedules functions on {end}")
        if not isinstance(error, PeerLostError):
            raise error
        if len(self.worker_ends) == 1:
            raise PeerLostError(f"{error}; no worker is left", error.rank)
        self.worker_ends.remove(end)
        end.is_gone = True
        calls = [call for batch in end.batches for call in batch.calls if call._result is PENDING]
        end.batches.clear()
        self.waiting.extendleft(reversed(calls))
        _log.warning("%s; %d functions run again elsewhere", error, len(calls))
        self.feed()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], what: str, timeout: float | None = None) -> None:
        patience: Patience | None = None
        end = None if timeout is None else time.monotonic() + timeout
        while not done():
            if self.pump():
                if patience is not None:
                    patience.reset()
                continue
            if end is not None and time.monotonic() >= end:
                raise FunctionTimeoutError(self._what_is_late(f"{self._name} waited {what} for {timeout:g} s"))
            self._warn_of_long_calls(what)
            if patience is None:
                patience = self.worker_ends[0].talk.patience(f"{self._name} waits {what}")
            patience.tick()
            nap = self._nap_seconds()
            if nap >= _NAP_SECONDS:
                time.sleep(nap)  # the workers need the cores more

    def _warn_of_long_calls(self, what: str) -> None:
        """Say which worker runs what for how long: after `warn_seconds`, and again whenever that time has doubled."""
        for end in self.worker_ends:
            if end.batches:
                batch = end.batches[0]
                batch.warn_after = batch.warn_after or end.talk.control.settings.warn_seconds
                if 0 < batch.warn_after < batch.running_seconds:
                    batch.warn_after = 2 * batch.running_seconds
                    end.talk.control.warn(
                        f"{self._name} waits {what}: {end.state}. Look at what it does (py-spy dump); join(timeout=) "
                        "waits no longer than that"
                    )

    def _what_is_late(self, began: str) -> str:
        states = [end.state for end in self.worker_ends if end.batches]
        return (
            f"{began}: {'; '.join(states) or 'no worker runs any'}; {len(self.waiting)} more wait. They go on: call "
            "join again, or look at what that worker does (py-spy dump)"
        )

    def _nap_seconds(self) -> float:
        """Return how long the chief may sleep without anybody waiting for it, as far as is known."""
        busy = [end for end in self.worker_ends if end.batches]
        if not busy:
            return 0.0
        left = min(end.next_look for end in busy) - time.monotonic()
        shortest = min(end.batches[0].seconds for end in busy)
        return min(max(left, shortest * _LATE_SHARE), _LONG_NAP_SECONDS)


def _learn(batch: CallBatch, seconds: float, count: int) -> None:
    """Learn from a batch, of which so many calls were run in so many seconds, how long its functions take."""
    share = seconds / (batch.seconds * count / len(batch.calls))  # of what was believed
    for function in {call._function for call in batch.calls if call._function is not None}:
        weight = 1.0 if function.seconds >= UNKNOWN_SECONDS else _WEIGHT
        function.seconds += weight * (min(function.seconds * share, UNKNOWN_SECONDS / 2) - function.seconds)


def _cancel(calls: Sequence[RemoteValue] | deque[RemoteValue], why: str) -> None:
    for call in calls:
        call._result, call._payload = Failed(CancelledError(f"{call._function} was not run: {why}")), None
