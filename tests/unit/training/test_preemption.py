"""Preemption: all ranks save at the same step, exit, and go on from there; and TensorFlow's case of that topic."""

from __future__ import annotations

import logging
import signal
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.spec import ClusterSpec
from mpidist.testing import run_ranks
from mpidist.training.preemption import PreemptionCheckpointHandler, TerminationConfig
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS

CASES = cases("preemption")


class Exited(Exception):
    """In place of the end of the program."""


class Job:
    """A loop whose every step adds a number to a variable; may be told to end in front of a step."""

    def __init__(self, directory, told_at=None, collective=True, **options):
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        self.rank = self.strategy.extended.replica_id
        with self.strategy.scope():
            self.v = mpidist.Variable(numpy.zeros(2), name="v")
        self.steps_seen, self.saves, self.exits = 0, [], []
        self.collective = collective

        def watcher():
            self.steps_seen += 1
            return told_at is not None and self.steps_seen >= told_at

        config = TerminationConfig(watcher, self._exit, poll_seconds=0.0, **options)
        self.checkpoint = mpidist.Checkpoint(v=self.v)
        self.handler = PreemptionCheckpointHandler(None, self.checkpoint, directory, config)

    def _exit(self):
        self.exits.append(self.handler.total_run_calls)
        raise Exited

    def step(self):
        rank = self.rank if self.collective else 1.0
        if self.collective:
            total = self.strategy.run(
                lambda: mpidist.get_replica_context().all_reduce("sum", numpy.full(2, rank + 1.0))
            )
        else:
            total = numpy.full(2, rank)
        self.v.assign_add(total)
        return float(total[0])

    def train(self, steps):
        """Return (steps made in all, whether it was told to end, the variable)."""
        try:
            while self.handler.total_run_calls < steps:
                self.handler.run(self.step)
        except Exited:
            return self.handler.total_run_calls, True, self.v.value.tolist()
        return self.handler.total_run_calls, False, self.v.value.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("who", [0, "last", "all"])
def test_the_step_under_way_is_finished_and_the_next_job_goes_on(tmp_path, size, who):
    def first():
        rank = mpidist.MultiWorkerMirroredStrategy().extended.replica_id
        told = who == "all" or rank == (0 if who == 0 else size - 1)
        return Job(tmp_path, told_at=3 if told else None).train(10)

    # told in front of the third step: it is made, and all save in front of the fourth
    each = size * (size + 1) / 2
    assert run_ranks(size, first) == [(3, True, [3 * each] * 2)] * size
    assert run_ranks(size, lambda: Job(tmp_path).train(10)) == [(10, False, [10 * each] * 2)] * size


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.booleans())
def test_all_ranks_stop_at_one_step_whoever_is_told_when(told_at, collective):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:

        def run():
            rank = mpidist.MultiWorkerMirroredStrategy().extended.replica_id
            return Job(folder, told_at[rank], collective).train(40)

        found = run_ranks(3, run)
        steps = {step for step, _, _ in found}
        assert len(steps) == 1 and len({str(value) for _, _, value in found}) == 1
        if collective:
            assert found[0][:2] == (min(told_at), True)
        else:
            # ranks that never meet may be far apart: those behind catch up
            assert min(told_at) <= steps.pop() <= 40 and found[0][1]


@pytest.mark.parametrize("size", [1, 3])
def test_it_costs_no_collective(tmp_path, size):
    def calls():
        job = Job(tmp_path)
        control = job.strategy.extended.communicator.control
        job.handler.run(lambda: None)
        before = control.call
        for _ in range(20):
            job.handler.run(lambda: None)
        return control.call - before

    assert run_ranks(size, calls) == [0] * size


def test_with_a_grace_period_it_saves_twice(tmp_path, caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("mpidist.training.preemption.time.monotonic", lambda: clock[0])

    def run():
        saved = []
        job = Job(tmp_path, told_at=2, grace_period=30.0, save_fn=lambda: saved.append(job.handler.total_run_calls))

        def step():
            clock[0] += 1.0
            return job.step()

        with pytest.raises(Exited):
            while True:
                job.handler.run(step)
        return saved, job.exits

    (saved, exits), *_ = run_ranks(1, run)
    # told at 1 s, 30 s of grace, steps of 1 s: the last save begins when fewer than 3 of them are left
    assert saved == [2, 30]
    assert exits == [30]
    assert "saved after 2 steps; it goes on for what is left of 30 s" in caplog.text
    assert "saved after 30 steps; it exits" in caplog.text


def test_an_exit_fn_that_comes_back_is_asked_once(tmp_path):
    def run():
        job = Job(tmp_path, told_at=2)
        job.handler._config.exit_fn = lambda: job.exits.append(job.handler.total_run_calls)
        return job.train(9), job.exits

    assert run_ranks(2, run) == [((9, False, [27.0] * 2), [2])] * 2


def test_a_loop_of_its_own_is_told_how_many_steps_it_made(tmp_path, caplog):
    def run():
        job = Job(tmp_path, told_at=3)
        with pytest.raises(Exited):
            for made in range(9):  # noqa: B007 - how far it came
                job.handler.save_checkpoint_if_preempted()
                job.step()
        return made

    assert run_ranks(1, run) == [3]
    assert "the job was told to end: saved after 3 steps of this run; it exits" in caplog.text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signals_are_notices(tmp_path, name):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable([1.0], name="v"))
    handler = PreemptionCheckpointHandler(None, checkpoint, tmp_path)
    with pytest.raises(SystemExit) as ended:
        for number in range(9):
            handler.run(lambda n=number: signal.raise_signal(signal.Signals[name]) if n == 4 else None)
    assert (ended.value.code, handler.total_run_calls) == (42, 6)
    # until the process is gone: a launcher ends ranks by SIGTERM as soon as the first has exited
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == [signal.SIG_IGN] * 2
    handler.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert [path.name for path in tmp_path.glob("*.h5")] == ["checkpoint-1.h5"]


def test_the_code_and_the_signals_are_asked_for(tmp_path):
    config = TerminationConfig(signals=["SIGUSR2"], exit_code=75)
    before = signal.getsignal(signal.SIGUSR1)
    handler = PreemptionCheckpointHandler(None, mpidist.Checkpoint(), tmp_path, config)
    assert signal.getsignal(signal.SIGUSR1) is before
    signal.raise_signal(signal.SIGUSR2)
    handler.run(lambda: None)
    with pytest.raises(SystemExit) as ended:
        handler.run(lambda: None)
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    handler.close()


def test_no_rank_exits_before_all_ignore_signals(tmp_path, monkeypatch):
    """A rank that ignores them only when the others wait for it, or have exited, sees that they wait."""
    ignored, exits = [], []

    def ignore(handler):
        control = handler._communicator.control
        if control.rank == 1:
            end = time.monotonic() + 60
            while len(exits) < 2 and any(control.board.call(other) <= control.call for other in (0, 2)):
                assert time.monotonic() < end
                time.sleep(0.001)
        ignored.append(control.rank)

    monkeypatch.setattr(PreemptionCheckpointHandler, "_ignore_signals", ignore)

    def run():
        job = Job(tmp_path, told_at=2)
        job.handler._config.exit_fn = lambda: exits.append(len(ignored))
        return job.train(5)

    run_ranks(3, run)
    assert exits == [3] * 3


def test_a_file_beside_the_checkpoints_tells_that_the_job_is_to_be_queued_again(tmp_path):
    def run():
        return Job(tmp_path, told_at=2).train(5)[:2]

    assert run_ranks(2, run) == [(2, True)] * 2
    assert (tmp_path / "requeue").read_text() == "saved after 2 steps\n"
    seen = []

    def go_on():
        job = Job(tmp_path)
        seen.append((tmp_path / "requeue").exists() and job.rank == 0)  # the chief has removed it; a job may fail now
        return job.train(5)[:2]

    assert run_ranks(2, go_on) == [(5, False)] * 2
    assert seen == [False] * 2 and not (tmp_path / "requeue").exists()


def test_a_job_that_cannot_write_the_file_exits_all_the_same(tmp_path, caplog):
    (tmp_path / "requeue").mkdir()
    assert run_ranks(1, lambda: Job(tmp_path, told_at=2).train(5)[:2]) == [(2, True)]
    assert f"{tmp_path / 'requeue'} is of an earlier job, and cannot be removed" in caplog.text
    assert f"{tmp_path / 'requeue'} cannot be written: " in caplog.text


def test_the_step_of_a_loop_of_its_own_is_the_number_of_its_checkpoint(tmp_path):
    def run():
        job, made = Job(tmp_path, told_at=3), 0
        job.handler.steps_fn = lambda: made
        with pytest.raises(Exited):
            while made < 9:
                job.handler.save_checkpoint_if_preempted()
                job.step()
                made += 1
        return made

    assert run_ranks(1, run) == [3]
    assert [path.name for path in tmp_path.glob("*.h5")] == ["checkpoint-3.h5"]
    assert run_ranks(1, lambda: Job(tmp_path).handler.restored) == [tmp_path / "checkpoint-3.h5"]


def test_close_gives_signals_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    PreemptionCheckpointHandler(None, mpidist.Checkpoint(), tmp_path).close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_signals_cannot_be_watched_from_another_thread(tmp_path, caplog):
    def make():
        PreemptionCheckpointHandler(None, mpidist.Checkpoint(), tmp_path)

    with caplog.at_level(logging.WARNING):
        run_ranks(1, make)
    assert "use termination_watcher_fn" in caplog.text


def test_checkpoints_saved_without_a_handler_restore(tmp_path):
    v = mpidist.Variable([1.0, 2.0], name="v")
    mpidist.CheckpointManager(mpidist.Checkpoint(v=v), tmp_path).save(7)
    v.assign([0.0, 0.0])
    manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=v), tmp_path)
    config = TerminationConfig(lambda: False)
    handler = PreemptionCheckpointHandler(None, manager, termination_config=config)
    assert (v.value.tolist(), handler.total_run_calls) == ([1, 2], 0)
    with pytest.raises(ValueError, match="has a part 'preemption_checkpoint_handler' already"):
        PreemptionCheckpointHandler(None, manager, termination_config=config)


def test_tensorflows_case():
    """TensorFlow means to raise InvalidArgumentError, and fails at that."""
    assert CASES["preempt_no_dir"]["expected"]["message"].startswith("InvalidArgumentError")
    assert set(CASES) == {"preempt_no_dir"} <= set(DEVIATIONS)
    with pytest.raises(ValueError, match="needs checkpoint_dir"):
        PreemptionCheckpointHandler(None, mpidist.Checkpoint())


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="must be a Checkpoint or a CheckpointManager, got str"):
        PreemptionCheckpointHandler(None, "run", tmp_path)
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}))
    with pytest.raises(NotImplementedError, match="does not support parameter servers"):
        PreemptionCheckpointHandler(resolver, mpidist.Checkpoint(), tmp_path)
    with pytest.raises(ValueError, match=r"unknown signals \['SIGNAL'\]; known are \['SIGHUP'"):
        TerminationConfig(signals=["SIGNAL"])
    with pytest.raises(ValueError, match="grace_period must be 0 seconds or more, got -1"):
        TerminationConfig(grace_period=-1)
