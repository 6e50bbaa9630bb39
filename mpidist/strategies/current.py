"""What `mpidist.context` says of the current strategy, with the types that it cannot name from below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist import context
from mpidist.strategies.base import Strategy
from mpidist.strategies.replica_context import ReplicaContext

get_strategy: Callable[[], Strategy] = context.get_strategy
#: It is None across replicas; with `| Any`, code that knows where it is need not ask.
get_replica_context: Callable[[], ReplicaContext | Any] = context.get_replica_context
