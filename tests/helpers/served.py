"""Jobs with parameter servers for tests: the last ranks serve, the others are clients and call a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.consistency import Consistency
from mpidist.parameter_server.layout import Key, VariableSpec
from mpidist.parameter_server.server.server import Server
from mpidist.testing import run_ranks
from mpidist.transports import world
from mpidist.transports.connections.open import open_connections


def spec(number: int, shape: Sequence[int] = (), dtype: str = "float64", shard: int = 0) -> VariableSpec:
    """Return a variable for a test."""
    return VariableSpec((number, shard), f"v{number}", tuple(shape), numpy.dtype(dtype))


def on_rank(
    servers: int,
    fn: Callable[[Client], Any],
    consistency: Consistency | None = None,
    push_dtype: str | None = None,
) -> Any:
    """Call ``fn(client)`` on all ranks of the world but the last `servers`, which serve.

    Returns what the function returned, or on servers the `Server`.
    """
    joined = world()
    rank, size = joined.transport.rank, joined.transport.size
    clients, serving = range(size - servers), range(size - servers, size)
    lines = open_connections(joined, list(clients if rank in serving else serving))
    if rank in serving:
        server = Server([lines[peer] for peer in clients], rank - len(clients), consistency)
        server.serve()
        return server
    client = Client([lines[peer] for peer in serving], rank, len(clients), rank == 0, push_dtype)
    result = fn(client)
    client.leave()
    return result


def run(
    clients: int,
    fn: Callable[[Client], Any],
    servers: int = 1,
    consistency: Consistency | None = None,
    push_dtype: str | None = None,
    far: bool | Sequence[bool] = False,
    timeout_seconds: float = 30.0,
) -> tuple[list[Any], list[Server]]:
    """Run ``fn(client)`` on threads; return its results, and the servers after all clients have left.

    Parameters
    ----------
    far : bool or sequence of bool
        Which clients, or whether all of them, are on another node than the servers.
    """
    apart = [far] * clients if isinstance(far, bool) else far
    hosts = ["elsewhere" if is_far else "here" for is_far in apart] + ["here"] * servers

    def job() -> Any:
        return on_rank(servers, fn, consistency, push_dtype)

    found = run_ranks(clients + servers, job, hosts=hosts, timeout_seconds=timeout_seconds)
    return found[:clients], found[clients:]


def value(served: Sequence[Server], key: Key) -> Any:
    """Return a variable as the servers hold it."""
    (store,) = [server.store for server in served if key in server.store.variables]
    return store.read(key)
