"""The guard against Keras models that every rank of a scope would train by itself, on all rows, without a word.

Keras is not imported here.  While a scope of several ranks is entered, `keras.Model` raises an error when it is made,
compiled or trained there; if Keras is imported in the meantime, from then on.  Nothing of it is left behind.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from mpidist import context

_KERAS = "keras"

#: What of a model is guarded, and what is done by it.
_GUARDED = {"__new__": "made", "compile": "compiled", "fit": "trained", "train_on_batch": "trained"}


class _KerasGuard(MetaPathFinder):
    """Guards `keras.Model` as long as any thread is in a scope; others than these threads notice nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._model: Any = None
        self._before: dict[str, Any] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Guard for the time of a ``with`` block."""
        with self._lock:
            self._scopes += 1
            if self._scopes == 1:
                sys.meta_path.insert(0, self)
                self._begin(sys.modules.get(_KERAS))
        try:
            yield
        finally:
            with self._lock:
                self._scopes -= 1
                if not self._scopes:
                    sys.meta_path.remove(self)
                    self._end()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where Keras is, as the other finders say, with a loader that lets it be guarded."""
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

    def _begin(self, module: Any) -> None:
        model = getattr(module, "Model", None)
        if self._model is not None or model is None:
            return
        self._model = model
        for name, done in _GUARDED.items():
            self._before[name] = vars(model).get(name)
            guarded = _checked(getattr(model, name), done)
            setattr(model, name, staticmethod(guarded) if name == "__new__" else guarded)

    def _end(self) -> None:
        for name, before in self._before.items():
            if before is None:  # it was inherited
                delattr(self._model, name)
            else:
                setattr(self._model, name, before)
        self._model = None
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


def _checked(method: Callable[..., Any], done: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _require_one_rank(done)
        return method(*args, **kwargs)

    return checked


def _require_one_rank(done: str) -> None:
    """Raise NotImplementedError in the scope of a strategy of several ranks; `done` is what is done to a model."""
    strategy = context.get_strategy()
    if strategy.extended.spans_ranks:
        raise NotImplementedError(
            f"a Keras model is {done} in the scope of {strategy!r}. Keras models are not distributed yet: every rank "
            "would train one of its own, on all rows. Train with `mpidist.Trainer`, which takes any function that "
            "returns a loss and its gradient (docs/training.md). A model that each rank shall have for itself is "
            "made, compiled and trained outside of the scope"
        )


guarded_keras = _KerasGuard()
