"""Classes of distributed objects: each is derived from the object's own class, has its name, and puts methods over it.

An object of the user's is distributed by giving it such a class, whose only base is the class that it had, since others
hold the object, and Keras documents no other way to have a say in its methods.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# Private: class -> the name by which it is registered; `tests/frameworks/test_keras_canaries.py` looks after it.
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

#: The attribute of a distributed object that has its replica; None in its class, for copies that belong to none.
REPLICA = "_mpidist_replica"

#: The attribute of a derived class that has the class it was derived from.
_OWN_CLASS = "_mpidist_own_class"

_derived: dict[tuple[type, int], type] = {}
_distributed: weakref.WeakSet[Any] = weakref.WeakSet()


def distribute(obj: Any, methods: Mapping[str, Any], replica: Any) -> Any:
    """Put methods over those of an object's class, and let them find a replica; the object itself is returned.  Local.

    Parameters
    ----------
    obj : object
        One that is distributed already gets the new replica.
    methods : mapping of str to function or property
        One mapping for all objects of a kind.  They call what they are put over by `stock`.
    replica : ModelReplica
    """
    if not is_distributed(obj):
        own = type(obj)
        key = own, id(methods)
        if key not in _derived:
            _derived[key] = _derive(own, methods)
        obj.__class__ = _derived[key]
        _distributed.add(obj)
    object.__setattr__(obj, REPLICA, replica)
    return obj


def _derive(own: type, methods: Mapping[str, Any]) -> type:
    def over(name: str, method: Any) -> Any:
        below = getattr(own, name, None)
        if not (callable(below) and callable(method)):
            return method

        @functools.wraps(below)  # Keras looks at signatures, such as that of `compute_loss`
        def in_place_of(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        return in_place_of

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    namespace = {name: over(name, method) for name, method in methods.items()}
    derived = type(own)(own.__name__, (own,), {**namespace, **names, _OWN_CLASS: own, REPLICA: None})
    if own in GLOBAL_CUSTOM_NAMES:
        GLOBAL_CUSTOM_NAMES[derived] = GLOBAL_CUSTOM_NAMES[own]  # what is saved is of the class that was registered
    return derived


def is_distributed(obj: Any) -> bool:
    """Return whether an object was distributed.  Local."""
    return hasattr(type(obj), _OWN_CLASS)


def replica_of(obj: Any) -> Any:
    """Return the replica of a distributed object; None for others, and for copies, which belong to none.  Local."""
    return getattr(obj, REPLICA, None) if is_distributed(obj) else None


def stock(obj: Any) -> Any:
    """Return what has the methods below those of a distributed object: those of the class that it had.  Local."""
    derived = next(each for each in type(obj).__mro__ if _OWN_CLASS in vars(each))
    return super(derived, obj)


def of_keras(obj: Any, name: str) -> bool:
    """Return whether the method below those of a distributed object is one of Keras.  Local."""
    return is_of_keras(getattr(stock(obj), name))


def is_of_keras(thing: Any) -> bool:
    """Return whether a class or a function is one of Keras.  Local."""
    return str(thing.__module__).partition(".")[0] == "keras"


@contextmanager
def stock_class(*objects: Any) -> Iterator[None]:
    """Give distributed objects the classes that they had, for the time of a ``with`` block.  Local."""
    changed = [(obj, type(obj)) for obj in objects]
    try:
        for obj, derived in changed:
            obj.__class__ = getattr(derived, _OWN_CLASS)
        yield
    finally:
        for obj, derived in changed:
            obj.__class__ = derived


def stock_classes() -> AbstractContextManager[None]:
    """Give all distributed objects the classes that they had, for the time of a ``with`` block.  Local.

    What is saved meanwhile is what Keras saves, and registered classes are found.
    """
    return stock_class(*filter(is_distributed, _distributed))
