"""`Progress`: what a checkpoint of a training has besides variables, optimizer and data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpidist.training.metrics import Metric
from mpidist.training.position import Position


class Progress:
    """Position, metrics of the present epoch, and what callbacks remember, as one object of a `Checkpoint`."""

    def __init__(self, position: Position, metrics: Sequence[Metric], callbacks: Sequence[Any]) -> None:
        self._position = position
        self._parts: dict[str, Any] = {f"metrics/{metric.name}": metric for metric in metrics}
        for callback in callbacks:
            if hasattr(callback, "state") and hasattr(callback, "restore"):
                name = f"callbacks/{type(callback).__name__}"
                same = sum(key.startswith(name) for key in self._parts)
                self._parts[f"{name}_{same}" if same else name] = callback

    def state(self) -> dict[str, Any]:
        """Return arrays and numbers by name."""
        found = self._position.state()
        for name, part in self._parts.items():
            found.update({f"{name}/{key}": value for key, value in part.state().items()})
        return found

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise what the metrics raise of which the state does not fit, or what the position raises.  Local."""
        Position().restore(state)
        for part, own in self._states(state):
            if hasattr(part, "check"):
                part.check(own)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave; a metric or callback that was not there keeps what it has.  Local."""
        # what could not be checked may still raise, and comes first
        for part, own in sorted(self._states(state), key=lambda item: hasattr(item[0], "check")):
            part.restore(own)
        self._position.restore(state)

    def _states(self, state: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each metric and callback of which the state has anything, with that."""
        for name, part in self._parts.items():
            own = {key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}/")}
            if own:
                yield part, own
