"""What is assumed about Keras and is not in its documentation; each test says what would break."""

from __future__ import annotations

import importlib.util
import inspect

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

from tests.frameworks.keras_models import BACKEND, X, Y, compiled, deferred, sequential, stock

pytestmark = pytest.mark.mpi


def test_an_adapter_is_taken_as_the_input():
    """Else no input is cut: `mpidist.frameworks.keras.inputs.PartAdapter`."""
    from keras.src.trainers.data_adapters import get_data_adapter
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    adapter = DataAdapter()
    assert get_data_adapter(adapter) is adapter
    for name in ("get_jax_iterator", "get_torch_dataloader", "num_batches", "on_epoch_begin", "on_epoch_end"):
        assert hasattr(DataAdapter, name)


def test_batches_of_a_py_dataset_come_from_a_generator_that_may_be_replaced():
    """Else they come by Keras' own workers: `mpidist.frameworks.keras.inputs._FiniteBatches`."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    class Two(keras.utils.PyDataset):
        num_batches = 2

    adapter = PyDatasetAdapter(Two(workers=2), None, True)
    assert adapter.enqueuer is not None and adapter.shuffle and adapter.py_dataset.workers == 2
    adapter.enqueuer, adapter._finite_generator = None, lambda: iter([X, Y])
    assert [batch is each for batch, each in zip(adapter.get_numpy_iterator(), [X, Y], strict=True)] == [True, True]
    assert adapter._standardize_batch((X, Y)) == (X, Y)


def test_the_first_epoch_may_be_set_in_on_train_begin():
    """Else ranks other than the chief do not resume with it."""

    class Setting(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            assert self.model._initial_epoch is None
            self.model._initial_epoch = 2

    assert stock(sequential, compiled()).fit(X, Y, epochs=4, callbacks=[Setting()], verbose=0).epoch == [2, 3]


def test_a_step_applies_gradients_by_the_optimizer():
    """Else they are not reduced."""
    called = []
    model = stock(sequential, compiled())
    name = "apply" if BACKEND == "torch" else "stateless_apply"
    method = getattr(model.optimizer, name)

    def noted(*args, **kwargs):
        called.append(name)
        return method(*args, **kwargs)

    object.__setattr__(model.optimizer, name, noted)
    model.fit(X[:4], Y[:4], verbose=0)
    assert called


def test_fit_and_evaluate_ask_for_the_results_of_metrics_at_their_ends():
    """Else metrics would be those of this rank's rows."""
    asked = []

    class Asked(keras.Model):
        def get_metrics_result(self):
            asked.append(1)
            return {"loss": 17.0}

    inputs = keras.Input((3,))
    model = Asked(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    assert model.fit(X, Y, verbose=0).history == {"loss": [17.0]}
    assert model.evaluate(X, Y, verbose=0) == 17.0 and asked


def test_masks_are_found():
    """Else a mask of the outputs is not seen, and the loss is wrong without a word."""
    from keras.src.backend import get_keras_mask

    layer = keras.layers.Embedding(5, 3, mask_zero=True)
    layer.build()

    def mask(tokens):
        return get_keras_mask(layer(tokens)) * 1

    tokens = keras.ops.convert_to_tensor(numpy.array([[0, 1]]))
    assert keras.ops.convert_to_numpy(mask(tokens)).tolist() == [[0, 1]]
    if BACKEND == "jax":  # in a compiled step, too
        import jax

        assert jax.jit(mask)(tokens).tolist() == [[0, 1]]
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    mask = get_keras_mask(loss.call(keras.ops.array([-1, 1]), keras.ops.full((2, 2), 0.5)))
    assert keras.ops.convert_to_numpy(mask).tolist() == [False, True]


def test_the_losses_of_compile_are_found():
    """Else a loss that is no mean over rows is wrong without a word; their `call` may be put over."""
    model = stock(sequential, compiled(["mse"]))
    model.fit(X, Y, verbose=0)
    (found,) = model._compile_loss._flat_losses
    assert found.loss.fn is keras.losses.mean_squared_error
    vars(found.loss)["call"] = lambda y, outputs: keras.ops.full_like(outputs, 17.0)
    assert model._compile_loss(Y, X[:, :1]) == 17.0


def test_the_metrics_of_compile_are_found():
    """Else a metric that is one number for all rows is wrong without a word; its function may be put over."""
    model = stock(sequential, compiled(metrics=["mae"]))
    model.fit(X, Y, verbose=0)
    _, listed = model.metrics
    (metric,) = listed.metrics
    assert isinstance(metric, keras.metrics.MeanMetricWrapper) and metric._fn is keras.losses.mean_absolute_error
    vars(metric)["_fn"] = lambda y, outputs: keras.ops.full_like(outputs, 17.0)
    metric.reset_state()
    metric.update_state(Y, X[:, :1])
    assert metric.result() == 17.0


def test_layers_of_layers_are_found():
    """Else layers that cannot be right are not seen."""
    inner = keras.Sequential([keras.layers.Dense(2, activity_regularizer="l2"), keras.layers.Dense(1)])
    model = keras.Sequential([keras.Input((3,)), inner])
    found = [getattr(each, "activity_regularizer", None) for each in model._flatten_layers()]
    assert sum(each is not None for each in found) == 1


def test_a_model_is_built_without_values():
    """Else a model's first call would compute with weights that are not those of rank 0."""
    from keras.src.backend import compute_output_spec

    model = deferred()
    found = compute_output_spec(model.__call__, keras.KerasTensor((5, 3)))
    assert tuple(found.shape) == (5, 1) and isinstance(found, keras.KerasTensor) and model.built


def test_a_stateless_scope_is_seen():
    """Else the call of a model that is traced gives rank 0's weights to all."""
    from keras.src.backend import in_stateless_scope

    assert not in_stateless_scope()
    with keras.StatelessScope():
        assert in_stateless_scope()
    assert not in_stateless_scope()


def test_results_are_listed_in_the_order_of_metrics():
    """Else `evaluate` gives a list in another order."""
    model = stock(sequential, compiled())
    model.evaluate(X, Y, verbose=0)
    assert model._flatten_metrics_in_order({"mse": 3.0, "loss": 1.0, "mae": 2.0}) == [1.0, 2.0, 3.0]


def test_a_layer_has_its_statistics_in_a_list():
    """Else changes of Keras' own layers are refused as of unknown meaning."""
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    assert [each.name for each in layer._non_trainable_variables] == ["moving_mean", "moving_variance"]
    assert [each.name for each in layer._trainable_variables] == ["gamma", "beta"]


def test_seeds_have_a_name():
    """Else dropout is the same on all replicas."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.build((None, 3))
    assert [tuple(each.shape) for each in model.variables if each.name == "seed_generator_state"] == [(2,)]


def test_numbers_without_a_seed_ask_one_generator(monkeypatch):
    """Else they are the same on all replicas."""
    from keras.src.random import seed_generator

    found, asked = keras.random.SeedGenerator(3), []
    monkeypatch.setattr(seed_generator, "global_seed_generator", lambda: asked.append(1) or found)
    keras.random.uniform((2,))
    keras.random.normal((2,))
    assert len(asked) == 2


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
def test_dropout_without_a_seed_asks_the_generator_of_pytorch(monkeypatch):
    """Else dropout is the same on all replicas, or a step need not care."""
    import torch
    from keras.src.backend.torch import random

    def state():
        return torch.default_generator.get_state()

    before, layer = state(), keras.layers.Dropout(0.5)
    layer(X, training=True)
    assert not torch.equal(state(), before)
    seed = keras.ops.convert_to_numpy(layer.seed_generator.state)
    assert isinstance(random.torch_seed_generator(layer.seed_generator), torch.Generator)
    assert list(keras.ops.convert_to_numpy(layer.seed_generator.state) - seed) == [0, 1]
    monkeypatch.setattr(random, "dropout", lambda inputs, rate, noise_shape=None, seed=None: "replaced")
    assert layer(X, training=True) == keras.random.dropout(X, 0.5) == "replaced"


def test_learning_rates_have_a_name():
    """Else each rank has its own."""
    assert [each.name for each in keras.optimizers.Adam(0.5).variables].count("learning_rate") == 1


def test_the_class_of_a_model_can_be_replaced():
    """Else nothing can be distributed."""
    model = stock(sequential, compiled())
    model.__class__ = type("Derived", (type(model),), {})
    assert len(model.fit(X, Y, verbose=0).history["loss"]) == 1


def test_registered_classes_are_found_by_their_names():
    """Else copies of a distributed model are not of the class that was registered."""
    from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

    kind = keras.saving.register_keras_serializable("canaries")(type("Named", (keras.Model,), {}))
    assert GLOBAL_CUSTOM_NAMES.pop(kind) == "canaries>Named"


def test_what_is_added_is_assigned():
    """Else sums of variables of layers are not seen, or refused."""
    variable = keras.Variable(numpy.zeros(2, "f4"), trainable=False, aggregation="sum")
    assigned = []
    vars(variable)["assign"] = assigned.append
    variable.assign_add(numpy.ones(2, "f4"))
    variable.assign_sub(numpy.ones(2, "f4"))
    assert len(assigned) == 2 and variable.aggregation == "sum"


def test_a_layer_says_what_it_computes_in():
    """Else gradients that overflow in one process do not on several ranks."""
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    layer.build((None, 3))
    assert layer.compute_dtype == "float16"
    assert [each._autocast for each in layer._trainable_variables] == [True, True]


def test_arguments_have_their_names():
    """Else they are not seen."""
    named = {"x", "y", "sample_weight", "batch_size", "validation_data", "validation_split", "validation_batch_size"}
    named |= {"steps_per_epoch", "validation_steps", "shuffle", "class_weight", "callbacks", "verbose"}
    assert named <= inspect.signature(keras.Model.fit).parameters.keys()
    assert {"x", "y", "y_pred", "sample_weight"} <= inspect.signature(keras.Model.compute_loss).parameters.keys()


def test_variables_of_metrics_are_summed():
    """Else the states of metrics are put together in another way than their variables say."""
    metric = keras.metrics.Mean()
    assert {getattr(each, "aggregation", "sum") for each in metric.variables} <= {"sum", "mean"}


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
def test_tensors_count_their_changes():
    """Else changed statistics are not reduced."""
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    before = layer.moving_mean.value._version
    layer(keras.ops.convert_to_tensor(X), training=True)
    assert layer.moving_mean.value._version > before


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_variables_that_a_step_leaves_alone_are_the_same_objects():
    """Else frozen layers are reduced in each step, which costs time and may change their last bits."""
    import jax

    model = keras.Sequential([
        keras.Input((3,)),
        keras.layers.Dense(2, trainable=False),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ])  # fmt: skip
    compiled()(model)
    model.fit(X, Y, verbose=0)
    found = []

    def step(*state):
        _, after = model.train_step(state, (X, Y))
        found.extend(new is old for old, new in zip(state[1], after[1], strict=True))
        return after

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    jax.jit(step)(*[[each.value for each in group] for group in groups])
    names = [each.name for each in model.non_trainable_variables]
    assert dict(zip(names, found, strict=True)) == {
        "kernel": True,
        "bias": True,
        "moving_mean": False,
        "moving_variance": False,
    }


def test_a_model_is_built_by_the_first_batch_of_an_iterator():
    """Else the variables of a model on servers are not known before its first batch is computed."""
    model = stock(deferred, compiled())
    model._symbolic_build(iterator=iter([(0, 0, [(X[:4], Y[:4], None)])]))
    assert model.built and model.optimizer.built and len(model.metrics_variables) > 2


def test_how_an_optimizer_names_what_it_keeps():
    """Else the optimizer of a model on servers is saved without its slots."""
    cases = [(keras.optimizers.Adam(), ("momentum", "velocity")), (keras.optimizers.Adagrad(), ("accumulator",))]
    for optimizer, slots in cases:
        model = stock(sequential, compiled(optimizer=lambda optimizer=optimizer: optimizer))
        optimizer.build(model.trainable_variables)
        expected = [f"{each.path.replace('/', '_')}_{slot}" for each in model.trainable_variables for slot in slots]
        assert {each.name for each in optimizer.variables} == {"iteration", "learning_rate", *expected}


def test_what_an_optimizer_keeps_of_its_steps_and_its_learning_rate():
    """Else a model on servers has other steps than they, or a schedule of another rate."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=3)
    assert optimizer._learning_rate is schedule and not callable(keras.optimizers.SGD()._learning_rate)
    optimizer._iterations.assign(7)
    assert int(optimizer.iterations) == 2


def test_how_a_model_was_compiled_and_validates():
    """Else workers are told nothing of a loss of the user's, and a generator is validated with other batches."""
    from mpidist.frameworks.keras import backends

    model = stock(sequential, compiled())
    model.optimizer.build(model.trainable_variables)
    assert model.optimizer._trainable_variables == model.trainable_variables
    assert model._compile_config.config["optimizer"] is model.optimizer
    kinds = {"jax": "JAXEpochIterator", "torch": "TorchEpochIterator"}
    assert kinds[BACKEND] in [each.__name__ for each in backends.seam().EpochIterator.__mro__]
    model._eval_epoch_iterator = backends.seam().EpochIterator(x=X, y=Y, batch_size=4, steps_per_epoch=1)
    found = model.evaluate(X, Y, verbose=0, _use_cached_eval_dataset=True)
    numpy.testing.assert_allclose(found, model.evaluate(X[:4], Y[:4], verbose=0), rtol=1e-5)


def test_where_keras_makes_tensors_and_takes_batches(monkeypatch):
    """Else all ranks work on one GPU, and batches are taken one ahead there."""
    if BACKEND == "torch":
        from keras.src.backend.torch import core

        monkeypatch.setattr(core, "DEFAULT_DEVICE", "meta")
        assert core.get_device() == "meta"
        assert keras.ops.zeros(3).device.type == "meta"
        return
    from keras.src.backend.jax import trainer

    class Own(trainer.JAXEpochIterator):
        def _get_iterator(self):
            return [(X[:4], Y[:4])]

    monkeypatch.setattr(trainer, "JAXEpochIterator", Own)
    model = stock(sequential, compiled())
    found = model.evaluate(X, Y, batch_size=8, verbose=0)
    numpy.testing.assert_allclose(found, model.evaluate(X[:4], Y[:4], verbose=0), rtol=1e-5)


def test_what_is_excluded_from_weight_decay():
    """Else it decays on servers."""
    names = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"
    optimizer = keras.optimizers.AdamW()
    assert not any(vars(optimizer).get(name) for name in names)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert vars(optimizer)["_exclude_from_weight_decay_pattern"]
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=stock(sequential, compiled()).trainable_variables)
    assert vars(optimizer)["_exclude_from_weight_decay"]


def test_where_a_schedule_is():
    """Else servers are given the rate of the first step for all."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert keras.optimizers.SGD(schedule)._learning_rate is schedule
