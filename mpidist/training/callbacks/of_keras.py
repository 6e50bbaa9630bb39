"""`CallbackOfKeras`: a callback of Keras in a `Trainer`, known by its class; Keras is not imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.callbacks.learning_rate import RateOfEpoch
from mpidist.training.callbacks.monitor import Monitoring

if TYPE_CHECKING:
    from mpidist.training.trainer import Trainer

#: Callbacks that need a model of Keras -> what to use in their place.
_NEED_A_MODEL = {
    "BackupAndRestore": "mpidist.callbacks.ModelCheckpoint(folder, resume=True)",
    "ModelCheckpoint": "mpidist.callbacks.ModelCheckpoint",
    "ProgbarLogger": "mpidist.callbacks.ProgressBar",
    "SwapEMAWeights": "an optimizer of mpidist.optimizers",
    "TensorBoard": "mpidist.callbacks.TensorBoard",
}

#: Callbacks that write or send something, which the chief does alone.
_CHIEF_ONLY = {"CSVLogger", "RemoteMonitor"}

_TURNS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackOfKeras(Callback):
    """Calls a callback of Keras at its turns; what Keras calls the model is the trainer.

    TypeError where it needs a model of Keras, with what to use in its place.
    """

    def __init__(self, callback: Any) -> None:
        names = [each.__name__ for each in type(callback).__mro__]
        needed = next((_NEED_A_MODEL[name] for name in names if name in _NEED_A_MODEL), None)
        if needed is None and getattr(callback, "restore_best_weights", False):
            needed = "mpidist.callbacks.EarlyStopping"
        if needed is not None:
            raise TypeError(f"callback {names[0]} works on a model of Keras, which a Trainer has not; use {needed}")
        self._callback = callback
        self._is_for_chief = bool(_CHIEF_ONLY & {*names})

    def set_model(self, trainer: Trainer) -> None:
        """Be told whose callback it is."""
        super().set_model(trainer)
        self._callback.set_model(trainer)

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Be told about the training that begins."""
        super().set_params(params)
        self._callback.set_params(dict(params))


def _turn(name: str) -> Callable[..., None]:
    def call(self: Any, *args: Any) -> None:
        if not self._is_for_chief or self.trainer.is_chief:
            getattr(self._callback, name)(*args)

    return call


for _name in _TURNS:
    setattr(CallbackOfKeras, _name, _turn(_name))


class SchedulerOfKeras(RateOfEpoch, CallbackOfKeras):
    """Calls a `LearningRateScheduler` of Keras, once an epoch."""

    def _set_rate(self, epoch: int, logs: Logs | None) -> None:
        self._callback.on_epoch_begin(epoch, logs)


class MonitoringOfKeras(Monitoring, CallbackOfKeras):
    """Calls a callback of Keras that judges epochs, and saves what it remembers of those before."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        self._callback.on_train_end(logs)

    def _judge(self, epoch: int, logs: Logs | None) -> None:
        self._callback.on_epoch_end(epoch, logs)

    @property
    def _monitored(self) -> str:
        return repr(self._callback.monitor)

    @property
    def _holder(self) -> Any:
        return self._callback


class EarlyStoppingOfKeras(MonitoringOfKeras):
    """Calls an `EarlyStopping` of Keras."""

    _remembered = ("wait", "stopped_epoch", "best_epoch", "best")


class ReduceLROnPlateauOfKeras(MonitoringOfKeras):
    """Calls a `ReduceLROnPlateau` of Keras."""

    _remembered = ("wait", "cooldown_counter", "best")


#: By the class of a callback of Keras: what calls it, where that has a state.
_WITH_STATE: dict[str, type[CallbackOfKeras]] = {
    "EarlyStopping": EarlyStoppingOfKeras,
    "LearningRateScheduler": SchedulerOfKeras,
    "ReduceLROnPlateau": ReduceLROnPlateauOfKeras,
}


def as_callback(callback: Any) -> Callback:
    """Return a callback of mpidist, or of Keras, for a `Trainer`.  Local.

    TypeError where it is neither, or one of Keras' that needs a model of Keras.
    """
    if isinstance(callback, Callback):
        return callback
    classes = type(callback).__mro__
    if any(each.__name__ == "Callback" and each.__module__.startswith("keras.") for each in classes):
        names = [each.__name__ for each in classes if each.__module__.startswith("keras.")]
        return next((_WITH_STATE[name] for name in names if name in _WITH_STATE), CallbackOfKeras)(callback)
    raise TypeError(f"a callback must be a mpidist.callbacks.Callback, got {type(callback).__name__}")
