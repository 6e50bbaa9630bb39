"""Objects of frameworks that a strategy distributes: which adapter knows an object, by the modules of its classes.

No framework and no adapter is imported here: an adapter is a module above this one, named here and loaded on first use.
It has one function, ``distribute(strategy, objects, **options)``, which returns what stands for each of the objects.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

#: The top-level module that an object's classes come from -> the adapter's module.
ADAPTERS: dict[str, str] = {
    "keras": "mpidist.frameworks.keras.distribution",
    "torch": "mpidist.frameworks.torch.distribution",
}


def framework_of(obj: Any) -> str | None:
    """Return the framework that an object's class, or its nearest base of a known framework, comes from.  Local."""
    tops = (each.__module__.partition(".")[0] for each in type(obj).__mro__)
    return next((top for top in tops if top in ADAPTERS), None)


def distribute(strategy: Any, objects: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return what stands for the objects, distributed over the replicas of a strategy: a tuple where there are several.

    Collective as far as the adapter communicates.

    Raises
    ------
    TypeError
        An object of no known framework, or objects of several frameworks.
    """
    names = [_known(obj) for obj in objects]
    if len({*names}) > 1:
        kinds = ", ".join(f"{_class_name(obj)} of {name}" for obj, name in zip(objects, names, strict=True))
        raise TypeError(f"distribute() takes objects of one framework at a time, got {kinds}")
    adapter = importlib.import_module(ADAPTERS[names[0]])
    found = adapter.distribute(strategy, objects, **options)
    return found[0] if len(objects) == 1 else tuple(found)


def _known(obj: Any) -> str:
    """Return the framework of an object; TypeError where nobody knows it."""
    name = framework_of(obj)
    if name is None:
        known = ", ".join(sorted(ADAPTERS))
        raise TypeError(
            f"distribute() knows models and optimizers of {known}; got {_class_name(obj)}. Gradients that are arrays "
            "are reduced by `mpidist.optimizers` and by the replica context's `all_reduce`"
        )
    return name


def _class_name(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"
