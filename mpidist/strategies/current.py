"""What `mpidist.context` says of the current strategy, with the types that it cannot name from below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

from mpidist import context
from mpidist.strategies.base import ReplicaContext, Strategy

get_strategy: Callable[[], Strategy] = context.get_strategy
#: It is None across replicas; with Any, code that knows where it is need not ask.  Jedi does not follow `|` here.
get_replica_context: Callable[[], Union[ReplicaContext, Any]] = context.get_replica_context  # noqa: UP007
