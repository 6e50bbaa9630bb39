"""A gradient that differs between ranks is named by its variable."""

import numpy
import pytest

import mpidist
from mpidist.errors import CollectiveMismatchError
from mpidist.testing import run_ranks


def _train(variable_shapes, bad):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(shape), name=name) for name, shape in variable_shapes.items()]
        optimizer = mpidist.optimizers.SGD(0.1)

    def step():
        gradients = [numpy.ones(variable.shape) for variable in variables]
        if mpidist.get_replica_context().replica_id_in_sync_group == 1 and bad is not None:
            gradients[bad] = None
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    strategy.run(step)


@pytest.mark.filterwarnings("ignore:gradients are None")
def test_a_gradient_that_one_rank_leaves_out():
    with pytest.raises(CollectiveMismatchError) as caught:
        run_ranks(2, _train, {"kernel": (2, 3), "bias": (3,), "scale": (1,)}, 1)
    assert "passed 2 tensors" in str(caught.value) and "passed 3 tensors" in str(caught.value)


@pytest.mark.filterwarnings("ignore:gradients are None")
def test_the_variable_is_named():
    with pytest.raises(CollectiveMismatchError, match=r"'bias' float64 \(3,\)"):
        run_ranks(2, _train, {"kernel": (2, 3), "bias": (3,)}, 0)
