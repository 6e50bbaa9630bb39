"""Callbacks of a distributed `fit`: which of the user's run on this rank, and those by which the ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy

from mpidist.frameworks.keras import facts, metrics
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.variables import learning_rates, optimizers_of, state_of, synchronize
from mpidist.training.callbacks.base import Callback as TrainerCallback

#: What writes files, sends or shows something: only the chief has it.
_CHIEF_ONLY = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def with_agreement(replica: ModelReplica, callbacks: Any) -> list[keras.callbacks.Callback]:
    """Return the callbacks of this rank, between those by which the ranks agree.  Local.

    Errors as for `flat_callbacks`.
    """
    own = [each for each in flat_callbacks(callbacks) if replica.is_chief or not isinstance(each, _CHIEF_ONLY)]
    return [_Logs(replica), *own, _Agreed(replica)]


def flat_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Return callbacks, which may be nested, in one list.  Local.

    TypeError: a `keras.callbacks.CallbackList`, which has its own ends; or a callback of a `Trainer`.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("a distributed Keras model takes a list of callbacks, got a CallbackList; pass its callbacks")
    flat: Sequence[Any] = keras.tree.flatten(callbacks) if callbacks else []
    for each in flat:
        if isinstance(each, TrainerCallback):
            name = type(each).__name__
            more = (
                "; call its begin, note and end around `fit`, see mpidist.callbacks.Report" if name == "Report" else ""
            )
            raise TypeError(f"callback {name} is for mpidist.Trainer, and not for `fit` of a Keras model{more}")
    return list(flat)


class _Logs(keras.callbacks.Callback):
    """The first callback: lets the others see logs that are the same on all ranks."""

    def __init__(self, replica: ModelReplica) -> None:
        super().__init__()
        self._replica = replica

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        shares = self._replica.last_share
        rows = shares.own_rows if shares is not None else 0
        logs.update(metrics.agreed(self._replica, logs, rows))


class _Agreed(keras.callbacks.Callback):
    """The last callback: the chief's weights to begin with, its learning rate in each epoch, and a vote at its end."""

    def __init__(self, replica: ModelReplica) -> None:
        super().__init__()
        self._replica = replica

    def on_train_begin(self, logs: Any = None) -> None:
        """After those that restore weights, on the chief."""
        facts.compare_models(self._replica, self.model, "fit of a Keras model")
        synchronize(self._replica, self.model)
        # Private: BackupAndRestore says here with which epoch training goes on
        first = -1 if self.model._initial_epoch is None else self.model._initial_epoch
        (agreed,) = self._replica.from_chief([numpy.array([first])])
        self.model._initial_epoch = None if agreed[0] < 0 else int(agreed[0])

    def on_test_begin(self, logs: Any = None) -> None:
        self._begin_alone("evaluate of a Keras model")

    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin_alone("predict of a Keras model")

    def _begin_alone(self, what: str) -> None:
        if not self._replica.is_nested:
            facts.compare_models(self._replica, self.model, what)
            synchronize(self._replica, self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rates = [rate for optimizer in optimizers_of(self.model) for rate in learning_rates(optimizer)]
        values = self._replica.from_chief([to_numpy(each) for each in rates])
        for rate, value in zip(rates, values, strict=True):
            rate.assign(value)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        replica = self._replica
        replica.is_stopped |= bool(replica.sum([replica.is_vote])[0])
        facts.compare_weights(replica, state_of(self.model), "weights of a Keras model at the end of an epoch")
