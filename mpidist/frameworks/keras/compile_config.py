"""How a model was compiled, on its way to the workers: as Keras saves it, with the user's functions and classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from mpidist.frameworks.keras.classes import of_keras, stock_classes


class CompileConfig(NamedTuple):
    """How a model was compiled."""

    config: dict[str, Any]
    """As Keras saves it."""
    custom: dict[str, Any]
    """The functions and classes in it that are not of Keras, by name."""

    def apply(self, model: keras.Model) -> None:
        """Compile a model so.  Local."""
        with keras.saving.custom_object_scope(self.custom):
            model.compile_from_config(self.config)


def compile_config_of(model: Any) -> CompileConfig:
    """Return how a model was compiled.  Local.

    NotImplementedError: workers cannot be told: its class has a `compile` of its own, or a lambda is in it.
    """
    advice = "compile the model above the first fit, which workers come to, or leave its compilation as it is"
    if not of_keras(model, "compile"):
        raise NotImplementedError(
            f"{type(model).__name__} has a compile of its own, and was compiled after workers had come to the "
            f"coordinator; {advice}"
        )
    with stock_classes():
        config: dict[str, Any] = model.get_compile_config()
    # Private: the arguments of `compile`
    custom = dict(_custom_of(model._compile_config.config))
    if "<lambda>" in custom:
        raise NotImplementedError(
            f"{type(model).__name__} was compiled with a lambda after workers had come to the coordinator: give the "
            f"function a name, or {advice}"
        )
    return CompileConfig(config, custom)


def _custom_of(given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of the user's in what `compile` was given, by name."""
    for leaf in keras.tree.flatten(given):
        wrapped = getattr(leaf, "fn", None), getattr(leaf, "_learning_rate", None)
        for each in (leaf, *wrapped):
            owner: Any = each if hasattr(each, "__name__") else type(each)
            if callable(each) and owner.__module__.partition(".")[0] not in ("keras", "builtins"):
                yield owner.__name__, owner
