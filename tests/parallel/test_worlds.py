"""Worlds made of a program's own communicators, over real MPI ranks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from numpy.testing import assert_allclose

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.errors import CollectiveMismatchError, ObjectError, TransportError
from mpidist.world import world_communicator

pytestmark = pytest.mark.mpi

#: Rows of a global batch, whatever the number of ranks; steps of a training.
ROWS, STEPS, RATE = 12, 5, 0.1


@pytest.fixture(scope="module")
def mpi():
    from mpi4py import MPI

    return MPI


@pytest.fixture
def everyone(mpi):
    return mpi.COMM_WORLD


@pytest.fixture(scope="module")
def half(mpi):
    """The world of the even ranks, or of the odd ones."""
    comm = mpi.COMM_WORLD.Split(mpi.COMM_WORLD.rank % 2, mpi.COMM_WORLD.rank)
    world = mpidist.new_world(comm)
    comm.Free()  # the world has copies
    return world


def rows(which):
    """Return the global batch of one of the halves: inputs, and targets of another line each."""
    x = numpy.linspace(-1, 1, ROWS).reshape(ROWS, 1) + 0.25 * which
    return x, (2.0 + which) * x - which


def gradient(w, x, y):
    """Return the gradient of half the sum of squares of ``w[0] * x + w[1] - y``, over the rows given."""
    residual = w[0] * x + w[1] - y
    return numpy.array([(residual * x).sum(), residual.sum()])


def trained_alone(which):
    """Return the weights that one process comes to on the global batch of a half."""
    w = numpy.zeros(2)
    for _ in range(STEPS):
        w = w - RATE * gradient(w, *rows(which)) / ROWS
    return w


class Training:
    """A training in the world that is in force: every rank its rows of the batch."""

    def __init__(self, which):
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        rank, size = mpidist.rank(), mpidist.size()
        self.part = [column[rank::size] for column in rows(which)]
        with self.strategy.scope():
            self.w = mpidist.Variable(numpy.zeros(2))
            self.optimizer = mpidist.optimizers.SGD(RATE)

    def step(self):
        self.strategy.run(self._step)

    def _step(self):
        self.optimizer.apply_gradients([(gradient(self.w.value, *self.part) / ROWS, self.w)])


def test_places_are_those_in_the_communicator(everyone, half):
    rank, size = everyone.rank, everyone.size
    place = (rank // 2, (size + 1 - rank % 2) // 2)
    assert (half.rank, half.size) == (half.local_rank, half.local_size) == place and half.node == 0
    with half:
        assert (mpidist.rank(), mpidist.size()) == place
        assert mpidist.all_gather_object(rank) == list(range(rank % 2, size, 2))
        assert mpidist.broadcast_object(rank, half.size - 1) == range(rank % 2, size, 2)[-1]
        mpidist.barrier()
    assert (mpidist.rank(), mpidist.size()) == (rank, size)


def test_halves_train_different_things_and_equal_one_process_each(everyone, half):
    which = everyone.rank % 2
    with half:
        training = Training(which)
    for _ in range(STEPS):
        training.step()  # outside of the block: a strategy belongs to the ranks of its world
    assert_allclose(training.w.value, trained_alone(which), rtol=0, atol=1e-12)
    with half:
        assert len(set(mpidist.all_gather_object(training.w.value.tobytes()))) == 1


def test_the_whole_world_trains_between_the_steps_of_the_halves(everyone, half):
    which = everyone.rank % 2
    with half:
        mine = Training(which)
    ours = Training(0)
    for _ in range(STEPS):
        mine.step()
        ours.step()
    assert_allclose(mine.w.value, trained_alone(which), rtol=0, atol=1e-12)
    assert_allclose(ours.w.value, trained_alone(0), rtol=0, atol=1e-12)


def test_a_strategy_brings_its_world_along(everyone, half):
    with half:
        strategy = mpidist.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == half.size
    assert strategy.run(lambda: (mpidist.rank(), mpidist.size())) == (half.rank, half.size)
    with strategy.scope():
        assert mpidist.size() == half.size
        with mpidist.init():
            assert mpidist.size() == everyone.size
    whole = mpidist.MultiWorkerMirroredStrategy()
    with half:
        assert whole.run(mpidist.size) == everyone.size
        assert mpidist.size() == half.size


def test_a_rank_that_is_in_no_world(mpi, everyone):
    is_out = everyone.rank == 0
    comm = everyone.Split(mpi.UNDEFINED if is_out else 0, everyone.rank)
    if is_out:
        with pytest.raises(ValueError, match="got COMM_NULL.*this rank is in none"):
            mpidist.new_world(comm)
    else:
        with mpidist.new_world(comm) as world:
            assert (world.rank, world.size) == (everyone.rank - 1, everyone.size - 1)
            assert mpidist.all_gather_object(everyone.rank) == list(range(1, everyone.size))
    mpidist.barrier()


def test_the_order_of_ranks_is_that_of_the_communicator(everyone):
    comm = everyone.Split(0, -everyone.rank)
    with mpidist.new_world(comm) as world:
        assert world.rank == everyone.size - 1 - everyone.rank
        assert mpidist.all_gather_object(everyone.rank) == list(range(everyone.size))[::-1]
        values = numpy.full(100_000, 2.0**everyone.rank)
        world_communicator().all_reduce(values)
        assert (values == 2.0**everyone.size - 1).all()
    comm.Free()


def test_a_communicator_with_a_grid_is_one_of_ranks(everyone):
    grid = everyone.Create_cart([everyone.size], periods=[True])
    with mpidist.new_world(grid):
        assert mpidist.all_gather_object(mpidist.rank()) == list(range(everyone.size))
    grid.Free()


def test_worlds_with_ranks_in_common_used_in_one_order(mpi, everyone):
    rank, last = everyone.rank, everyone.size - 1
    members = {"low": range(last), "high": range(1, last + 1), "all": range(last + 1)}
    comms = {name: everyone.Split(0 if rank in ranks else mpi.UNDEFINED, rank) for name, ranks in members.items()}
    worlds = {name: mpidist.new_world(comm) for name, comm in comms.items() if comm != mpi.COMM_NULL}
    for step in range(30):
        for name, world in worlds.items():
            with world:
                values = numpy.full(1000, float(rank + step))
                world_communicator().all_reduce(values)
                assert (values == sum(each + step for each in members[name])).all()
                if step % 10 == 0:
                    assert mpidist.all_gather_object((name, rank)) == [(name, each) for each in members[name]]


def test_two_worlds_of_one_communicator_are_two(everyone):
    first, second = mpidist.new_world(everyone), mpidist.new_world(everyone)
    assert first is not second and first is not mpidist.init()
    for world in (first, second, mpidist.init(), second):
        with world:
            assert mpidist.all_gather_object(0) == [0] * everyone.size
    assert (first.control.call, second.control.call) == (1, 2)


def test_worlds_are_made_and_closed_again_and_again(everyone):
    for step in range(20):
        world = mpidist.new_world(everyone)
        with world:
            strategy = mpidist.MultiWorkerMirroredStrategy()
            assert strategy.reduce("sum", numpy.ones(1000), axis=None)[0] == everyone.size
        world.close()
        world.close()
        with world, pytest.raises(TransportError, match="this world has been closed; make another one"):
            mpidist.barrier()
        with pytest.raises(TransportError, match="has been closed"):
            strategy.reduce("sum", numpy.ones(1000), axis=None)
        assert mpidist.all_gather_object(step) == [step] * everyone.size


def test_only_all_ranks_close_a_world_and_never_that_of_the_process(everyone):
    with pytest.raises(RuntimeError, match="lasts until its process ends"):
        mpidist.init().close()
    world = mpidist.new_world(everyone)
    if everyone.size > 1:
        with pytest.raises(CollectiveMismatchError, match="close of a world"):
            with world:
                world.close() if everyone.rank else mpidist.barrier()
    world.close()


def test_an_error_in_one_world_is_its_own_and_names_ranks_of_both_kinds(everyone, half):
    rank = everyone.rank
    if rank % 2 and half.size > 1:
        with half:
            with pytest.raises(CollectiveMismatchError, match=r"barrier") as caught:
                mpidist.barrier() if half.rank else mpidist.all_gather_object(0)
            assert f"rank {half.rank} of {half.size}" in str(caught.value)
    with half:
        with pytest.raises(ObjectError) as refused:
            mpidist.all_gather_object((lambda: 0) if half.rank == half.size - 1 else 0)
        number = rank % 2 + 2 * (half.size - 1)
        assert str(refused.value).startswith(f"rank {half.rank} of {half.size} (rank {rank} of COMM_WORLD): all_gather")
        assert f"the object of rank {half.size - 1} (" in str(refused.value)
        assert f", rank {number} of COMM_WORLD) cannot be pickled" in str(refused.value)
        assert mpidist.all_gather_object(rank) == list(range(rank % 2, everyone.size, 2))
    mpidist.barrier()


def test_a_users_messages_on_the_communicator_stay_the_users(everyone):
    comm = everyone.Dup()
    neighbour, mine = (comm.rank + 1) % comm.size, numpy.full(1, float(comm.rank))
    found = numpy.zeros(1)
    pending = comm.Isend(mine, neighbour, tag=1)
    with mpidist.new_world(comm):
        assert mpidist.all_gather_object(comm.rank) == list(range(comm.size))
        comm.Recv(found, (comm.rank - 1) % comm.size, tag=1)
        pending.Wait()
        mpidist.barrier()
    assert found[0] == (comm.rank - 1) % comm.size
    comm.Free()


def test_a_checkpoint_is_that_of_the_world_in_which_it_was_made(everyone, half, tmp_path):
    folder = Path(mpidist.broadcast_object(str(tmp_path))) / str(everyone.rank % 2)
    with half:
        with mpidist.MultiWorkerMirroredStrategy().scope():
            w = mpidist.Variable(numpy.full(3, float(everyone.rank % 2)), name="w")
        manager = mpidist.CheckpointManager(mpidist.Checkpoint(w=w), folder)
    path = manager.save()
    w.assign(numpy.full(3, 7.0))
    assert manager.restore_or_initialize() == path
    assert w.value.tolist() == [float(everyone.rank % 2)] * 3
    mpidist.barrier()


def test_a_checkpoint_made_outside_is_that_of_its_variables(everyone, half, tmp_path):
    folder = Path(mpidist.broadcast_object(str(tmp_path)))
    with half, mpidist.MultiWorkerMirroredStrategy().scope():
        w = mpidist.Variable(numpy.full(3, float(everyone.rank % 2)), name="w")
    checkpoint = mpidist.Checkpoint(w=w)
    path = checkpoint.save(folder / f"{everyone.rank % 2}.h5")
    w.assign(numpy.full(3, 7.0))
    checkpoint.restore(path)
    assert w.value.tolist() == [float(everyone.rank % 2)] * 3
    with mpidist.MultiWorkerMirroredStrategy().scope():
        v = mpidist.Variable(numpy.zeros(3), name="v")
    with pytest.raises(ValueError, match="of several worlds; make a checkpoint for each"):
        mpidist.Checkpoint(v=v, w=w)


def test_a_trainer_is_that_of_the_world_in_which_it_was_made(everyone, half, tmp_path):
    which = everyone.rank % 2
    folder = Path(mpidist.broadcast_object(str(tmp_path))) / str(which)
    with half:
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2), name="w")

            def loss_and_gradients(parameters, x, y):
                residual = parameters[0][0] * x + parameters[0][1] - y
                return float((residual**2).mean() / 2), [gradient(parameters[0], x, y) / len(x)]

            trainer = mpidist.Trainer(loss_and_gradients, [w], mpidist.optimizers.SGD(RATE))
    kept = mpidist.callbacks.BackupAndRestore(folder)  # makes its own checkpoints, in `fit`
    trainer.fit(*rows(which), batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0, callbacks=[kept])
    assert_allclose(w.value, trained_alone(which), rtol=0, atol=1e-12)
    mpidist.barrier()


def test_a_resolver_describes_the_world_in_force(everyone, half):
    with half:
        resolver = MPIClusterResolver()
        assert resolver.topology.size == half.size and resolver.task_id == half.rank
    assert MPIClusterResolver().topology.size == everyone.size


def test_what_is_no_communicator_of_ranks_is_refused(mpi, everyone):
    for what in (None, 3, "COMM_WORLD", [0, 1], mpi.COMM_WORLD.Get_group()):
        with pytest.raises(TypeError, match="expected a communicator of mpi4py"):
            mpidist.new_world(what)
    for function in (mpidist.new_world, mpidist.init):
        with pytest.raises(ValueError, match="COMM_NULL"):
            function(mpi.COMM_NULL)
        freed = everyone.Dup()
        freed.Free()
        with pytest.raises(ValueError, match="freed"):
            function(freed)
    mpidist.barrier()


def test_an_inter_communicator_is_refused(mpi, everyone):
    if everyone.size == 1:
        assert not mpi.COMM_SELF.Is_inter()
        return
    side = everyone.Split(everyone.rank % 2, everyone.rank)
    inter = side.Create_intercomm(0, everyone, 1 - everyone.rank % 2, tag=5)
    for function in (mpidist.new_world, mpidist.init):
        with pytest.raises(ValueError, match=r"inter-communicator.*Merge\(\)"):
            function(inter)
    merged = inter.Merge()
    with mpidist.new_world(merged):
        assert sorted(mpidist.all_gather_object(everyone.rank)) == list(range(everyone.size))
    for comm in (merged, inter, side):
        comm.Free()


def test_init_with_other_ranks_than_those_of_the_world_is_refused(mpi, everyone):
    if everyone.size == 1:
        assert mpidist.init(mpi.COMM_SELF) is mpidist.init()
        return
    text = f"is rank {everyone.rank} of {everyone.size} already, in a world of other ranks than these 1"
    with pytest.raises(RuntimeError, match=text):
        mpidist.init(mpi.COMM_SELF)
    reordered = everyone.Split(0, -everyone.rank)
    with pytest.raises(RuntimeError, match="new_world"):
        mpidist.init(reordered)
    reordered.Free()
    mpidist.barrier()


def test_init_is_refused_inside_a_world(mpi, half):
    with half, pytest.raises(RuntimeError, match="leave the `with world:` block"):
        mpidist.init(mpi.COMM_WORLD)


def test_blocks_are_left_in_the_opposite_order(half):
    whole = mpidist.init()
    half.__enter__()
    whole.__enter__()
    with pytest.raises(RuntimeError, match="opposite order"):
        half.__exit__()
    whole.__exit__()
    half.__exit__()
    assert mpidist.size() == whole.size


def test_parameter_servers_are_not_made_inside_a_world(half):
    with half, pytest.raises(RuntimeError, match=r"cannot be made inside `with world:`.*mpidist.init\(comm\)"):
        mpidist.ParameterServerStrategy()
