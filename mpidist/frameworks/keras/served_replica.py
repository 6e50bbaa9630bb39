"""`ServedReplica`: a model whose variables are on servers; those of its process are copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy

from mpidist import transports
from mpidist.collectives.communicator import Communicator
from mpidist.frameworks.keras.classes import stock_classes
from mpidist.frameworks.keras.own_optimizer import own_optimizer
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.variables import is_seed
from mpidist.frameworks.replicas import Replicas
from mpidist.optimizers import Optimizer
from mpidist.options import ReduceOp
from mpidist.variables import Variable

#: Under which names a strategy keeps its models, by the order in which they were made, and their variables on servers.
_MODELS, _VARIABLES = "served keras models", "served keras variables"


class ServedReplica(ModelReplica):
    """One process's copy of a model, or of an optimizer alone, of a `ParameterServerStrategy`.

    Parameters
    ----------
    strategy : ParameterServerStrategy

    Attributes
    ----------
    served : dict of int to Variable
        On servers, by the id of the variable of Keras, of all models: one model may be a part of others.
    own_optimizer : Optimizer or None
        By which servers update them.
    example : nested arrays or None
        A row of the batch by which the model was built.
    told : ServedTraining or None
        Of what workers were told last, on the chief.
    iterator : PerWorkerIterator
        By which they know it.
    compiled_optimizer : keras.optimizers.Optimizer or None
        After which it was made.
    workers_optimizer : keras.optimizers.Optimizer or None
        With which the model was compiled when workers were told of it, or had made it.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, Replicas(Communicator(transports.alone())))
        self.served: dict[int, Any] = strategy.extended.adapters.setdefault(_VARIABLES, {})
        self.own_optimizer: Optimizer | None = None
        self.compiled_optimizer: Any = None
        self.workers_optimizer: Any = None
        self.example: Any = None
        self.told: Any = None
        self.iterator: Any = None
        self._read: dict[int, numpy.ndarray] = {}

    @property
    def is_evaluator(self) -> bool:
        """Whether this rank evaluates beside the training, with variables of its own."""
        return bool(self.strategy.cluster_resolver.task_type == "evaluator")

    @property
    def workers(self) -> int:
        """How many ranks compute gradients: all that train but the chief, or one alone."""
        return max(len(self.strategy._roles.trainers) - 1, 1)

    def reduce(self, op: ReduceOp, arrays: list[numpy.ndarray]) -> NoReturn:
        """Raise NotImplementedError: nobody but `fit` and `train_on_batch` hand gradients to the servers."""
        raise NotImplementedError(
            f"{self.strategy!r} has servers update variables, and a Keras optimizer updates those of its process. "
            "Train the model by fit or train_on_batch; in a step of your own use an optimizer of mpidist.optimizers"
        )

    # -- variables -----------------------------------------------------------------------------------------------------

    def shared(self, model: keras.Model) -> list[Any]:
        """Return the variables of a model that servers hold: all but the seeds of random numbers.  Local."""
        return [each for each in model.variables if not is_seed(each)]

    def seen(self, batch: Any) -> Any:
        """Return a batch by which the model is built; a row of it is kept.  Local."""
        self.example = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:1], batch)
        return batch

    def adopt(self, model: keras.Model) -> None:
        """Have servers hold the variables of a model, with the values that the chief's have.

        Collective: every rank that is no server calls it in the same order.
        """
        with self.strategy.scope():
            for variable in self.shared(model):
                if id(variable) not in self.served:
                    self.served[id(variable)] = Variable(_array(variable), name=variable.path)

    def read(self, model: keras.Model) -> None:
        """Give a model the values that the servers have at this moment.  Local."""
        for variable in self.shared(model):
            value = numpy.array(self.served[id(variable)].value)  # the servers' memory is written again
            variable.assign(value)
            self._read[id(variable)] = value

    def write(self, model: keras.Model) -> None:
        """Write to the servers what was changed here since `read`, such as by `load_weights`.  Local."""
        for variable in self.shared(model):
            value, before = _array(variable), self._read.get(id(variable))
            if before is None or not numpy.array_equal(value, before, equal_nan=value.dtype.kind in "fc"):
                self.served[id(variable)].assign(value)
                self._read[id(variable)] = value

    def write_changes(self, model: keras.Model) -> None:
        """Add to the servers' values by what a step has changed the layers' own, such as moving averages.  Local."""
        for variable in model.non_trainable_variables:
            if id(variable) in self.served:
                change = _array(variable) - self._read[id(variable)]
                if change.any():
                    self.served[id(variable)].assign_add(change)

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def compile_config(self, model: keras.Model) -> dict[str, Any] | None:
        """Return what workers need to compile the model as it is compiled here; None where theirs is.  Local."""
        if model.optimizer is self.workers_optimizer or not self.strategy.extended.spans_ranks:
            return None
        self.workers_optimizer = model.optimizer
        with stock_classes():
            config: dict[str, Any] = model.get_compile_config()
        return config

    def adopt_optimizer(self, model: keras.Model) -> None:
        """Have servers update by the optimizer that a model is compiled with.

        Collective before there is a coordinator: every rank that is no server calls it in the same order.  The chief
        alone calls it later.

        Raises
        ------
        NotImplementedError
            mpidist has no such optimizer.
        """
        given = model.optimizer
        if given is not self.compiled_optimizer:
            with self.strategy.scope():
                self.own_optimizer = own_optimizer(given)()
            self.compiled_optimizer = given

    def read_optimizer(self, model: keras.Model) -> None:
        """Give the optimizer of a model the steps and the slots that servers have.  Local."""
        own, given = self.own_optimizer, model.optimizer
        assert own is not None
        given.iterations.assign(own.iterations)
        states = {each.name: each for each in given.variables}
        for variable in model.trainable_variables:
            for slot, value in own.slots(self.served[id(variable)]).items():
                states[_slot_name(variable, slot)].assign(value)

    def write_optimizer(self, model: keras.Model) -> None:
        """Give the servers the steps, slots and learning rate of a model's optimizer where they are others.  Local."""
        own, given = self.own_optimizer, model.optimizer
        assert own is not None
        steps = int(given.iterations)
        if steps != own.iterations:
            own.restore(
                _state(own, given, steps, [(each, self.served[id(each)]) for each in model.trainable_variables])
            )
        # Private: what a learning rate is that is no number
        if not isinstance(given._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = float(given.learning_rate)
            if rate != own.learning_rate:
                own.learning_rate = rate


def models_of(strategy: Any) -> list[Any]:
    """Return the models of a strategy, in the order in which they were made, which is the same on all ranks.  Local."""
    found: list[Any] = strategy.extended.adapters.setdefault(_MODELS, [])
    return found


def _array(variable: Any) -> numpy.ndarray:
    return numpy.asarray(keras.ops.convert_to_numpy(variable))


def _slot_name(variable: Any, slot: str) -> str:
    """Return how Keras names what an optimizer keeps of a variable; the names of slots are the same here."""
    return f"{variable.path.replace('/', '_')}_{slot}"


def _state(own: Optimizer, given: Any, steps: int, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the state of an optimizer of Keras as one of this package takes it over."""
    state: dict[str, Any] = {
        "class": type(own).__name__,
        "slot_names": list(own.slot_names),
        "iterations": steps,
        "slot_variables": [served.name for _, served in pairs] if own.slot_names else [],
        "slot_paths": [""] * len(pairs) if own.slot_names else [],
    }
    values = {each.name: each for each in given.variables}
    for number, (variable, _) in enumerate(pairs):
        for slot in own.slot_names:
            state[f"{number}/{slot}"] = _array(values[_slot_name(variable, slot)])
    return state
