"""What a step of 1 float on a server takes in Python without anything around it: two workers, one server, no chief.

    python benchmarks/bare_steps.py

Words in shared memory say who has pushed and what is applied; whoever waits yields the core.  A worker reads the
variable, makes a gradient of it, and waits until its own push is applied, as the case ``ps`` has it.  Nothing is
checked, kept or counted, and nobody schedules.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from typing import Any

import numpy

WORKERS, STEPS = 2, 40000
#: Words from one worker's to the next; its push, what is applied of it, and its gradient.
STRIDE, PUSHED, APPLIED, GRADIENT = 16, 0, 1, 2


def worker(memory: Any, number: int) -> None:
    """Make the steps of a worker."""
    words, base = memoryview(memory).cast("q"), STRIDE * (number + 1)
    value = numpy.frombuffer(memory, "f4", 1)
    gradient = numpy.frombuffer(memory, "f4", 1, 8 * (base + GRADIENT))
    for step in range(1, STEPS + 1):
        gradient[...] = 0.5 * value
        words[base + PUSHED] = step
        while words[base + APPLIED] < step:
            os.sched_yield()


def serve(memory: Any) -> float:
    """Apply all steps; return the seconds that one took."""
    words, value = memoryview(memory).cast("q"), numpy.frombuffer(memory, "f4", 1)
    bases = [STRIDE * (number + 1) for number in range(WORKERS)]
    gradients = [numpy.frombuffer(memory, "f4", 1, 8 * (base + GRADIENT)) for base in bases]
    scratch, done, start = numpy.empty(1, "f4"), [0] * WORKERS, 0.0
    while sum(done) < WORKERS * STEPS:
        found = False
        for number, base in enumerate(bases):
            if words[base + PUSHED] > done[number]:
                start = start or time.perf_counter()
                numpy.multiply(gradients[number], 1e-3, out=scratch)
                numpy.subtract(value, scratch, out=value)
                done[number] += 1
                words[base + APPLIED] = done[number]
                found = True
        if not found:
            os.sched_yield()
    return (time.perf_counter() - start) / sum(done)


def main() -> None:
    """Measure and print."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=worker, args=(memory, number)) for number in range(WORKERS)]
    for each in workers:
        each.start()
    seconds = serve(memory)
    for each in workers:
        each.join()
    print(f"{1e6 * seconds:.1f} us a step, {1 / seconds:.0f} steps/s")


if __name__ == "__main__":
    main()
