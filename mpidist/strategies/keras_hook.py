"""The hook by which Keras models and optimizers that are made in a scope of several ranks are distributed.

Keras is not imported here.  While such a scope is entered, `keras.Model` and `keras.optimizers.Optimizer` hand what is
made to Keras' adapter, and a model that was made elsewhere raises an error when it is compiled or trained; if Keras is
imported in the meantime, from then on.  Nothing of it is left behind.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from mpidist import context
from mpidist.cluster.devices import gpu_of_name
from mpidist.strategies.distribution import ADAPTERS

_KERAS = "keras"

#: What a model of another place is asked for in a scope, and what is done by it.
_REFUSED = {"compile": "compiled", "fit": "trained", "train_on_batch": "trained"}

#: The attribute that the adapter gives to what it distributes.
_MARK = "_mpidist_replica"


class _Made(threading.local):
    """What was made in the scope that this thread is in."""

    objects: list[Any] | None = None


class _KerasHook(MetaPathFinder):
    """Is in `keras.Model` and `keras.Optimizer` as long as any thread is in a scope; other threads notice nothing.

    At the end of a scope the models that were made in it get rank 0's weights, which is collective.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._made = _Made()
        self._before: dict[tuple[Any, str], Any] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be there for the time of a ``with`` block."""
        with self._lock:
            self._scopes += 1
            if self._scopes == 1:
                sys.meta_path.insert(0, self)
                self._begin(sys.modules.get(_KERAS))
        outer, self._made.objects = self._made.objects, []
        try:
            self._use_gpu(sys.modules.get(_KERAS))
            yield
            made = self._made.objects
        finally:
            self._made.objects = outer
            with self._lock:
                self._scopes -= 1
                if not self._scopes:
                    sys.meta_path.remove(self)
                    self._end()
        if made:
            _adapter().begin_attached(context.get_strategy(), made)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where Keras is, as the other finders say, with a loader that lets this hook in."""
        if name != _KERAS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self._imported)
        return spec

    def _imported(self, module: Any) -> None:
        with self._lock:
            if self._scopes:
                self._begin(module)
        self._use_gpu(module)

    def _use_gpu(self, module: Any) -> None:
        """Have Keras, if it is there, work on this rank's GPU: layers are made before the model that has them."""
        strategy = context.get_strategy()
        if hasattr(module, "Model") and not strategy.extended.is_alone and self._made.objects is not None:
            if gpu_of_name(strategy.extended.device_name) is not None:
                with suppress(ImportError):  # of a Keras that the adapter is not for, as a model's error says
                    _adapter().use_gpu(strategy)

    def _begin(self, module: Any) -> None:
        model = getattr(module, "Model", None)
        if self._before or model is None:
            return
        self._put(model, "__new__", staticmethod(_distributing_new(model.__new__, self._distribute)))
        optimizer = module.optimizers.Optimizer
        self._put(optimizer, "__init__", _distributing_init(optimizer.__init__, self._distribute))
        for name, done in _REFUSED.items():
            # where it is defined: Keras compares a model's `compile` with that of the class it comes from
            owner = next(each for each in model.__mro__ if name in vars(each))
            self._put(owner, name, _refusing(getattr(owner, name), done))

    def _distribute(self, obj: Any) -> None:
        strategy = context.get_strategy()
        if not strategy.extended.is_alone and self._made.objects is not None:
            _adapter().attach(strategy, obj)
            self._made.objects.append(obj)

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._before[owner, name] = vars(owner).get(name)
        setattr(owner, name, value)

    def _end(self) -> None:
        for (owner, name), before in self._before.items():
            if before is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._before.clear()


class _ThenCall(Loader):
    """A loader that calls a function with the module that another one has loaded, and leaves no trace in it."""

    def __init__(self, loader: Any, then: Callable[[Any], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _distributing_new(new: Callable[..., Any], distribute: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a model's ``__new__`` that hands what is made on; its class is settled when its ``__init__`` runs."""

    @functools.wraps(new)
    def distributing(cls: type, *args: Any, **kwargs: Any) -> Any:
        obj = new(cls, *args, **kwargs)
        distribute(obj)
        return obj

    return distributing


def _distributing_init(init: Callable[..., Any], distribute: Callable[[Any], None]) -> Callable[..., Any]:
    """Return an optimizer's ``__init__`` that hands what is made on; a ``__new__`` could not be taken away again."""

    @functools.wraps(init)
    def distributing(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        distribute(self)

    return distributing


def _adapter() -> Any:
    return importlib.import_module(ADAPTERS[_KERAS])


def _refusing(method: Callable[..., Any], done: str) -> Callable[..., Any]:
    """Return a method that raises in the scope of a strategy; a distributed model has one of its own over it."""

    @functools.wraps(method)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = context.get_strategy()
        if not strategy.extended.is_alone and not hasattr(self, _MARK):
            raise RuntimeError(
                f"a Keras model is {done} in the scope of {strategy!r}, and was made outside of it: every rank would "
                "train one of its own, on all rows. Make it in the scope, or call strategy.distribute(model) first. A "
                "model that each rank shall have for itself is compiled and trained outside of the scope"
            )
        return method(self, *args, **kwargs)

    return refusing


keras_hook = _KerasHook()
