"""Random trainings: models, optimizers, data, saves; drawn from a seed, the same on any number of ranks.

`Case.of(seed)` is a training, `train` runs it on this rank.  The gradients are written by hand and computed in float64;
a rank rounds them once, to the dtype of the variable.  So it is known how far rounding alone can move the gradient of
the global batch, and `train` can move it so far on purpose (`noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy

import mpidist
from mpidist import optimizers
from mpidist.training.callbacks import Callback, ModelCheckpoint

SIZES = [2, 3, 5]
INPUTS = 3

#: Of a dtype the unit roundoff, and half of the smallest number.
ROUNDOFF = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-25, "float32": 2.0**-150, "float64": 0.0}

#: A gradient is rounded when it is made and when the sum is; products and sums of at most so many ranks, in
#: float32 at least, are rounded too.
ROUNDINGS, PARTS = 2, 2 * max(SIZES)

#: Loss scales bring the largest gradient of a row so near to the ends of the range of the narrowest dtype; there has to
#: be room for parameters that change, and in float32 for the sum of several micro-batches.
RANGES = {"huge": {"float16": 2.0**15, "float32": 2.0**124}, "tiny": {"float16": 2.0**-16, "float32": 2.0**-120}}

RATES = {
    "sgd": 0.1,
    "momentum": 0.05,
    "nesterov": 0.05,
    "adam": 0.01,
    "adamw": 0.01,
    "adagrad": 0.05,
    "rmsprop": 0.005,
    "lars": 0.1,
    "lamb": 0.01,
}
MAKERS: dict[str, Callable[..., Any]] = {
    "sgd": optimizers.SGD,
    "momentum": lambda rate, **options: optimizers.SGD(rate, momentum=0.9, **options),
    "nesterov": lambda rate, **options: optimizers.SGD(rate, momentum=0.9, nesterov=True, **options),
    "adam": lambda rate, **options: optimizers.Adam(rate, epsilon=1e-3, **options),
    "adamw": lambda rate, **options: optimizers.AdamW(rate, epsilon=1e-3, **options),
    "adagrad": optimizers.Adagrad,
    "rmsprop": lambda rate, **options: optimizers.RMSprop(rate, momentum=0.3, epsilon=1e-3, **options),
    "lars": lambda rate, **options: optimizers.LARS(rate, trust_coefficient=0.05, **options),
    "lamb": lambda rate, **options: optimizers.LAMB(rate, epsilon=1e-3, **options),
}
SCHEDULES: dict[str, Callable[[float], Any]] = {
    "constant": lambda rate: rate,
    "cosine": lambda rate: optimizers.schedules.CosineDecay(rate, 9),
    "warm up": lambda rate: optimizers.schedules.WarmUp(rate, 4),
    "function": lambda rate: lambda step: rate / (1 + step),
}
STRATEGIES = [
    "MultiWorkerMirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "MirroredStrategy",
    "CentralStorageStrategy",
]
LIMITS = {"clipnorm": 0.1, "clipvalue": 0.01, "global_clipnorm": 0.2}


@dataclass(frozen=True)
class Case:
    """A training; see `of` for what there is."""

    seed: int
    strategy: str
    dtypes: tuple[str, ...]
    hidden: int
    outputs: int
    scalar_bias: bool
    frozen_bias: bool
    optimizer: str
    schedule: str
    options: dict[str, Any]
    dynamic: bool
    magnitude: str
    rows: int
    batch: int
    data: str
    drop: bool
    shuffle: bool
    weights: bool
    epochs: int
    steps_per_epoch: int | None
    validation: bool
    size: int
    stops: tuple[tuple[int, int], ...]
    save_freq: int | str
    is_fused: bool

    @classmethod
    def of(cls, seed: int) -> Case:
        """Return the case of a seed."""
        random = numpy.random.default_rng(seed)

        def chance(share: float) -> bool:
            return bool(random.random() < share)

        def one_of(*choices: Any) -> Any:
            return choices[random.integers(len(choices))]

        number = int(random.integers(1, 5))
        same = one_of("float16", "float32", "float64", None)
        dtypes = tuple(same or one_of("float16", "float32", "float64") for _ in range(number))
        options: dict[str, Any] = {}
        if limit := one_of(None, None, *LIMITS):
            options[limit] = LIMITS[limit]
        if chance(0.3):
            options["weight_decay"] = 0.01
        if chance(0.5):
            options["gradient_accumulation_steps"] = int(random.integers(2, 5))
        if chance(0.2):
            options["skip_nonfinite"] = True
        dynamic = chance(0.25)
        data = one_of("arrays", "arrays", "dataset", "dataset", "repeated", "generator", "list", "own")
        rows, batch = int(random.integers(1, 41)), int(random.integers(1, 12))
        if chance(0.4):
            rows = rows // batch * batch + 1  # the last batch leaves most ranks without rows
        epochs, per_epoch = int(random.integers(1, 4)), int(random.integers(1, 7)) if data == "repeated" else None
        steps = epochs * (per_epoch or -(-rows // batch))
        ends = sorted(random.integers(1, steps + 1, size=random.integers(1, 4)).tolist())
        return cls(
            seed=seed,
            strategy=one_of(*STRATEGIES),
            dtypes=dtypes,
            hidden=int(random.integers(1, 7)),
            outputs=int(random.integers(1, 4)),
            scalar_bias=chance(0.3),
            frozen_bias=chance(0.15),
            optimizer=one_of(*MAKERS),
            schedule=one_of("constant", *SCHEDULES),
            options=options,
            dynamic=dynamic,
            magnitude="as it is" if dynamic else one_of("as it is", "huge", "tiny"),
            rows=rows,
            batch=batch,
            data=data,
            drop=data in ("dataset", "generator") and rows >= batch and chance(0.3),
            shuffle=chance(0.5),
            weights=data == "arrays" and chance(0.4),
            epochs=epochs,
            steps_per_epoch=per_epoch,
            validation=chance(0.4),
            size=one_of(*SIZES),
            stops=tuple((one_of(1, *SIZES), end) for end in ends) if data != "own" and chance(0.8) else (),
            save_freq=one_of(1, 1, 2, 3, "epoch"),
            is_fused=chance(0.4),
        )


# -- the model --------------------------------------------------------------------------------------------------------


class Network:
    """A layer of one or two variables, behind another one of tanh where there are more; the loss is a square error."""

    def __init__(self, case: Case) -> None:
        random = numpy.random.default_rng([case.seed, 1])
        layers = (
            [(INPUTS, case.outputs)] if len(case.dtypes) < 3 else [(INPUTS, case.hidden), (case.hidden, case.outputs)]
        )
        self.values, self.is_bias = [], []
        for inputs, outputs in layers:
            shape = (inputs, 1, outputs) if random.random() < 0.3 else (inputs, outputs)
            self.values += [random.normal(size=shape) / inputs**0.5]
            self.values += [numpy.zeros(() if case.scalar_bias else outputs)]
            self.is_bias += [False, True]
        self.number = len(case.dtypes)
        self.values, self.is_bias = self.values[: self.number], self.is_bias[: self.number]

    def forward(self, parameters: list[Any], x: Any) -> list[Any]:
        """Return what goes into every layer, and what comes out of the last."""
        found, wide = [x.astype("float64")], [numpy.asarray(each).astype("float64") for each in parameters]
        for first in range(0, self.number, 2):
            out = found[-1] @ wide[first].reshape(found[-1].shape[1], -1)
            if first + 1 < self.number:
                out = out + wide[first + 1]
            found.append(numpy.tanh(out) if first + 2 < self.number else out)
        return found

    def predict(self, parameters: list[Any], x: Any) -> Any:
        """Return the outputs."""
        return self.forward(parameters, x)[-1]

    def value_and_grad(self, parameters: list[Any], x: Any, y: Any, weights: Any = None) -> Any:
        """Return ((loss, outputs), gradients, mean magnitudes of what the rows add to these)."""
        *inputs, out = self.forward(parameters, x)
        weights = numpy.ones(len(x)) if weights is None else weights
        error = out - y
        loss = float((weights * (error**2).mean(axis=1)).mean())
        back, gradients, magnitudes = 2 * error * weights[:, None] / error.shape[1], [], []
        for layer in reversed(range(len(inputs))):
            shapes = [numpy.shape(each) for each in parameters[2 * layer : 2 * layer + 2]]
            found, sizes = _of_layer(inputs[layer], back, shapes), _of_layer(abs(inputs[layer]), abs(back), shapes)
            gradients, magnitudes = [*found, *gradients], [*sizes, *magnitudes]
            matrix = numpy.asarray(parameters[2 * layer]).astype("float64").reshape(inputs[layer].shape[1], -1)
            back = back @ matrix.T * (1 - inputs[layer] ** 2)
        return (loss, out), gradients, magnitudes


def _of_layer(inputs: Any, back: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    found = [(inputs.T @ back / len(inputs)).reshape(shapes[0])]
    if len(shapes) == 2:
        found.append(back.mean(axis=0) if shapes[1] else back.sum(axis=1).mean())
    return found


# -- a training -------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """What a training ends with that is to go on later."""


class EndAt(Callback):
    """Ends the training on all ranks, after a step: as an error would, or in good order."""

    def __init__(self, step: int, in_order: bool) -> None:
        self.step, self.in_order = step, in_order

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        if self.trainer.steps_made >= self.step:
            if not self.in_order:
                raise Interrupted
            self.trainer.stop_now()


def optimizer_of(case: Case, network: Network) -> Any:
    """Return the optimizer of a case."""
    rate = SCHEDULES[case.schedule](RATES[case.optimizer])
    made = MAKERS[case.optimizer](rate, loss_scale_factor=loss_scale_of(case, network), **case.options)
    if case.seed % 2:
        made.exclude_from_weight_decay(var_names=["bias"])
    return optimizers.LossScaleOptimizer(made, 16.0, 3) if case.dynamic else made


def loss_scale_of(case: Case, network: Network) -> float:
    """Return the power of 2 that brings the gradients to the magnitude of a case."""
    dtype = max(case.dtypes, key=ROUNDOFF.__getitem__)
    if case.magnitude == "as it is" or dtype == "float64":
        return 1.0
    x, y, weights = rows_of(case)
    rows = [network.value_and_grad(network.values, x[[n]], y[[n]], weights[[n]])[2] for n in range(case.rows)]
    largest = max(float(numpy.max(each)) for row in rows for each in row)
    return float(2.0 ** numpy.floor(numpy.log2(RANGES[case.magnitude][dtype] / largest)))


def gradients_of(case: Case, network: Network, optimizer: Any, noise: Any) -> Callable[..., Any]:
    """Return the function for the trainer."""

    def fn(parameters: list[Any], *batch: Any) -> Any:
        value, gradients, magnitudes = network.value_and_grad(parameters, *batch)
        found = []
        for gradient, magnitude, dtype in zip(gradients, magnitudes, case.dtypes, strict=True):
            scaled = numpy.asarray(optimizer.scale_loss(gradient))
            if noise is not None:
                unit = ROUNDINGS * ROUNDOFF[dtype] + PARTS * min(ROUNDOFF[dtype], ROUNDOFF["float32"])
                size = unit * numpy.asarray(optimizer.scale_loss(magnitude)) + ROUNDINGS * SMALLEST[dtype]
                scaled = scaled + size * noise.choice([-1, 1], size=numpy.shape(size))
            if case.dynamic and optimizer.loss_scale.scale > 64:  # an overflow on all ranks at once
                scaled = numpy.full(scaled.shape, numpy.inf)
            rounded = scaled.astype(dtype) if case.seed % 3 else scaled
            found.append(rounded.T.copy().T if case.seed % 5 == 0 else rounded)
        return value, found

    return fn


def rows_of(case: Case) -> tuple[Any, Any, Any]:
    """Return inputs, labels and weights."""
    random = numpy.random.default_rng([case.seed, 2])
    x, y = random.normal(size=(case.rows, INPUTS)), random.normal(size=(case.rows, case.outputs))
    if case.seed % 2:  # gradients that do not cancel
        x, y = x + 2, y - 3
    return x, y, random.uniform(0.2, 2, size=case.rows)


def data_of(case: Case, strategy: Any) -> tuple[Any, dict[str, Any]]:
    """Return the first argument of `fit`, and what goes with it."""
    x, y, weights = rows_of(case)
    if case.data == "arrays":
        options = {"sample_weight": weights} if case.weights else {}
        return x, {"y": y, "batch_size": case.batch, "shuffle": case.shuffle, "seed": case.seed, **options}
    if case.data in ("list", "own"):
        batches = [(x[at : at + case.batch], y[at : at + case.batch]) for at in range(0, case.rows, case.batch)]
        batches.insert(case.seed % (len(batches) + 1), (x[:0], y[:0]))
        if case.data == "list":
            return Batches(batches), {}
        return strategy.distribute_datasets_from_function(lambda context: list(own_parts(case, batches, context))), {}
    if case.data == "generator":
        made = mpidist.data.Dataset.from_generator(lambda: zip(x, y, strict=True))
    else:
        made = mpidist.data.Dataset.from_arrays((x, y))
    if case.shuffle:
        made = made.shuffle(7, seed=case.seed)
    made = made.repeat() if case.data == "repeated" else made
    return made.batch(case.batch, drop_remainder=case.drop), {"steps_per_epoch": case.steps_per_epoch}


class Batches:
    """Batches that can be walked through again and have no length, as some loaders give them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def own_parts(case: Case, batches: list[Any], context: Any) -> Iterator[Any]:
    """Yield a rank's parts of global batches that are cut anywhere."""
    random, pipelines, number = (
        numpy.random.default_rng([case.seed, 3]),
        context.num_input_pipelines,
        context.input_pipeline_id,
    )
    for x, y in batches:
        cuts = sorted(random.integers(0, len(x) + 1, size=pipelines - 1).tolist())
        mine = slice([0, *cuts][number], [*cuts, len(x)][number])
        yield x[mine], y[mine]


@dataclass(frozen=True)
class Result:
    """What came of a training.

    Attributes
    ----------
    numbers : dict of str to array
        Right to rounding.
    counts : tuple
        Right.
    """

    numbers: dict[str, Any]
    counts: tuple[Any, ...]


def train(case: Case, noise_seed: int | None = None, folder: Any = None, stop: int | None = None) -> Result:
    """Train on this rank; from the newest checkpoint of a folder, and up to a step, where these are given.

    Collective: every rank calls it in the same order.  Some cases raise `Interrupted` at that step.
    """
    strategy, network = getattr(mpidist, case.strategy)(), Network(case)
    with strategy.scope():
        variables = [
            mpidist.Variable(value.astype(dtype), name=f"bias{n}" if is_bias else f"w{n}", trainable=not is_frozen)
            for n, (value, dtype, is_bias, is_frozen) in enumerate(_described(case, network))
        ]
        optimizer = optimizer_of(case, network)
    noise = None if noise_seed is None else numpy.random.default_rng([case.seed, 4, noise_seed])
    fn = gradients_of(case, network, optimizer, noise)
    trainer = mpidist.Trainer(fn, variables, optimizer, metrics=["mae"], predict_fn=network.predict)
    callbacks: list[Callback] = (
        [] if folder is None else [ModelCheckpoint(folder, save_freq=case.save_freq, resume=True)]
    )
    callbacks += [] if stop is None else [EndAt(stop, in_order=case.seed % 7 < 4)]
    data, options = data_of(case, strategy)
    x, y, _ = rows_of(case)
    if case.validation:
        options |= {"validation_data": (x[:7], y[:7]), "validation_batch_size": 3}
    history = trainer.fit(data, epochs=case.epochs, verbose=0, callbacks=callbacks, **options)
    numbers = {f"variable {variable.name}": variable.numpy() for variable in variables}
    for variable in trainer._model.trainable:
        numbers |= {f"{name} of {variable.name}": numpy.array(slot) for name, slot in optimizer.slots(variable).items()}
    for name, values in history.history.items():
        numbers |= {f"{name} of epoch {epoch}": value for epoch, value in zip(history.epoch, values, strict=True)}
    numbers["evaluate"] = numpy.array(trainer.evaluate(x, y, batch_size=case.batch + 1))
    numbers["predict"] = trainer.predict(x, batch_size=case.batch)
    counts = (optimizer.iterations, optimizer.skipped_steps, optimizer.loss_scale.scale, optimizer.micro_step)
    return Result(
        {name: numpy.asarray(each, "float64") for name, each in numbers.items()}, (*counts, trainer.steps_made)
    )


def _described(case: Case, network: Network) -> Iterator[tuple[Any, str, bool, bool]]:
    for value, dtype, is_bias in zip(network.values, case.dtypes, network.is_bias, strict=True):
        yield value, dtype, is_bias, is_bias and case.frozen_bias
