"""tf.distribute.Strategy for MPI ranks, on NumPy and CuPy arrays.

Every public name is listed in `_NAMES` and loaded on first use: ``import mpidist`` starts neither MPI nor CUDA.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

#: Public name -> where it lives: "module" or "module:attribute".  A dotted public name lives in a namespace,
#: which can also be imported: ``from mpidist.experimental import MultiWorkerMirroredStrategy``.
_NAMES = {
    "CollectiveCommunication": "mpidist.options:CommunicationImplementation",
    "CommunicationImplementation": "mpidist.options:CommunicationImplementation",
    "CommunicationOptions": "mpidist.options:CommunicationOptions",
    "ReduceOp": "mpidist.options:ReduceOp",
    "VariableAggregation": "mpidist.options:VariableAggregation",
    "VariableSynchronization": "mpidist.options:VariableSynchronization",
    "errors": "mpidist.errors",
    "experimental.CollectiveCommunication": "mpidist.options:CommunicationImplementation",
    "experimental.CommunicationImplementation": "mpidist.options:CommunicationImplementation",
    "experimental.CommunicationOptions": "mpidist.options:CommunicationOptions",
}


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


class _Namespace(ModuleType):
    """A module whose names are loaded on first use, from the part of `_NAMES` below its own name."""

    def __init__(self, name: str, places: dict[str, str]) -> None:
        super().__init__(f"{__name__}.{name}", f"Public names, see ``dir(mpidist.{name})``.")
        self.__dict__["_places"] = places

    def __getattr__(self, name: str) -> Any:
        if name not in self._places:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _load(self._places[name])
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted(self._places)


def _namespaces() -> dict[str, _Namespace]:
    parts: dict[str, dict[str, str]] = {}
    for dotted, place in _NAMES.items():
        namespace, dot, name = dotted.rpartition(".")
        if dot:
            parts.setdefault(namespace, {})[name] = place
    return {name: _Namespace(name, places) for name, places in parts.items()}


for _name, _namespace in _namespaces().items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _namespace

__all__ = sorted({name.partition(".")[0] for name in _NAMES} | {"__version__"})


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _load(_NAMES[name])
    return value


def __dir__() -> list[str]:
    return list(__all__)
