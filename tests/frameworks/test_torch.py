"""PyTorch: tensors of variables' values without warnings, and autograd that never sees an update."""

from __future__ import annotations

import warnings

import numpy
import pytest

import mpidist
from mpidist.errors import CollectiveMismatchError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mpi

ROWS, COLUMNS = 70, 4


@pytest.fixture(autouse=True)
def no_warnings():
    torch.set_warn_always(True)  # by itself, it says once in a process that memory is not writable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def made(strategy, *values):
    with strategy.scope():
        return [mpidist.Variable(numpy.asarray(value, "f4")) for value in values], mpidist.optimizers.SGD(0.5)


def data():
    x = numpy.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype("f4")
    return x, (x[:, 0] > 0).astype("f4")


def expected(batch_size):
    """Return parameters, and loss and accuracy of the epoch, of logistic regression by NumPy."""
    (x, y), w = data(), numpy.zeros(COLUMNS)
    losses, hits = [], []
    for first in range(0, ROWS, batch_size):
        rows, labels = x[first : first + batch_size], y[first : first + batch_size]
        scores = 1 / (1 + numpy.exp(-rows @ w))
        losses += (-numpy.log(numpy.where(labels == 1, scores, 1 - scores))).tolist()
        hits += ((scores > 0.5) == labels).tolist()
        w -= 0.5 * rows.T @ (scores - labels) / len(rows)
    return w, numpy.mean(losses), numpy.mean(hits)


def value_and_grad(parameters, x, y):
    """As a user writes it: everything that is returned is a tensor, and loss and scores need a gradient."""
    (w,) = (torch.from_numpy(each).requires_grad_() for each in parameters)
    logits = torch.from_numpy(x) @ w
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(y))
    (gradient,) = torch.autograd.grad(loss, [w], retain_graph=True)
    return (loss, torch.sigmoid(logits)), [gradient]


def predict(parameters, x):
    return torch.from_numpy(x) @ torch.from_numpy(parameters[0]).requires_grad_()


@pytest.mark.parametrize("batch_size", [16, 35])
def test_a_trainer_gives_what_numpy_gives(batch_size):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    (x, y), (variables, optimizer) = data(), made(strategy, numpy.zeros(COLUMNS))
    trainer = mpidist.Trainer(value_and_grad, variables, optimizer, metrics=["accuracy"], predict_fn=predict)
    history = trainer.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0).history
    w, loss, accuracy = expected(batch_size)
    numpy.testing.assert_allclose(variables[0].value, w, rtol=1e-4)
    numpy.testing.assert_allclose([history["loss"], history["accuracy"]], [[loss], [accuracy]], rtol=1e-5)
    numpy.testing.assert_allclose(trainer.predict(x), x @ variables[0].value, rtol=1e-5, atol=1e-6)
    assert trainer.evaluate(x, y, return_dict=True).keys() == {"loss", "accuracy"}


@pytest.mark.parametrize("take", [
    lambda v: torch.tensor(v.value),
    lambda v: torch.from_numpy(v.numpy()),
    lambda v: torch.from_numpy(v.read_value()),
    lambda v: _in_spite_of_the_warning(v.value),
    lambda v: _in_spite_of_the_warning(v.value[1:]),
])  # fmt: skip
@pytest.mark.parametrize("kind", [
    mpidist.MultiWorkerMirroredStrategy,
    mpidist.experimental.CentralStorageStrategy,
])  # fmt: skip
def test_a_backward_pass_after_the_update_is_of_the_values_before(kind, take):
    strategy = kind()
    (w,), optimizer = made(strategy, numpy.full((512, 512), 3))
    for step in range(3):
        tensor = take(w).requires_grad_()
        square = (tensor * tensor).sum()  # autograd keeps the tensor
        gradient = numpy.full((512, 512), 2 / strategy.num_replicas_in_sync, "f4")
        strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, w)]))
        square.backward()
        assert (tensor.grad == 2 * (3 - step)).all() and (w.value == 2 - step).all()


def _in_spite_of_the_warning(value):
    """Share memory with a value: PyTorch warns, but nobody writes there."""
    with pytest.warns(UserWarning, match="not writable"):
        return torch.from_numpy(value)


def test_batch_normalization_cannot_lose_its_statistics():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    (mean, variance, w), optimizer = made(strategy, numpy.zeros(COLUMNS), numpy.ones(COLUMNS), 0.0)

    def function(parameters, x):
        mean, variance, w = map(torch.from_numpy, parameters)
        w.requires_grad_()
        normalized = torch.nn.functional.batch_norm(torch.from_numpy(x), mean, variance, training=True)
        loss = (normalized * w).mean()
        return loss, [None, None, *torch.autograd.grad(loss, [w])]

    for each in (mean, variance):
        each.trainable = False
    trainer = mpidist.Trainer(function, [mean, variance, w], optimizer)
    with pytest.raises(ValueError, match="wrote to its copy of the value of variable"):
        trainer.fit(data()[0], batch_size=ROWS, verbose=0)


def test_batches_of_a_data_loader():
    x, y = map(torch.from_numpy, data())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    variables, optimizer = made(strategy, numpy.zeros(COLUMNS))
    mpidist.Trainer(value_and_grad, variables, optimizer).fit(loader, verbose=0)
    numpy.testing.assert_allclose(variables[0].value, expected(16)[0], rtol=1e-4)


@pytest.mark.mpi(min_size=2)
def test_a_loader_that_shuffles_otherwise_on_each_rank_is_refused():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    generator = torch.Generator().manual_seed(strategy.extended.replica_id)
    rows = torch.utils.data.TensorDataset(*map(torch.from_numpy, data()))
    loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True, generator=generator)
    with pytest.raises(CollectiveMismatchError, match="checksum of what was read for step 0"):
        list(strategy.experimental_distribute_dataset(loader))
