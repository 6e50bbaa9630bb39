"""`ClusterCoordinator`: calls from a chief to workers, in worlds of threads."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import mpidist
from mpidist.cluster.server_roles import Roles, alone
from mpidist.cluster.spec import Task
from mpidist.errors import FunctionTimeoutError, OutOfRangeError, RemoteFunctionError, ServerError
from mpidist.input.dataset import Dataset
from mpidist.optimizers import SGD
from mpidist.parameter_server.coordinator import failures, functions
from mpidist.parameter_server.coordinator.conversation import Topic
from mpidist.parameter_server.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.coordinator.executor import FunctionExecutor
from mpidist.parameter_server.coordinator.values import (
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from mpidist.runtime.control import ControlChannel
from mpidist.testing import run_ranks
from mpidist.transports import world
from mpidist.transports.connections.open import open_connections
from tests.unit.parameter_server.jobs import one_worker


class Client:
    """Of no servers: counts what an executor asks of it."""

    servers = ()

    def __init__(self) -> None:
        self.refreshed = self.flushed = self.idled = 0

    def refresh(self) -> None:
        self.refreshed += 1

    begin_function = refresh

    def flush(self) -> None:
        self.flushed += 1

    def idle(self) -> None:
        self.idled += 1

    def stand_aside(self) -> None:
        self.stands_aside = True


def strategy_of(workers: int) -> Any:
    """Return what a coordinator needs of a strategy with a chief and workers, and no servers.  Collective."""
    rank = world().transport.rank
    # the server is no rank of this world: there are no variables
    tasks = (Task("chief", 0), *(Task("worker", index) for index in range(workers)), Task("ps", 0))
    peers = range(1, workers + 1) if rank == 0 else [0]
    return SimpleNamespace(
        _cluster_coordinator=None,
        _roles=Roles(tasks, tuple((each,) for each in range(workers + 1)), "test"),
        _rank=rank,
        _whole=world(),
        _connections=open_connections(world(), peers),
        _client=Client(),
        _is_coordinated=lambda: None,
        scope=nullcontext,
    )


def coordinated(program: Callable[[ClusterCoordinator], Any], workers: int = 2) -> Any:
    """Return what `program` returns on the chief of so many workers."""

    def rank() -> Any:
        coordinator = ClusterCoordinator(strategy_of(workers))
        try:
            return program(coordinator)
        finally:
            coordinator._end()

    return run_ranks(workers + 1, rank, timeout_seconds=30)[0]


def double(x: Any) -> Any:
    return 2 * x


def fail(text: str) -> None:
    raise ValueError(text)


def index() -> int:
    return experimental_get_current_worker_index()


def nothing() -> None:
    return None


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1500])
def test_every_call_gives_its_own_result(workers, count):
    def program(coordinator: ClusterCoordinator) -> list[int]:
        values = [coordinator.schedule(double, args=(number,)) for number in range(count)]
        coordinator.join()
        assert coordinator.done()
        return coordinator.fetch(values)

    assert coordinated(program, workers) == [2 * number for number in range(count)]


def test_arrays_and_structures_come_back_as_they_are():
    def program(coordinator: ClusterCoordinator) -> Any:
        x = numpy.arange(100_000, dtype="float32")
        value = coordinator.schedule(double, args=(x,))
        x[:] = 0  # the call has its own
        other = coordinator.schedule(dict, kwargs={"a": (1, [2.5, None])})
        return coordinator.fetch({"x": value, "other": (other, "plain")})

    found = coordinated(program)
    numpy.testing.assert_array_equal(found["x"], numpy.arange(100_000, dtype="float32") * 2)
    assert found["other"] == ({"a": (1, [2.5, None])}, "plain")


def test_results_that_are_bytes_can_be_fetched_again():
    def program(coordinator: ClusterCoordinator) -> Any:
        value = coordinator.schedule(bytes, args=(b"\x80\x05",))
        return value.fetch(), value.get()

    assert coordinated(program) == (b"\x80\x05", b"\x80\x05")


def test_a_closure_is_carried_with_what_it_refers_to():
    def program(coordinator: ClusterCoordinator) -> Any:
        offset = 3
        return coordinator.schedule(lambda x: x + offset, args=(4,)).fetch()

    assert coordinated(program) == 7


def test_the_coordinator_of_a_strategy_is_made_once():
    def program(coordinator: ClusterCoordinator) -> bool:
        return ClusterCoordinator(coordinator.strategy) is coordinator

    assert coordinated(program)


def test_all_workers_run_functions():
    def program(coordinator: ClusterCoordinator) -> set[int]:
        values = [coordinator.schedule(index) for _ in range(300)]
        return set(coordinator.fetch(values))

    assert coordinated(program, 3) == {0, 1, 2}


def test_a_worker_that_is_busy_does_not_keep_others_from_working():
    """While worker A waits in a function, all other calls run on B."""
    go = threading.Event()

    def program(coordinator: ClusterCoordinator) -> list[int]:
        try:
            slow = coordinator.schedule(_wait_for, args=(_Ticket(go),))
            values = [coordinator.schedule(double, args=(number,)) for number in range(100)]
            done = coordinator.fetch(values)
        finally:
            go.set()
        assert slow.fetch()
        return done

    assert coordinated(program) == [2 * number for number in range(100)]


_EVENTS: dict[int, threading.Event] = {}


class _Ticket:
    """Names an event of this process, for a function on another thread of it."""

    def __init__(self, event: threading.Event) -> None:
        self.number = id(event)
        _EVENTS[self.number] = event


def _wait_for(ticket: _Ticket) -> bool:
    return _EVENTS[ticket.number].wait(20)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_the_first_error_is_raised_once_with_the_traceback_of_the_worker():
    def program(coordinator: ClusterCoordinator) -> BaseException:
        value = coordinator.schedule(fail, args=("no such row",))
        with pytest.raises(ValueError, match="no such row") as caught:
            coordinator.join()
        coordinator.join()  # it has been raised
        assert coordinator.done()
        with pytest.raises(ValueError, match="no such row"):
            value.fetch()
        assert coordinator.schedule(double, args=(4,)).fetch() == 8
        return caught.value

    cause = coordinated(program).__cause__
    assert isinstance(cause, RemoteFunctionError)
    text = str(cause)
    assert text.startswith("worker ") and "(rank " in text and " ran fail, which raised" in text
    assert "Traceback" in text and "in fail" in text and "raise ValueError(text)" in text


class Recorder:
    """A chief that keeps what a worker says."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def say(self, kind: Topic, *content: Any) -> None:
        self.said.append((kind, *content))

    def hear(self) -> None:
        return None


class Refuses(SGD):
    """Cannot apply gradients that begin with 13."""

    def renew_slice(self, new, parameters, gradient, *others):
        if gradient[0] == 13:
            raise ArithmeticError("no 13 here")
        super().renew_slice(new, parameters, gradient, *others)


@pytest.mark.parametrize(
    ("calls", "outcome"),
    [
        ("good bad good good", ([0, 1, 2, 3], 1, "ran bad, which raised")),
        ("good good", ([0, 1], None, "")),
        ("bad reads good", ([0], 0, "ran bad, which raised")),
        ("good bad fails", ([0, 1], 1, "After that, .*fails raised.*ValueError: of its own")),
        ("bad_and_reads good", ([], None, "ran bad_and_reads, which raised.*in bad_and_reads")),
    ],
)
def test_the_call_is_blamed_that_pushed_what_could_not_be_applied(calls, outcome):
    def on_worker(strategy: Any) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros(3)) for _ in range(2)]
            optimizer = Refuses(1.0)

        def good(n: int, value: float = 1.0) -> int:
            optimizer.apply_gradients([(numpy.ones(3), variables[0])])
            optimizer.apply_gradients([(numpy.full(3, value), variables[1])])
            return n

        def bad(n: int) -> int:
            return good(n, 13.0)

        def bad_and_reads(n: int) -> int:
            return reads(good(n, 13.0))

        def reads(n: int) -> int:
            return n + int(variables[1].value[0])

        def fails(n: int) -> int:
            raise ValueError("of its own")

        known = [good, bad, bad_and_reads, reads, fails]
        numbers = [[each.__name__ for each in known].index(name) for name in calls.split()]
        arguments = [pickle.dumps(((n,), {})) for n in range(len(numbers))]
        chief = Recorder()
        worker = FunctionExecutor(chief, strategy._client, 0, 1, "worker 0")
        worker.do(Topic.CALLS, 5, numbers, arguments, {n: functions.by_value(each) for n, each in enumerate(known)})
        ((kind, batch, _, results, failure),) = chief.said
        expected, place, text = outcome
        assert (kind, batch, results) == (Topic.RESULTS, 5, expected), failure
        if text:
            name = calls.split()[len(results) if place is None else place]
            error = failures.raised(failure, "worker 0", name)
            assert (type(error), failure.place) == (ServerError, place)
            assert re.search("ps 1 .*push .: ArithmeticError: no 13 here", str(error))
            assert re.search(text, str(error.__cause__), re.DOTALL), str(error.__cause__)
        else:
            assert failure is None

    one_worker(on_worker, 2)


def test_a_function_that_does_not_end_is_named(monkeypatch):
    go, said = threading.Event(), []

    def warn(control: Any, text: str) -> None:
        said.append(text)
        if len(said) == 2:
            go.set()

    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "0.01")
    monkeypatch.setattr(ControlChannel, "warn", warn)

    def program(coordinator: ClusterCoordinator) -> None:
        coordinator.schedule(_wait_for, args=(_Ticket(go),))
        coordinator.join()

    coordinated(program, workers=1)
    assert len(said) >= 2  # a third may come before the function has ended
    for text in said:
        named = r"rank 0 \(chief\) waits for all scheduled functions: worker 0 \(rank 1\) has been running _wait_for"
        assert re.match(named + r" for \d+\.\d s\. Look at what it does", text), text


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_join_may_have_an_end(timeout):
    go = threading.Event()

    def program(coordinator: ClusterCoordinator) -> list[int]:
        values = [coordinator.schedule(_wait_for, args=(_Ticket(go),))]
        coordinator.schedule(nothing)
        with pytest.raises(FunctionTimeoutError) as caught:
            coordinator.join(timeout=timeout)
        named = r"worker 0 \(rank 1\) has been running _wait_for for \d+\.\d s; \d more wait"
        assert re.search(named, str(caught.value)), caught.value
        assert f"for {timeout:g} s" in str(caught.value) and isinstance(caught.value, TimeoutError)
        go.set()
        coordinator.join(timeout=30)
        return coordinator.fetch(values)

    assert coordinated(program, workers=1) == [True]


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_is_0_or_more(timeout):
    def program(coordinator: ClusterCoordinator) -> None:
        coordinator.join(timeout=0)  # nothing is scheduled
        with pytest.raises(ValueError, match="must be 0 or more seconds"):
            coordinator.join(timeout=timeout)

    coordinated(program, workers=1)


def test_what_waits_is_cancelled_by_an_error():
    go = threading.Event()

    def program(coordinator: ClusterCoordinator) -> list[str]:
        values = [coordinator.schedule(nothing), coordinator.schedule(_fail_after, args=(_Ticket(go),))]
        values += [coordinator.schedule(nothing) for _ in range(500)]
        go.set()
        with pytest.raises(ValueError, match="boom"):
            coordinator.join()
        return [_outcome(value) for value in values]

    assert coordinated(program, 1) == ["ok", "ValueError", *["CancelledError"] * 500]


def _fail_after(ticket: _Ticket) -> None:
    _wait_for(ticket)
    raise ValueError("boom")


def _outcome(value: Any) -> str:
    try:
        value.fetch()
    except Exception as error:
        return type(error).__name__
    return "ok"


@pytest.mark.parametrize("how", ["schedule", "join", "done"])
def test_an_error_is_raised_by_whatever_comes_next(how):
    def program(coordinator: ClusterCoordinator) -> None:
        value = coordinator.schedule(fail, args=("boom",))
        assert _outcome(value) == "ValueError"
        call = {"schedule": lambda: coordinator.schedule(nothing), "join": coordinator.join, "done": coordinator.done}
        with pytest.raises(ValueError, match="boom"):
            call[how]()
        call[how]()

    coordinated(program)


class Stubborn(Exception):
    """Cannot be made again from its message."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_stubbornly() -> None:
    raise Stubborn(1, 2)


def test_an_error_that_cannot_be_pickled_is_told():
    def program(coordinator: ClusterCoordinator) -> None:
        coordinator.schedule(fail_stubbornly)
        with pytest.raises(RemoteFunctionError, match="(?s)ran fail_stubbornly.*Stubborn: 1 and 2"):
            coordinator.join()

    coordinated(program)


def leave() -> None:
    sys.exit(3)


def test_a_function_that_leaves_the_program_has_failed():
    """Raised on the chief as it is, it would end the job without a word."""

    def program(coordinator: ClusterCoordinator) -> None:
        coordinator.schedule(leave)
        with pytest.raises(RemoteFunctionError, match="(?s)ran leave, which raised.*SystemExit: 3"):
            coordinator.join()
        assert coordinator.schedule(double, args=(1,)).fetch() == 2

    coordinated(program)


def test_a_scheduled_function_cannot_schedule():
    def program(coordinator: ClusterCoordinator) -> None:
        with pytest.raises(ValueError, match="belongs to the chief"):
            coordinator.schedule(lambda: coordinator.schedule(nothing))
        coordinator.join()

    coordinated(program)


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_call():
    def program(coordinator: ClusterCoordinator) -> list[str]:
        good = coordinator.schedule(double, args=(1,))
        assert good.fetch() == 2
        bad = coordinator.schedule(threading.Lock)
        return [_outcome(good), _outcome(bad)]

    assert coordinated(program) == ["ok", "TypeError"]


def test_a_remote_value_is_no_argument():
    def program(coordinator: ClusterCoordinator) -> None:
        value = coordinator.schedule(double, args=(1,))
        for args in [(value,), ([value],), ({"a": (value,)},)]:
            with pytest.raises(ValueError, match="RemoteValue` used as an input to scheduled function is not yet supp"):
                coordinator.schedule(double, args=args)

    coordinated(program)


def test_an_argument_that_cannot_be_pickled_is_an_error_of_schedule():
    def program(coordinator: ClusterCoordinator) -> None:
        with pytest.raises(TypeError, match="an argument of double cannot be sent to the workers: .*lock"):
            coordinator.schedule(double, args=(threading.Lock(),))
        with pytest.raises(ValueError, match="positional args must be a list or tuple"):
            coordinator.schedule(double, args={"a": 1})

    coordinated(program)


def test_other_strategies_have_no_coordinator():
    with pytest.raises(AttributeError, match="_cluster_coordinator"):
        ClusterCoordinator(SimpleNamespace())


# -- data sets --------------------------------------------------------------------------------------------------------


def take(iterator: Any) -> Any:
    return next(iterator)


def take_all(iterator: Any) -> list[float]:
    return [float(each) for each in iterator]


def ten() -> Dataset:
    return Dataset.range(10)


@pytest.mark.parametrize("given", [ten(), ten, lambda: Dataset.range(10)], ids=["data set", "function", "lambda"])
def test_every_worker_has_all_of_the_data_set(given):
    def program(coordinator: ClusterCoordinator) -> list[tuple[int, list[float]]]:
        iterator = iter(coordinator.create_per_worker_dataset(given))
        return coordinator.fetch([coordinator.schedule(_index_and_all, args=(iterator,)) for _ in range(40)])

    found = coordinated(program)
    for worker in {0, 1}:
        taken = [elements for index, elements in found if index == worker]
        assert [*taken[0]] == list(range(10))
        assert all(rest == [] for rest in taken[1:])


def _index_and_all(iterator: Any) -> tuple[int, list[float]]:
    threading.Event().wait(0.001)
    return experimental_get_current_worker_index(), take_all(iterator)


def test_the_end_of_a_data_set_is_an_error_of_join():
    def program(coordinator: ClusterCoordinator) -> list[Any]:
        iterator = iter(coordinator.create_per_worker_dataset(ten))
        values = [coordinator.schedule(take, args=(iterator,)) for _ in range(11)]
        with pytest.raises(OutOfRangeError, match=r"take asked for the next element .* \.repeat\(\)"):
            coordinator.join()
        return [value.fetch() for value in values[:10]]

    assert coordinated(program, 1) == list(range(10))


def test_get_next_is_there_as_in_tensorflow():
    def program(coordinator: ClusterCoordinator) -> None:
        iterator = iter(coordinator.create_per_worker_dataset(Dataset.range(0)))
        coordinator.schedule(lambda it: it.get_next(), args=(iterator,))
        with pytest.raises(OutOfRangeError, match="no more elements"):
            coordinator.join()

    coordinated(program)


def test_the_chief_cannot_walk_through_the_data_sets_of_workers():
    def program(coordinator: ClusterCoordinator) -> None:
        dataset = coordinator.create_per_worker_dataset(ten())
        assert dataset.element_spec == ten().element_spec
        with pytest.raises(NotImplementedError, match="not supported"):
            next(iter(dataset))

    coordinated(program)


def test_a_data_set_that_cannot_be_made_is_an_error_of_the_calls_that_use_it():
    def program(coordinator: ClusterCoordinator) -> None:
        iterator = iter(coordinator.create_per_worker_dataset(lambda: fail("no such file")))
        assert coordinator.schedule(double, args=(2,)).fetch() == 4
        coordinator.schedule(take, args=(iterator,))
        with pytest.raises(ValueError, match="no such file"):
            coordinator.join()

    coordinated(program)


def test_every_worker_gets_its_own_of_per_worker_values():
    def program(coordinator: ClusterCoordinator) -> set[tuple[int, str]]:
        values = PerWorkerValues(["a", "b"])
        return set(coordinator.fetch([coordinator.schedule(_index_and, args=(values,)) for _ in range(100)]))

    assert coordinated(program) == {(0, "a"), (1, "b")}


def _index_and(value: str) -> tuple[int, str]:
    threading.Event().wait(0.0005)
    return experimental_get_current_worker_index(), value


def test_too_few_per_worker_values_are_an_error():
    def program(coordinator: ClusterCoordinator) -> None:
        coordinator.schedule(_index_and, args=(PerWorkerValues(["a"]),))
        with pytest.raises(ValueError, match="1 values for 2 workers"):
            coordinator.join()

    coordinated(program)


def test_there_is_no_worker_index_outside():
    with pytest.raises(RuntimeError, match="Cannot retrieve the worker index"):
        experimental_get_current_worker_index()


# -- one process ------------------------------------------------------------------------------------------------------


def coordinator_alone() -> ClusterCoordinator:
    strategy = SimpleNamespace(
        _cluster_coordinator=None,
        _roles=alone(),
        _rank=0,
        _connections={},
        _client=Client(),
        _is_coordinated=lambda: None,
        scope=nullcontext,
    )
    return ClusterCoordinator(strategy)


def test_a_process_that_is_alone_is_its_own_worker():
    coordinator = coordinator_alone()
    iterator = iter(coordinator.create_per_worker_dataset(ten))
    values = [coordinator.schedule(take, args=(iterator,)) for _ in range(10)]
    assert coordinator.fetch(values) == list(range(10))
    assert coordinator.schedule(index).fetch() == 0
    with pytest.raises(RuntimeError, match="Cannot retrieve"):
        index()
    coordinator.schedule(take, args=(iterator,))
    with pytest.raises(OutOfRangeError, match="take asked"):
        coordinator.join()
    assert coordinator.done()
    coordinator._end()


def test_a_process_that_is_alone_waits_for_nothing_that_it_did_not_do_at_once():
    coordinator = coordinator_alone()
    coordinator._next_look = float("inf")  # as if it had looked just now
    coordinator._calls.hungry = False
    value = coordinator.schedule(index)
    coordinator.join()
    assert value.fetch() == 0
    coordinator._end()


def test_a_process_that_is_alone_is_never_waited_for():
    """A call that is given to it in the middle of a wait is done at once."""
    coordinator = coordinator_alone()
    for number in range(500):
        calls = [coordinator.schedule(index) for _ in range(number % 5 + 1)]
        if number % 3:
            coordinator.join()
        assert coordinator.fetch(calls) == [0] * len(calls)
        assert coordinator.done()
    coordinator._end()


def test_what_is_not_defined_is_a_name_error_in_a_process_that_is_alone():
    coordinator = coordinator_alone()
    coordinator.schedule(uses_what_is_not_there)
    with pytest.raises(NameError, match="uses_what_is_not_there uses no_such_name: not defined"):
        coordinator.join()
    coordinator._end()


def uses_what_is_not_there() -> Any:
    return no_such_name  # noqa: F821 - that is the test
