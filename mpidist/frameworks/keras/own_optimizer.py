"""An optimizer of mpidist with the settings of one of Keras."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from mpidist.frameworks.keras.classes import is_of_keras
from mpidist.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Optimizer, RMSprop

_KINDS: dict[type, type[Optimizer]] = {
    keras.optimizers.SGD: SGD,
    keras.optimizers.Adam: Adam,
    keras.optimizers.AdamW: AdamW,
    keras.optimizers.Adagrad: Adagrad,
    keras.optimizers.Ftrl: Ftrl,
    keras.optimizers.RMSprop: RMSprop,
}

#: Settings of every optimizer of mpidist.
_COMMON = {"weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps"}

#: Settings that say nothing, and those that say nothing where another one is not set.
_SILENT = {"name", "ema_momentum", "ema_overwrite_frequency"}


def own_optimizer(given: keras.optimizers.Optimizer) -> Callable[[], Optimizer]:
    """Return a function that makes the optimizer of mpidist.  Local.

    NotImplementedError: there is none of this class, or a setting has no counterpart.
    """
    kind = _kind_of(given)
    if kind is None:
        known = ", ".join(each.__name__ for each in _KINDS)
        raise NotImplementedError(f"mpidist has those of Keras named {known}; the model has a {type(given).__name__}")
    config = settings_of(given)
    accepted = (set(inspect.signature(kind).parameters) - {"options"}) | _COMMON
    settings = {name: value for name, value in config.items() if name in accepted and value is not None}
    settings["learning_rate"] = _schedule_of(given) if is_scheduled(given) else float(given.learning_rate)
    lost = [f"{name}={value!r}" for name, value in config.items() if name not in accepted | _SILENT and value]
    # Private: what `exclude_from_weight_decay` was given
    if any(map(vars(given).get, ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"))):
        lost.append("exclude_from_weight_decay")
    if lost:
        raise NotImplementedError(f"settings of {type(given).__name__} that mpidist does not have: {', '.join(lost)}")
    return lambda: kind(**settings)


def is_scheduled(given: Any) -> bool:
    """Return whether the learning rate is no number.  Local."""
    # Private: it is computed where it is asked for otherwise
    return callable(given._learning_rate)


def _schedule_of(given: Any) -> _Schedule:
    schedule = given._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        raise NotImplementedError(
            f"the learning rate of {type(given).__name__} is a function without a step, and servers have the step "
            "alone: give it a number, or a keras.optimizers.schedules.LearningRateSchedule"
        )
    return _Schedule(schedule, given.gradient_accumulation_steps or 1)


def settings_of(given: Any) -> dict[str, Any]:
    """Return what an optimizer was made with, as it is now, but for a learning rate that is a number.  Local."""
    names = set(inspect.signature(type(given).__init__).parameters) - {"self", "kwargs", "learning_rate"}
    found = {name: vars(given).get(name) for name in sorted(names)}
    return {**found, "learning_rate": given._learning_rate} if is_scheduled(given) else found


class _Schedule:
    """A learning rate by steps, as Keras computes it; servers get it pickled.

    `count`: micro-batches that make a step: Keras counts these.
    """

    def __init__(self, wrapped: Any, count: int) -> None:
        self.wrapped, self._count = wrapped, count

    def __call__(self, step: int) -> float:
        return float(self.wrapped(step * self._count + self._count - 1))


def _kind_of(given: keras.optimizers.Optimizer) -> type[Optimizer] | None:
    """Return the class of mpidist; None for a class of the user's own.  On PyTorch, Keras makes subclasses."""
    kind = type(given)
    names = [theirs for theirs in _KINDS if issubclass(kind, theirs) and kind.__name__ == theirs.__name__]
    return _KINDS[names[0]] if names and is_of_keras(kind) else None
