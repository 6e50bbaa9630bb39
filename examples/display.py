"""What `train.py` shows of a run: plain tables, and a progress bar where rich is installed and somebody watches."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy

import mpidist

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


def shared_cores(ranks: Sequence[Sequence[str]], cores: int) -> str:
    """Return that the ranks of this host share its cores, which is slow; empty if each has one of its own."""
    here = sum(row[1] == socket.gethostname() for row in ranks[1:])
    if here <= cores:
        return ""
    return f"{here} ranks share {cores} cores: this shows that it works, not speed; fewer ranks are as quick or quicker"


def on_terminal() -> bool:
    """Return whether somebody watches.  Open MPI gives ranks a terminal of their own: there mpirun's output counts."""
    if not sys.stdout.isatty() or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def slowest(seconds: Sequence[float]) -> str:
    """Return which rank computed for longer than the others; empty if all took about as long."""
    slow = mpidist.callbacks.SlowReplica.of(seconds)
    return f"rank {slow.replica} is slow: {slow.times:.1f} times the others" if slow else ""


class Progress:
    """A bar on a terminal, with the slowest rank and the time left; a line an epoch elsewhere; `visible` or not.

    `steps` are those that were made before, by the run that this one resumes.
    """

    def __init__(self, epochs: int, rows: int, batch_size: int, steps: int, visible: bool) -> None:
        self._epochs, self._rows, self._batch_size, self._visible = epochs, rows, batch_size, visible
        self._steps_an_epoch = -(-rows // batch_size)
        self._last, self._rows_before = time.perf_counter(), self._rows_after(steps)
        self._bar: Any = None
        if visible and rich_progress is not None and on_terminal():
            columns = ("epoch {task.completed}/{task.total}", rich_progress.BarColumn(), "{task.description}")
            self._bar = rich_progress.Progress(*columns, rich_progress.TimeRemainingColumn())
            self._task = self._bar.add_task("", total=epochs, completed=steps // self._steps_an_epoch)
            self._bar.start()

    def _rows_after(self, steps: int) -> int:
        """Return how many rows the first `steps` steps take; the last batch of an epoch may be smaller."""
        epochs, more = divmod(steps, self._steps_an_epoch)
        return epochs * self._rows + min(more * self._batch_size, self._rows)

    def show(self, steps: int, loss: float, slow: str = "") -> None:
        """Show how far it is after `steps` steps in all: at the end of an epoch, or within one; `slow` on the bar."""
        now, rows = time.perf_counter(), self._rows_after(steps)
        complete, more = divmod(steps, self._steps_an_epoch)
        part = f", {more} of {self._steps_an_epoch} steps" if more else ""
        text = f"loss {loss:.4f}  {(rows - self._rows_before) / (now - self._last):.0f} examples/s"
        self._last, self._rows_before = now, rows
        if self._bar is not None:
            self._bar.update(self._task, completed=complete, description=f"{text}  {slow}".rstrip())
        elif self._visible:
            print(f"epoch {complete + bool(more)}/{self._epochs}{part}  {text}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    raise SystemExit("display.py is a part of train.py: python examples/train.py")
