"""`Callback`: methods that a `Trainer` calls at the turns of a training, on every rank; `History`, `LambdaCallback`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.training.trainer import Trainer

Logs = dict[str, Any]


class Callback:
    """Base of what a `Trainer` calls at the turns of a training.

    Every rank has a callback of its own, which is called at the same turns with the same logs.  So a callback may call
    collectives.  Only the chief (``self.trainer.is_chief``) must write files and show anything.  All methods are Local
    and do nothing unless a subclass says otherwise.

    Attributes
    ----------
    trainer : Trainer
        The trainer that calls it; `model` is another name of it.
    params : dict
        ``epochs``, ``steps`` (None where that is not known), and in `fit` ``validates``: whether there is validation
        data.
    is_last : bool
        Whether it is called after all others, because it reads their state.
    """

    if TYPE_CHECKING:  # a name of a higher module, which hints of the class cannot find
        trainer: Trainer
    params: Mapping[str, Any]
    is_last = False

    def set_model(self, trainer: Trainer) -> None:
        """Take note of the trainer."""
        self.trainer = trainer

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take note of the training that begins."""
        self.params = params

    @property
    def model(self) -> Trainer:
        """The trainer."""
        return self.trainer

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """`fit` begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """`fit` ends; the logs are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch begins; epochs count from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch is over, its validation too.

        Logs have the loss and the metrics over all rows of all ranks, and those of the validation as ``val_...``.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A step begins; it is number `batch` of its epoch, from 0."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A step is over; logs have the mean ``loss`` of the epoch so far, over all ranks."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """`evaluate` begins, or a validation."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """`evaluate` ends, or a validation; logs have its results."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch is about to be evaluated."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A batch has been evaluated."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """`predict` begins."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """`predict` ends."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch is about to be predicted."""

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A batch has been predicted."""


class CallbackList:
    """Callbacks in their order; knows which of them have anything to do at a turn."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer, params: Mapping[str, Any]) -> None:
        for callback in callbacks:
            callback.set_model(trainer)
            callback.set_params(params)
        self._callbacks = sorted(callbacks, key=lambda callback: callback.is_last)

    def hooks(self, name: str) -> list[Any]:
        """Return the bound methods of this name that do anything, in order, for calls in every step."""
        default = getattr(Callback, name)
        found = [getattr(callback, name) for callback in self._callbacks]
        return [hook for hook in found if getattr(hook, "__func__", None) is not default]

    def call(self, name: str, *args: Any) -> None:
        """Call the methods of this name, in order."""
        for hook in self.hooks(name):
            hook(*args)


class History(Callback):
    """The logs of all epochs.  All methods are Local.

    Attributes
    ----------
    epoch : list of int
        The epochs trained, from 0.
    history : dict of str to list
        For each log its value in each of them.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)

    def __repr__(self) -> str:
        return f"<History of epochs {self.epoch}: {self.history}>"


class LambdaCallback(Callback):
    """Functions to be called at the turns of a training.  All methods are Local, as far as the functions are.

    Parameters
    ----------
    **functions
        By the name of the method that they stand for: ``on_epoch_end=lambda epoch, logs: print(epoch, logs)``.

    Raises
    ------
    TypeError
        There is no such method.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                known = ", ".join(sorted(known for known in vars(Callback) if known.startswith("on_")))
                raise TypeError(f"a callback has no {name!r}; known ones: {known}")
            setattr(self, name, function)
