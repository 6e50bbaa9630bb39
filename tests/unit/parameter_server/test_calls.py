"""The chief's book of calls, against workers that answer, fail and die in any order."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mpidist.errors import CancelledError, PeerLostError
from mpidist.parameter_server.coordinator.calls import Calls
from mpidist.parameter_server.coordinator.conversation import Conversation, Topic
from mpidist.parameter_server.coordinator.failures import described, described_of_push
from mpidist.parameter_server.coordinator.values import PENDING, Failed, RemoteValue


class Worker(Conversation):
    """Keeps what it is told, and answers a batch when the test wants it to.

    Attributes
    ----------
    ran : Counter
        How often it ran a call, by the call's payload.
    """

    def __init__(self, ran: Counter[int]) -> None:
        self.ran = ran
        self.batches: deque[tuple[int, list[int]]] = deque()
        self.answers: deque[tuple[Any, ...]] = deque()
        self.is_dead = False

    def say(self, kind: Topic, *content: Any) -> None:
        if self.is_dead:
            raise PeerLostError("gone", 1)
        if kind == Topic.CALLS:
            number, _, payloads, _ = content
            self.batches.append((number, payloads))

    def hear(self) -> tuple[Any, ...] | None:
        return self.answers.popleft() if self.answers else None

    def answer(self, fails: bool, refused: bool = False) -> None:
        """Run the oldest batch, or all of it but the last call, which fails; or find then that its first has failed."""
        if not self.batches or self.is_dead:
            return
        number, payloads = self.batches.popleft()
        done = payloads[:-1] if fails else payloads
        self.ran.update(payloads)
        failure = described(ValueError("boom"), "fn") if fails else None
        if refused:
            failure = described_of_push(ValueError("boom"), "fn", 0)
        self.answers.append((Topic.RESULTS, number, 1e-6 * len(payloads), [float(each) for each in done], failure))

    @property
    def peer_name(self) -> str:
        return "rank 1"

    @property
    def is_lost(self) -> bool:
        return self.is_dead and not self.answers

    def lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"{what}: gone", 1)


def function() -> None:
    """What is scheduled; nobody runs it."""


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.integers(1, 40)),
        st.tuples(st.just("answer"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.integers(0, 2)),
        st.tuples(st.just("refuse"), st.integers(0, 2)),
        st.tuples(st.just("die"), st.integers(1, 2)),  # worker 0 stays
        st.tuples(st.just("pump"), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_every_call_comes_to_one_end_whatever_workers_do(steps):
    ran: Counter[int] = Counter()
    workers = [Worker(ran) for _ in range(3)]
    calls = Calls(dict(enumerate(workers)), 10_000, "the chief", lambda: None)
    values: list[RemoteValue] = []
    deaths = failures = 0
    for step, number in steps:
        if step == "schedule":
            new = [RemoteValue(calls, calls.function(function), len(values) + n) for n in range(number)]
            values += new
            calls.waiting.extend(new)
            calls.feed()
        elif step == "die":
            deaths += not workers[number].is_dead
            workers[number].is_dead = True
        elif step == "pump":
            calls.pump()
        else:
            failures += step != "answer" and bool(workers[number].batches) and not workers[number].is_dead
            workers[number].answer(fails=step == "fail", refused=step == "refuse")
    while calls.waiting or calls.running:
        for worker in workers:
            worker.answer(fails=False)
        calls.pump()
    for number, value in enumerate(values):
        assert value._result is not PENDING
        if type(value._result) is not Failed:
            assert value.fetch() == float(number)  # each its own
            assert 1 <= ran[number] <= 1 + deaths
        elif isinstance(value._result.error, CancelledError):
            assert failures
        else:
            assert ran[number] and str(value._result.error) == "boom"
    assert (calls.error is None) == (failures == 0)
    if not deaths and not failures:
        assert set(ran.values()) <= {1} and len(ran) == len(values)


def test_only_what_a_dead_worker_had_runs_twice_and_that_is_two_batches():
    ran: Counter[int] = Counter()
    workers = [Worker(ran) for _ in range(2)]
    calls = Calls(dict(enumerate(workers)), 10_000, "the chief", lambda: None)
    values = [RemoteValue(calls, calls.function(function), number) for number in range(5000)]
    calls.waiting.extend(values)
    calls.pump()
    for _ in range(3):  # so that the chief knows how short the function is
        for worker in workers:
            worker.answer(fails=False)
        calls.pump()
    dead = workers[1]
    while dead.batches:  # it runs all that it has, and dies before it says so
        ran.update(dead.batches.popleft()[1])
    had = ran.total() - sum(value._result is not PENDING for value in values)
    dead.is_dead = True
    while calls.waiting or calls.running:
        calls.pump()
        workers[0].answer(fails=False)
    assert sum(number > 1 for number in ran.values()) == had
    assert 0 < had <= 2 * 512
    assert set(ran) == set(range(5000)) and max(ran.values()) == 2
