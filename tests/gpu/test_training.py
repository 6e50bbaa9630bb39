"""Checkpoints, `Trainer`, metrics and data sets with a model whose arrays lie on a GPU; held against NumPy alone."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.data import Dataset
from tests.gpu.library import check_on_all_ranks, host, is_own, place, problems_of, slowly, strategy

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing"),
]

ROWS, HIDDEN = 29, 5
EXAMPLES = Path(__file__).parents[2] / "examples"


def alone():
    return mpidist.OneDeviceStrategy("/cpu:0")


def rows():
    random = numpy.random.default_rng(0)
    x = random.normal(size=(ROWS, 3))
    return x, (x.sum(axis=1, keepdims=True) + random.normal(size=(ROWS, 1)) > 0).astype("f8")


class Net:
    """A small smooth network on the arrays of a library; inputs and labels may be of any."""

    def __init__(self, xp, where, optimizer=None):
        random = numpy.random.default_rng(7)
        shapes = {"w1": (3, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 1)}
        self.xp, self.strategy = xp, where
        with where.scope():
            self.variables = {
                name: mpidist.Variable(xp.asarray(random.normal(0, 0.5, shape)), name=name)
                for name, shape in shapes.items()
            }
            self.optimizer = optimizer() if optimizer else mpidist.optimizers.Adam(0.05)
        self.checkpoint = mpidist.Checkpoint(optimizer=self.optimizer, **self.variables)

    def predict(self, parameters, x):
        xp = self.xp
        hidden = xp.tanh(xp.asarray(x) @ parameters["w1"] + parameters["b1"])
        return 1 / (1 + xp.exp(-(hidden @ parameters["w2"])))

    def value_and_grad(self, parameters, x, y):
        xp = self.xp
        x, y = xp.asarray(x), xp.asarray(y)
        hidden = xp.tanh(x @ parameters["w1"] + parameters["b1"])
        p = 1 / (1 + xp.exp(-(hidden @ parameters["w2"])))
        loss = -(y * xp.log(p) + (1 - y) * xp.log(1 - p)).mean()
        error = (p - y) / len(x)
        back = error @ parameters["w2"].T * (1 - hidden**2)
        return (loss, p), {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error}

    def trainer(self, **options):
        options = {"metrics": ["accuracy", "mse"], "predict_fn": self.predict, **options}
        return mpidist.Trainer(self.value_and_grad, self.variables, self.optimizer, **options)

    def steps(self, first, last):
        """Train on this rank's rows of some batches: uneven ones."""
        size, rank = self.strategy.num_replicas_in_sync, self.strategy.extended.replica_id
        x, y = rows()
        at = [*(ROWS * each // (size + 1) for each in range(size)), ROWS]
        part = slice(at[rank], at[rank + 1])

        def step(x, y):
            _, gradients = self.value_and_grad({name: v.value for name, v in self.variables.items()}, x, y)
            scaled = {name: gradient * (len(x) / ROWS) for name, gradient in gradients.items()}
            self.optimizer.apply_gradients([(scaled[name], v) for name, v in self.variables.items()])

        for number in range(first, last):
            self.strategy.run(step, args=(x[part] + number, y[part]))
        return self

    def values(self):
        return [v.numpy() for v in self.variables.values()]

    def problem(self, expected):
        lies = all(is_own(self.xp, v.value) for v in self.variables.values())
        problem = problems_of(numpy, self.values(), expected, rtol=1e-11, atol=1e-12)
        return problem if lies else "variables lie elsewhere"


@pytest.mark.parametrize("to_card", [False, True])
def test_a_checkpoint_of_one_is_restored_on_the_other(xp, directory, to_card):
    """From the card to the host, and back: the training goes on as if it had never been interrupted."""
    whole = Net(numpy, alone()).steps(0, 8).values()
    kinds = [numpy, xp] if to_card else [xp, numpy]
    first, second = (Net(each, strategy()) for each in kinds)
    first.steps(0, 5).checkpoint.save(directory / "c.h5")
    second.steps(3, 4)  # has slots already, and other values
    second.checkpoint.restore(directory / "c.h5")
    problem = second.problem(first.values())
    slots = [second.optimizer.slots(v) for v in second.variables.values()]
    lies = all(is_own(kinds[1], slot) for each in slots for slot in each.values())
    check_on_all_ranks(problem or lies or "slots lie elsewhere")
    second.steps(5, 8)
    check_on_all_ranks(second.problem(whole))


def test_a_checkpoint_of_the_card_is_the_same_file(xp, directory):
    """One that a process alone can restore on the host."""
    net = Net(xp, strategy()).steps(0, 3)
    net.checkpoint.save(directory / "c.h5")
    other = Net(numpy, alone())
    other.checkpoint.restore(directory / "c.h5")
    check_on_all_ranks(problems_of(numpy, other.values(), net.values()))


@pytest.mark.parametrize("batch_size", [12, 5])
@pytest.mark.parametrize("make", [
    lambda: mpidist.optimizers.Adam(0.02),
    lambda: mpidist.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.3),
], ids=["adam", "sgd"])  # fmt: skip
def test_fit_evaluate_and_predict(xp, batch_size, make):
    x, y = rows()
    found = {}
    for name, net in (("card", Net(xp, strategy(), make)), ("alone", Net(numpy, alone(), make))):
        trainer = net.trainer()
        data = {"batch_size": batch_size, "validation_data": (x[:7], y[:7])}
        history = trainer.fit(x, y, epochs=2, verbose=0, **data).history
        evaluated = trainer.evaluate(x, y, batch_size=4, verbose=0)
        predicted = host(trainer.predict(x, batch_size=batch_size))
        found[name] = [*net.values(), *map(numpy.asarray, history.values()), evaluated, predicted]
    problems = [
        "" if numpy.allclose(ours, wanted, rtol=1e-9, atol=1e-11) else f"{ours} in place of {wanted}"
        for ours, wanted in zip(found["card"], found["alone"], strict=True)
    ]
    check_on_all_ranks("".join(problems))


class NetOfHostVariables(Net):
    """The same, of variables on the host."""

    def value_and_grad(self, parameters, x, y):
        return super().value_and_grad({name: self.xp.asarray(v) for name, v in parameters.items()}, x, y)


@pytest.mark.parametrize("batch_size", [12, 1])
def test_fit_with_variables_on_the_host(xp, batch_size):
    """A rank without rows, whose gradients are zeros, has them where those of the others go."""
    x, y = rows()
    nets = NetOfHostVariables(xp, mpidist.CentralStorageStrategy()), Net(numpy, alone())
    losses = [net.trainer(metrics=[]).fit(x, y, batch_size, 2, verbose=0).history["loss"] for net in nets]
    problem = problems_of(
        numpy, [v.numpy() for v in nets[0].variables.values()], nets[1].values(), rtol=1e-9, atol=1e-11
    )
    check_on_all_ranks(problem or bool(numpy.allclose(*losses, rtol=1e-9)) or f"{losses}")


def test_batches_of_a_data_set(xp):
    """In one's own loop, with a model that takes what the data set gives."""
    x, y = rows()
    found = {}
    for name, net in (("card", Net(xp, strategy())), ("alone", Net(numpy, alone()))):
        dataset = Dataset.from_arrays((x, y)).shuffle(seed=3).batch(12).repeat()
        seen = []

        def step(batch, net=net, seen=seen):
            x, y = batch
            seen.append(len(x))
            if not len(x):
                gradients = {each: net.xp.zeros(v.shape) for each, v in net.variables.items()}
            else:
                _, gradients = net.value_and_grad({each: v.value for each, v in net.variables.items()}, x, y)
            pairs = [(gradients[each] * len(x), v) for each, v in net.variables.items()]
            net.optimizer.apply_gradients(pairs)

        for _, batch in zip(range(6), net.strategy.experimental_distribute_dataset(dataset), strict=False):
            net.strategy.run(step, args=(batch,))
        found[name] = net
        total = sum(mpidist.all_gather_object(sum(seen)))
        assert total == 2 * ROWS * (1 if name == "card" else mpidist.size())
    check_on_all_ranks(found["card"].problem(found["alone"].values()))


M = mpidist.metrics
#: What is made, and the kinds of its labels and predictions.
METRICS = {
    "AUC": (M.AUC, "two"),
    "AUC, PR": (lambda: M.AUC(50, curve="PR"), "two"),
    "Accuracy": (M.Accuracy, "alike"),
    "BinaryAccuracy": (lambda: M.BinaryAccuracy(threshold=0.4), "two"),
    "CategoricalAccuracy": (M.CategoricalAccuracy, "one of five"),
    "MeanAbsoluteError": (M.MeanAbsoluteError, "one of five"),
    "MeanSquaredError": (M.MeanSquaredError, "two"),
    "Precision": (lambda: M.Precision([0.3, 0.6]), "two"),
    "Precision, top 2": (lambda: M.Precision(top_k=2, class_id=3), "one of five"),
    "Recall": (M.Recall, "two"),
    "SparseCategoricalAccuracy": (M.SparseCategoricalAccuracy, "class"),
    "SparseTopKCategoricalAccuracy": (lambda: M.SparseTopKCategoricalAccuracy(2), "class"),
    "TopKCategoricalAccuracy": (lambda: M.TopKCategoricalAccuracy(2), "one of five"),
    "a function": (lambda: M.get(lambda truth, scores: numpy.abs(truth - scores).mean(axis=-1)), "one of five"),
    "accuracy by shape": (lambda: M.get("accuracy"), "class"),
}


def labels_of(kind, count):
    random = numpy.random.default_rng(4)
    scores = random.uniform(size=(count, 5))
    classes = (scores + random.normal(size=scores.shape) / 3).argmax(axis=1)
    if kind == "two":
        return (classes[:, None] > 2).astype("f8"), scores[:, 3:4]
    if kind == "alike":
        return classes, scores.argmax(axis=1)
    return (classes if kind == "class" else numpy.eye(5)[classes]), scores


def test_all_metrics_are_tested():
    classes = {name.partition(",")[0] for name in METRICS}
    assert set(M.__all__) - {"Metric", "get", "Mean"} <= classes  # the mean is below


@pytest.mark.parametrize("labels", ["own", "host"])
@pytest.mark.parametrize("name", METRICS)
def test_metrics(xp, name, labels):
    """Of labels that lie where the predictions are, or on the host as a data set may have them; weighted, and not."""
    rank, size = place()
    make, kind = METRICS[name]
    truth, scores = labels_of(kind, 6 * size)
    weights = numpy.random.default_rng(5).uniform(size=6 * size)
    part, problems = slice(6 * rank, 6 * rank + 6), []
    for is_weighted in (False, True):
        with strategy().scope():
            metric = make()
        given = [truth[part], scores[part], *([weights[part]] if is_weighted else [])]
        slow = xp.zeros(given[1].shape, given[1].dtype)
        slowly(xp, slow, 0)
        given[1] = slow + xp.asarray(given[1])
        given = [xp.asarray(each) if labels == "own" else each for each in given]
        strategy().run(metric.update_state, given)
        one = make()
        one.update_state(truth, scores, *([weights] if is_weighted else []))
        found, wanted = numpy.asarray(metric.result()), numpy.asarray(one.result())
        problems.append("" if numpy.allclose(found, wanted, 0, 1e-9) else f"{found} in place of {wanted}")
    check_on_all_ranks("".join(problems))


def test_the_mean_of_losses(xp):
    rank, size = place()
    with strategy().scope():
        mean = mpidist.metrics.Mean("loss")
    strategy().run(mean.update_state, (xp.asarray(numpy.full(rank + 1, rank + 1.0)),))
    counts = numpy.arange(1, size + 1)
    wanted = (counts * counts).sum() / counts.sum()
    check_on_all_ranks(abs(float(mean.result()) - wanted) < 1e-12 or f"{mean.result()} in place of {wanted}")


def test_losses_divided_by_the_global_batch(xp):
    rank, size = place()
    losses = xp.asarray(numpy.full(4, rank + 1.0))
    found = strategy().run(lambda: mpidist.compute_average_loss(losses, global_batch_size=4 * size))
    assert float(host(found)) == pytest.approx((rank + 1) / size)


@pytest.mark.gpu(only=True)
def test_the_example_trains_to_the_numbers_of_the_host(xp, monkeypatch):
    """On images of its kind, which it finds in a package that may not be there."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import digits
    import train

    random = numpy.random.default_rng(1)
    images, labels = random.random((200, 8, 8), "f4"), numpy.eye(10, dtype="f4")[random.integers(0, 10, 200)]
    monkeypatch.setattr(digits, "load", lambda split: (digits.Digits(images, labels),) * 2)
    trained = []
    for device in ("gpu", "cpu"):
        options = train.parse_arguments(["--device", device, "--model", "mlp", "--batch-size", "30", "--epochs", "2"])
        training = train.Training(options, train.STRATEGIES[options.strategy](device))
        losses = [training.train_epoch() for _ in range(2)]
        trained.append((training, losses, training.test_accuracy()))
    (ours, *told), (host_s, *expected) = trained
    problem = "" if all(is_own(xp, each) for each in ours.parameters()) else "parameters lie elsewhere"
    problem += problems_of(
        numpy, [v.numpy() for v in ours.variables.values()], host_s.parameters(), rtol=1e-4, atol=1e-6
    )
    problem += "" if told == [pytest.approx(each, rel=1e-5) for each in expected] else f"{told} in place of {expected}"
    check_on_all_ranks(problem)
