"""The settings of a training that all ranks must have alike, as facts that the ranks compare.

Every rank updates its copy of the variables by itself.  With other settings they would drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.collectives.mismatch import fact
from mpidist.input.agreement import Facts
from mpidist.optimizers import Optimizer
from mpidist.training.metrics import Metric

#: The end of every message about settings that differ.
ADVICE = (
    "Every rank must make the same trainer and give `fit` the same arguments; a callback that changes the optimizer "
    "must do so on every rank (`trainer.from_chief(value)` is the chief's number on all of them)"
)

#: Where the settings of an optimizer are known: a user's class may have numbers of its own.
_OURS = Optimizer.__module__.partition(".")[0] + "."


def facts_of(optimizer: Optimizer, metrics: Sequence[Metric], arguments: Mapping[str, Any]) -> Facts:
    """Return optimizer, metrics and arguments of a training, for `Agreement.compare`.  Local."""
    named = ", ".join(f"{metric.name} ({type(metric).__name__})" for metric in metrics)
    return [
        fact("optimizer", f"{type(optimizer).__name__}({_settings_of(optimizer)})"),
        fact("learning rate", repr(optimizer.learning_rate)),
        fact("iterations", optimizer.iterations),
        fact("loss scale", optimizer.loss_scale.scale),
        fact("gradient_accumulation_steps", optimizer.gradient_accumulation_steps),
        fact("metrics", named or "none"),
        *(fact(name, value) for name, value in arguments.items()),
    ]


def _settings_of(optimizer: Optimizer) -> str:
    if not type(optimizer).__module__.startswith(_OURS):
        return ""
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, (bool, int, float))}
    return ", ".join(f"{name}={value!r}" for name, value in sorted(numbers.items()) if not name.startswith("_"))
