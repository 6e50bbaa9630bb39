"""What `train.py` prints, on the chief only: tables and progress, with rich where it is installed."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:
    rich = None  # type: ignore[assignment]


def print_table(title: str, rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> None:
    """Print columns of equal width."""
    if rich is not None and sys.stdout.isatty():
        table = rich.table.Table(*header, title=title, title_justify="left", show_header=bool(header))
        for row in rows:
            table.add_row(*map(str, row))
        rich.console.Console().print(table)
        return
    texts = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    print(title)
    for row in texts:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def who_is_who(strategy: Any) -> list[list[str]]:
    """Return (rank, host, node, role, device) of every replica.  Collective: every rank calls it."""
    resolver = strategy.cluster_resolver
    role = f"{resolver.task_type} {resolver.task_id}" if resolver is not None and resolver.task_type else "replica"
    line = f"{socket.gethostname()}\t{role}\t{strategy.extended.device_name}\n".encode()
    lines = strategy.gather(numpy.frombuffer(line, "uint8"), axis=0).tobytes().decode().splitlines()
    facts = [line.split("\t") for line in lines]
    nodes = list(dict.fromkeys(host for host, _, _ in facts))
    return [[str(rank), host, str(nodes.index(host)), *rest] for rank, (host, *rest) in enumerate(facts)]


class Progress:
    """A bar with loss and examples/s on a terminal; elsewhere a line an epoch; nothing where `visible` is false."""

    def __init__(self, epochs: int, rows: int, first_epoch: int, visible: bool) -> None:
        self._epochs, self._rows, self._visible = epochs, rows, visible
        self._bar = None
        if visible and rich is not None and sys.stdout.isatty():
            columns = ("epoch {task.completed}/{task.total}", rich.progress.BarColumn(), "{task.description}")
            self._bar = rich.progress.Progress(*columns)
            self._task = self._bar.add_task("", total=epochs, completed=first_epoch)
            self._bar.start()
        self._last = time.perf_counter()

    def show(self, epoch: int, loss: float) -> None:
        """Show that an epoch is complete."""
        now = time.perf_counter()
        text = f"loss {loss:.4f}  {self._rows / (now - self._last):.0f} examples/s"
        self._last = now
        if self._bar is not None:
            self._bar.update(self._task, completed=epoch, description=text)
        elif self._visible:
            print(f"epoch {epoch}/{self._epochs}  {text}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
