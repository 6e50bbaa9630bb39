"""NCCL's start between ranks, with a pretended CuPy: what fails on one rank, and the warnings that NCCL writes."""

import os
import re
import sys
import tempfile
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest

from mpidist import arrays
from mpidist.collectives.group import GroupCommunicator
from mpidist.collectives.persistent import Once
from mpidist.device import nccl
from mpidist.device.answers import Answer
from mpidist.device.waiting import broken_links, open_links
from mpidist.errors import MpidistError, RankFailedError, TransportError, TransportTimeoutError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator


class NcclError(RuntimeError):
    """NCCL's, as CuPy raises it."""


@pytest.fixture
def pretended(monkeypatch):
    """A CuPy with an NCCL that starts; tests put other functions in."""
    monkeypatch.setattr(nccl, "_warnings", [])
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    card = {"machine": "a", "bus_id": "0000:01:00.0", "index": 1, "name": "H100"}
    facts = {"why": "", "version": 23203, "card": card, "problem": "", "seen": []}
    monkeypatch.setattr(nccl, "_facts", lambda: facts)
    monkeypatch.setattr(nccl, "_idle_told", threading.Lock())
    library = SimpleNamespace(facts=facts, get_unique_id=lambda: bytes(range(128)), NcclError=NcclError, devices=[])
    library.NcclCommunicator = lambda size, key, rank: SimpleNamespace(key=key, abort=list, destroy=list)
    cupy = ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {"device": nullcontext()})
    cupy.cuda = ModuleType("cupy.cuda")
    cupy.cuda.nccl, cupy.cuda.Device = library, lambda: selected_in(library.devices)
    cupy.cuda.Stream = SimpleNamespace(ptds=SimpleNamespace(ptr=2))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=7, done=True)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    events = ModuleType("pinned")
    events.event_of, events.has_happened = lambda stream: stream, lambda event: event.done
    monkeypatch.setitem(sys.modules, "mpidist.device.pinned", events)
    yield library
    broken_links.clear()


@contextmanager
def selected_in(threads):
    """A device that takes note of the threads where it is selected."""
    threads.append(threading.current_thread().name)
    yield


def connected(timeout_seconds=None):
    """Return the name of NCCL between all ranks, why it cannot be used, or the error."""
    communicator = world_communicator()
    call = communicator.call("all_reduce(sum)")
    bound = Once(communicator, call, lambda watch: nccl.connect(communicator.transport, watch))
    try:
        link = bound(None, timeout_seconds)
    except MpidistError as error:
        return error
    if isinstance(link, str):
        return link
    link.close(in_order=True)
    return link.name


def test_all_ranks_start_it_on_their_own_device(pretended):
    assert run_ranks(3, connected) == ["NCCL 2.32.3"] * 3
    assert pretended.devices == ["mpidist-nccl"] * 3


@pytest.mark.parametrize(
    ("seen", "told"), [([], 0), (["a 0000:01:00.0"], 0), (["a 0000:01:00.0", "a 0000:02:00.0"], 1)]
)
@pytest.mark.parametrize("problem", ["", "it is not allowed"])
def test_ranks_of_one_gpu_beside_idle_ones_are_told_once_whether_nccl_starts_or_not(
    pretended, caplog, seen, told, problem
):
    pretended.facts.update(seen=seen, problem=problem)

    def twice():
        return [connected(), connected()]

    name = f"ranks 0, 1 have one GPU, H100 0000:01:00.0: {problem}" if problem else "NCCL 2.32.3"
    assert run_ranks(2, twice) == [[name] * 2] * 2
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == told and all(line.startswith("ranks 0, 1 have one GPU") for line in lines)


def test_a_group_says_nothing_of_gpus_that_other_ranks_may_have(pretended, caplog):
    pretended.facts.update(seen=["a 0000:01:00.0", "a 0000:02:00.0"])

    def group():
        whole = world_communicator()
        own = GroupCommunicator(whole, [0, 1] if whole.rank < 2 else [2, 3])
        link = Once(own, own.call("all_reduce(sum)"), lambda watch: nccl.connect(own.transport, watch))(None)
        link.close(in_order=True)
        return link.name

    assert run_ranks(4, group) == ["NCCL 2.32.3"] * 4
    assert not caplog.records


@pytest.mark.parametrize("error", [RuntimeError("unhandled system error"), TypeError("unhandled system error")])
def test_an_id_that_cannot_be_made_is_the_same_error_on_all_ranks(pretended, error):
    def fail():
        raise error

    pretended.get_unique_id = fail
    for rank, told in enumerate(run_ranks(3, connected)):
        assert type(told) is TransportError
        assert f"rank {rank} of 3: NCCL could not make the id of its communicator: rank 0: unhandled" in str(told)


def test_ranks_that_wait_within_nccl_learn_of_the_one_that_cannot_start(pretended):
    over = threading.Event()

    def start(size, key, rank):
        if rank == 1:
            raise RuntimeError("out of memory")
        over.wait()  # as NCCL waits for its ranks

    pretended.NcclCommunicator = start
    try:
        first, failed, last = run_ranks(3, connected)
    finally:
        over.set()
    assert type(failed) is TransportError
    assert "NCCL could not start: rank 1: out of memory; leave NCCL some GPU memory" in str(failed)
    for told in (first, last):
        assert isinstance(told, RankFailedError)
        assert told.rank == 1
        assert "NCCL could not start: rank 1: out of memory" in str(told)


def test_new_warnings_are_quoted_and_kept(pretended, monkeypatch, tmp_path):
    names = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(size, key, rank):
        names.append(os.environ["NCCL_DEBUG_FILE"])
        with open(names[0], "a") as file:
            file.write("\n[2026] vm:1:1 [0] init.cc:1 (f) NCCL WARN Duplicate GPU detected : rank 1 and rank 0\n\n")
        raise RuntimeError("invalid usage")

    pretended.NcclCommunicator = start
    (told,) = run_ranks(1, connected)
    assert "invalid usage (Duplicate GPU detected : rank 1 and rank 0; all that" in str(told)
    assert not os.path.exists(names[0])
    (kept,) = tmp_path.iterdir()
    assert f"all that NCCL has said: {kept}" in str(told)
    assert "[0] init.cc:1 (f) NCCL WARN Duplicate GPU detected : rank 1 and rank 0" in kept.read_text()
    assert not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & set(os.environ)
    assert nccl._told(RuntimeError("another")) == "another"
    assert list(tmp_path.iterdir()) == [kept]


def test_nothing_is_left_behind_without_an_error(pretended, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(1, connected) == ["NCCL 2.32.3"]
    assert not list(tmp_path.iterdir())


def test_the_page_and_the_errors_know_the_same_cures():
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text().partition("## NCCL's errors")[2]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    messages = [message for row in rows for message in re.findall("`([^`]+)`", row)]
    unknown = [message for message in messages if not any(sign in message for sign, _ in nccl._CURES)]
    assert messages and not unknown
    assert not [sign for sign, _ in nccl._CURES if not any(sign in message for message in messages)]


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_warnings_that_the_user_sees_to_are_left_to_him(pretended, monkeypatch, name):
    seen = []
    monkeypatch.setenv(name, "mine")
    pretended.get_unique_id = lambda: (
        seen.append({key: os.environ[key] for key in os.environ if "NCCL_D" in key}) or b""
    )
    run_ranks(1, connected)
    assert seen == [{name: "mine"}]


@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("1", "1")])
def test_ranks_are_connected_at_the_start_unless_the_user_sees_to_it(pretended, monkeypatch, given, expected):
    """The start is watched; what NCCL does in the host during a call is not."""
    name, seen, start = "NCCL_RUNTIME_CONNECT", [], pretended.NcclCommunicator
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    pretended.NcclCommunicator = lambda *given: seen.append(os.environ.get(name)) or start(*given)
    assert run_ranks(1, connected) == ["NCCL 2.32.3"]
    assert seen == [expected] and os.environ.get(name) == given


def test_a_rank_that_stops_while_nccl_connects_is_a_deadline_for_the_others(pretended):
    over = threading.Event()
    pretended.NcclCommunicator = lambda *given: over.wait()  # as NCCL waits for a rank that has stopped
    try:
        (told,) = run_ranks(1, lambda: connected(0.2))
    finally:
        over.set()
    assert isinstance(told, TransportTimeoutError)


class Recorder:
    """A communicator of NCCL that takes note of its calls; it fails in the call of a name."""

    def __init__(self, log, fails=""):
        self._log, self._fails = log, fails

    def __getattr__(self, name):
        def call(*given):
            self._log.append((name, *given))
            if name == self._fails:
                raise NcclError("unhandled cuda error")

        return call


class Flat:
    """As much of a flat array of CuPy's as NCCL is told of."""

    def __init__(self, address, count, dtype):
        self.dtype, self.size, self.itemsize = numpy.dtype(dtype), count, numpy.dtype(dtype).itemsize
        self.nbytes, self.data = count * self.itemsize, SimpleNamespace(ptr=address)


@pytest.fixture
def calls(pretended, monkeypatch):
    """Make ``calls(begin, fails)``: what NCCL of rank 1 of 3 is told on stream 7 by ``begin(link, watch)``."""
    names = "SUM PROD MIN MAX UINT8 INT8 INT32 UINT32 INT64 UINT64 FLOAT32 FLOAT64".split()
    for name in names:
        setattr(pretended, f"NCCL_{name}", name)

    def told(begin, fails=""):
        log = []
        pretended.groupStart, pretended.groupEnd = lambda: log.append("start"), lambda: log.append("end")

        def on_rank():
            communicator = world_communicator()
            link = nccl.Nccl(Recorder(log, fails), communicator.transport, 23203)
            try:
                if communicator.rank == 1:
                    Once(communicator, communicator.call("a call"), lambda watch: begin(link, watch))(None)
                else:
                    communicator.barrier("a call")
            finally:
                link.close(in_order=False)

        run_ranks(3, on_rank)
        return [each for each in log if each not in (("check_async_error",), ("abort",))]

    return told


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("reduce", Flat(1000, 5, "f8"), "prod"), [("allReduce", 1000, 1000, 5, "FLOAT64", "PROD", 7)]),
        (("reduce", Flat(1000, 5, "u1"), "max"), [("allReduce", 1000, 1000, 5, "UINT8", "MAX", 7)]),
        (("reduce", Flat(1000, 5, "c8"), "sum"), [("allReduce", 1000, 1000, 10, "FLOAT32", "SUM", 7)]),
        (("from_root", Flat(1000, 5, "f2"), 2), [("broadcast", 1000, 1000, 10, "UINT8", 2, 7)]),
        (("gather", Flat(1000, 6, "i8"), [0, 2, 4, 6]), [("allGather", 1016, 1000, 16, "UINT8", 7)]),
        (
            ("gather", Flat(1000, 6, "i2"), [0, 5, 5, 6]),
            [("broadcast", 1000, 1000, 10, "UINT8", 0, 7), ("broadcast", 1010, 1010, 2, "UINT8", 2, 7)],
        ),
        (
            ("reduce_parts", Flat(1000, 6, "c16"), "sum", [0, 2, 4, 6]),
            [("reduceScatter", 1000, 1032, 4, "FLOAT64", "SUM", 7)],
        ),
        (
            ("reduce_parts", Flat(1000, 4, "i4"), "prod", [0, 1, 1, 4]),
            [("reduce", 1000, 1000, 1, "INT32", "PROD", 0, 7), ("reduce", 1004, 1004, 3, "INT32", "PROD", 2, 7)],
        ),
        (
            (
                "exchange",
                {0: Flat(1000, 3, "f4"), 2: Flat(0, 0, "f4")},
                {0: Flat(0, 0, "f4"), 2: Flat(2000, 9, "?")},
            ),
            [("send", 1000, 12, "UINT8", 0, 7), ("recv", 2000, 9, "UINT8", 2, 7)],
        ),
    ],
)
def test_what_is_begun(calls, call, expected):
    """All of it is one group, on the current stream."""
    verb, *given = call
    assert calls(lambda link, watch: getattr(link, verb)(*given, watch)) == ["start", *expected, "end"]


def test_a_call_that_fails_ends_its_group_and_the_communicator(calls):
    def begin(link, watch):
        with pytest.raises(
            TransportError, match=r"rank 1 of 3: all_gather by NCCL 2\.32\.3 failed: unhandled cuda error"
        ):
            link.gather(Flat(1000, 6, "i2"), [0, 5, 5, 6], watch)

    assert calls(begin, "broadcast") == ["start", ("broadcast", 1000, 1000, 10, "UINT8", 0, 7), "end"]
    assert broken_links == ["NCCL 2.32.3"]  # nobody knows what of it is on its way


def test_nccl_connects_ranks_in_a_thread_that_is_watched(calls, pretended):
    """That is in the first call of a kind, or with another rank; not in a stream that each thread has of its own."""
    threads = []

    def begin(link, watch):
        def step(fn):
            pretended.groupEnd = lambda: threads.append(threading.current_thread().name)
            fn()

        five, parts = Flat(1000, 5, "f4"), Flat(1000, 6, "i8")
        for stream in (7, 2):
            sys.modules["cupy"].cuda.get_current_stream = lambda stream=stream: SimpleNamespace(ptr=stream, done=True)
            for _ in range(2):
                step(lambda: link.reduce(five, "sum", watch))
                step(lambda: link.exchange({0: five}, {}, watch))
            step(lambda: link.exchange({}, {0: five}, watch))
            if stream == 2:
                step(lambda: link.gather(parts, [0, 2, 4, 6], watch))

    calls(begin)
    own = [name == "mpidist-nccl" for name in threads]
    assert own == [True, True, False, False, True, False, False, False, False, False, False]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_stops_while_nccl_connects_it_is_a_deadline_for_the_others(links, pretended, is_late):
    """The communicator is the thread's: nobody aborts it under its call, nor reads what it gives, however it ends."""
    log, over, at_end = [], threading.Event(), threading.Event()
    pretended.groupStart, pretended.groupEnd = over.wait, at_end.set
    pretended.NCCL_UINT8 = "UINT8"

    def on_rank():
        communicator, link = world_communicator(), links(log)
        bound = Once(
            communicator, communicator.call("a call"), lambda watch: link.from_root(Flat(8, 1, "f4"), 0, watch)
        )
        with pytest.raises(TransportTimeoutError):
            bound(None, 0.2)
        if is_late:
            over.set()
            assert at_end.wait(60)
        assert broken_links == [link.name] and not open_links

    try:
        run_ranks(1, on_rank)
    finally:
        over.set()
    assert ("abort",) not in log


@pytest.fixture
def links(pretended, monkeypatch):
    """Make ``links(log, fails)``: NCCL of this rank, whose communicator writes a log; the calls in it may fail."""
    monkeypatch.setattr(nccl, "_GRACE_SECONDS", 0.1)
    return lambda log, fails="": nccl.Nccl(Recorder(log, fails), world_communicator().transport, 23203)


NEVER = Answer(lambda: False, numpy.zeros(1))


def test_a_wait_for_an_answer_meets_what_nccl_has_met_meanwhile(links):
    log = []

    def on_rank():
        link = links(log, "check_async_error")
        link._event = SimpleNamespace(done=False)
        with pytest.raises(TransportError, match=r"rank 0 of 1: what was begun by NCCL .* failed: unhandled"):
            NEVER()
        assert not open_links

    run_ranks(1, on_rank)
    assert log == [("check_async_error",), ("abort",)]


def test_a_wait_for_an_answer_meets_the_end_of_another_rank_which_is_told_in_place_of_what_nccl_says(links):
    logs, has_begun = ([], []), threading.Event()

    def on_rank():
        communicator = world_communicator()
        link = links(logs[communicator.rank], "" if communicator.rank else "check_async_error")
        communicator.barrier("begin")
        if communicator.rank == 1:
            has_begun.wait()
            communicator.control.fail("ValueError: its own")  # as by an exception that nobody catches
        else:
            has_begun.set()
            with pytest.raises(RankFailedError, match=r"rank 1 .* failed while .*ValueError: its own"):
                link.look()
            with pytest.raises(RankFailedError, match="rank 1 .* failed"):
                communicator.barrier("next")

    run_ranks(2, on_rank)
    assert logs == ([("check_async_error",), ("abort",)], [("abort",)])
    assert not open_links


def test_the_end_in_order_waits_for_what_was_begun_with_an_eye_on_the_others(links, monkeypatch):
    log, states = [], [False, True]
    monkeypatch.setattr(nccl.Nccl, "is_done", lambda link: log.append("asked") or (not states or states.pop(0)))

    def on_rank():
        link = links(log)
        link.close(in_order=True)
        link.close(in_order=True)

    run_ranks(1, on_rank)
    assert log == ["asked", "asked", ("destroy",)]


def test_a_program_that_waits_for_the_gpu_by_itself_is_ended(links, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(nccl, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(nccl, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())

    def on_rank():
        link = links([], "check_async_error")
        link._event = SimpleNamespace(done=False)
        assert ended.wait(60)
        link.close(in_order=False)

    run_ranks(1, on_rank)
    assert "rank 0 of 1: what was begun by NCCL 2.32.3 failed: unhandled cuda error" in capsys.readouterr().err


@pytest.mark.parametrize("is_done", [True, False])
def test_nothing_is_read_behind_work_that_was_broken_off(links, is_done):
    log, array = [], sys.modules["cupy"].ndarray()
    sys.modules["cupy"].asnumpy = lambda given: "its values"

    def on_rank():
        link = links(log)
        link._event = SimpleNamespace(done=is_done)
        world_communicator().control.fail("ValueError: its own")
        if is_done:
            assert arrays.as_host(array) == "its values"
        else:
            with pytest.raises(TransportError, match=r"NCCL 2\.32\.3 was broken off .* last checkpoint"):
                arrays.as_host(array)
            with pytest.raises(TransportError, match="broken off"):
                Answer(lambda: True, numpy.zeros(1))()

    run_ranks(1, on_rank)
    assert log == [("abort",)]
