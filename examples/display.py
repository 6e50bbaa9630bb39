"""What `train.py` shows of a run: plain tables, and a progress bar where rich is installed and somebody watches."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy

try:
    import rich.progress as rich_progress
except ImportError:
    rich_progress = None  # type: ignore[assignment]


def print_table(rows: Sequence[Sequence[Any]], gap: str = "  ") -> None:
    """Print columns of equal width."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print(gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def who_is_who(strategy: Any) -> list[tuple[str, ...]]:
    """Return a table of rank, host, node, role and device of every replica.  Collective: every rank calls it."""
    resolver = strategy.cluster_resolver
    role = f"{resolver.task_type} {resolver.task_id}" if resolver is not None and resolver.task_type else "replica"
    role += ", chief" if strategy.extended.replica_id == 0 else ""
    extended = strategy.extended
    device = f"{extended.device_name} ({extended.card_text})" if extended.card_text else extended.device_name
    line = f"{socket.gethostname()}\t{role}\t{device}\n".encode()
    lines = strategy.gather(numpy.frombuffer(line, "uint8"), axis=0).tobytes().decode().splitlines()
    facts = [line.split("\t") for line in lines]
    nodes = list(dict.fromkeys(host for host, _, _ in facts))
    table = [(str(rank), host, str(nodes.index(host)), *rest) for rank, (host, *rest) in enumerate(facts)]
    return [("rank", "host", "node", "role", "device"), *table]


def on_terminal() -> bool:
    """Return whether somebody watches.  Open MPI gives ranks a terminal of their own: there mpirun's output counts."""
    if not sys.stdout.isatty() or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


class Progress:
    """A bar with loss and examples/s on a terminal, a line an epoch elsewhere; nothing where `visible` is false."""

    def __init__(self, epochs: int, first_epoch: int, rows: int, visible: bool) -> None:
        self._epochs, self._rows, self._visible = epochs, rows, visible
        self._last = time.perf_counter()
        self._bar: Any = None
        if visible and rich_progress is not None and on_terminal():
            columns = ("epoch {task.completed}/{task.total}", rich_progress.BarColumn(), "{task.description}")
            self._bar = rich_progress.Progress(*columns)
            self._task = self._bar.add_task("", total=epochs, completed=first_epoch)
            self._bar.start()

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
