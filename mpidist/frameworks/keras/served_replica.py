"""`ServedReplica`: a model whose variables are on servers; those of its process are copies."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import keras
import numpy

from mpidist import transports
from mpidist.collectives.communicator import Communicator
from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.compile_config import CompileConfig, compile_config_of
from mpidist.frameworks.keras.own_optimizer import is_scheduled, own_optimizer, settings_of
from mpidist.frameworks.keras.random_numbers import is_seed
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.variables import free_name
from mpidist.frameworks.replicas import Replicas
from mpidist.optimizers import Optimizer
from mpidist.options import ReduceOp
from mpidist.parameter_server.consistency import BackupWorkers
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
    told : ServedTraining or None
        Of what workers were told last, on the chief.
    iterator : PerWorkerIterator
        By which they know it.
    workers_compilations : int
        How often the model had been compiled when workers were told of it, or had made it.
    epochs : int
        How many have begun, on the chief.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, Replicas(Communicator(transports.alone())))
        self.served: dict[int, Any] = strategy.extended.adapters.setdefault(_VARIABLES, {})
        self.own_optimizer: Optimizer | None = None
        self.workers_compilations = self.epochs = 0
        self.told: Any = None
        self.iterator: Any = None
        self._read: dict[int, numpy.ndarray] = {}
        self._stamps: dict[int, Any] = {}
        self._compiled_with: tuple[Any, dict[str, Any]] = None, {}
        self._steps_read = -1
        self._slots_read: dict[tuple[int, str], numpy.ndarray] = {}

    @property
    def is_evaluator(self) -> bool:
        """Whether this rank evaluates beside the training, with variables of its own."""
        return bool(self.strategy.cluster_resolver.task_type == "evaluator")

    @property
    def workers(self) -> int:
        """How many ranks compute gradients: all that train but the chief, or one alone."""
        return max(len(self.strategy._roles.trainers) - 1, 1)

    @property
    def batches_per_step(self) -> int | None:
        """How many batches make a step, which sees the same variables; None where each is applied as it comes."""
        consistency = self.strategy._consistency
        return consistency.count if isinstance(consistency, BackupWorkers) else None

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

    def adopt(self, model: keras.Model) -> None:
        """Have servers hold the variables of a model, with the values that the chief's have.

        Collective: every rank that is no server calls it in the same order.
        """
        names = {each.name for each in self.served.values()}  # two variables of one path need names of their own
        with self.strategy.scope():
            for variable in self.shared(model):
                if id(variable) not in self.served:
                    name = free_name(variable.path, names)
                    self.served[id(variable)] = Variable(to_numpy(variable), name=name)

    def read(self, model: keras.Model) -> None:
        """Give a model the values that the servers have at this moment.  Local."""
        stamp = backends.seam().stamp
        for variable in self.shared(model):
            value = numpy.array(self.served[id(variable)].value)  # the servers' memory is written again
            variable.assign(value)
            self._read[id(variable)], self._stamps[id(variable)] = value, stamp(variable)

    def write(self, model: keras.Model) -> None:
        """Write to the servers what was changed here since `read`, such as by `load_weights`.  Local."""
        for variable in self.shared(model):
            value = to_numpy(variable)
            if _differ(value, self._read.get(id(variable))):
                self.served[id(variable)].assign(value)
                self._read[id(variable)] = value.copy()

    def changes(self, model: keras.Model) -> dict[int, numpy.ndarray]:
        """Return what a step has changed by itself since `read`, such as moving averages or a normed kernel.  Local.

        By the place among those of `shared`: the difference; of booleans, which are others.
        """
        is_written = backends.seam().is_written
        by_place = {}
        for place, variable in enumerate(self.shared(model)):
            if id(variable) in self.served and is_written(variable, self._stamps[id(variable)]):
                value, before = to_numpy(variable), self._read[id(variable)]
                change = value ^ before if value.dtype == bool else value - before
                if change.any():
                    by_place[place] = change
        return by_place

    def add(self, variable: Any, change: numpy.ndarray) -> None:
        """Change what the servers have of a variable by one of `changes`.  Local."""
        served = self.served[id(variable)]
        if served.dtype == bool:
            served.assign(served.value ^ change.astype(bool))
        else:
            served.assign_add(change.astype(served.dtype))

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def compile_config(self, model: keras.Model) -> CompileConfig | None:
        """Return what workers need to compile the model as it is compiled here; None where theirs is.  Local."""
        if self.compilations == self.workers_compilations or not self.strategy.extended.spans_ranks:
            return None
        found = compile_config_of(model)
        self.workers_compilations = self.compilations
        return found

    def adopt_optimizer(self, model: keras.Model) -> None:
        """Have servers update by the optimizer that a model is compiled with, and by its settings as they are.

        Collective before there is a coordinator: every rank that is no server calls it in the same order.  The chief
        alone calls it later.

        NotImplementedError: mpidist has no such optimizer.
        """
        optimizer = model.optimizer
        settings = settings_of(optimizer)
        if self._compiled_with[0] is not optimizer or self._compiled_with[1] != settings:
            with self.strategy.scope():
                self.own_optimizer = own_optimizer(optimizer)()
            self._compiled_with, self._steps_read = (optimizer, settings), -1

    def read_steps(self, model: keras.Model, own: Optimizer, micro_step: int = 0) -> None:
        """Give the optimizer of a model the steps and the learning rate that servers have.  Local."""
        optimizer = model.optimizer
        # Private: counts micro-batches
        optimizer._iterations.assign(own.iterations * (optimizer.gradient_accumulation_steps or 1) + micro_step)
        if not is_scheduled(optimizer):
            own.read_learning_rate()
            optimizer.learning_rate = own.learning_rate

    def read_optimizer(self, model: keras.Model, micro_step: int = 0) -> None:
        """Give the optimizer of a model the steps and the slots that servers have.  Local."""
        own, optimizer = self.own_optimizer, model.optimizer
        assert own is not None
        self.read_steps(model, own, micro_step)
        self._steps_read = int(optimizer.iterations)
        state = own.state()
        places = {name: number for number, name in enumerate(state.get("slot_variables", ()))}
        theirs = _slots_of(own, optimizer)
        self._slots_read = {}
        for (owner, slot), kept in theirs.items():
            place = places.get(self.served[owner].name) if owner in self.served else None
            if place is not None:
                kept.assign(numpy.array(state[f"{place}/{slot}"]))
            self._slots_read[owner, slot] = to_numpy(kept).copy()

    def write_optimizer(self, model: keras.Model) -> None:
        """Write to the servers what was changed here since `read_optimizer`: steps, slots, learning rate.  Local."""
        own, optimizer = self.own_optimizer, model.optimizer
        assert own is not None
        steps = int(optimizer.iterations)
        values = {
            key: to_numpy(kept).copy() for key, kept in _slots_of(own, optimizer).items() if key[0] in self.served
        }
        if steps != self._steps_read or any(map(_differ, values.values(), map(self._slots_read.get, values))):
            own.restore(self._state(own, steps, values))
            self._steps_read, self._slots_read = steps, values
        if not is_scheduled(optimizer):
            rate = float(optimizer.learning_rate)
            if rate != own.learning_rate:
                own.learning_rate = rate

    def _state(self, own: Optimizer, steps: int, values: dict[tuple[int, str], numpy.ndarray]) -> dict[str, Any]:
        """Return steps and slots as the state of an optimizer of this package."""
        state: dict[str, Any] = {"class": type(own).__name__, "slot_names": list(own.slot_names), "iterations": steps}
        if own.slot_names:
            places = {owner: number for number, owner in enumerate(dict.fromkeys(owner for owner, _ in values))}
            state["slot_variables"] = [self.served[owner].name for owner in places]
            state["slot_paths"] = [""] * len(places)
            state |= {f"{places[owner]}/{slot}": value for (owner, slot), value in values.items()}
        return state


def models_of(strategy: Any) -> list[Any]:
    """Return the models of a strategy, in the order in which they were made, which is the same on all ranks.  Local."""
    found: list[Any] = strategy.extended.adapters.setdefault(_MODELS, [])
    return found


def _differ(value: numpy.ndarray, other: numpy.ndarray | None) -> bool:
    return other is None or not numpy.array_equal(value, other, equal_nan=value.dtype.kind in "fc")


def _slots_of(own: Optimizer, given: Any) -> dict[tuple[int, str], Any]:
    """Return what an optimizer of Keras keeps, by the id of its variable and the slot, which is named alike here."""
    by_name: dict[str, deque[Any]] = {}
    for each in given.variables:
        by_name.setdefault(each.name, deque()).append(each)
    slots = {}
    # Private: in the order in which its slots were made
    for variable in given._trainable_variables:
        for slot in own.slot_names:
            slots[id(variable), slot] = by_name[f"{variable.path.replace('/', '_')}_{slot}"].popleft()
    return slots
