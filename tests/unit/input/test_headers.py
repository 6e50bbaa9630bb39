"""Headers of NumPy's files are read by one thread at a time."""

from __future__ import annotations

import threading

import numpy
import pytest

from mpidist.data import Dataset
from mpidist.testing import run_ranks


@pytest.mark.parametrize("kind", ["npy", "stored", "compressed"])
def test_threads_read_headers_one_after_the_other(kind, tmp_path, monkeypatch):
    path = tmp_path / ("rows.npy" if kind == "npy" else "rows.npz")
    save = {"npy": numpy.save, "stored": numpy.savez, "compressed": numpy.savez_compressed}[kind]
    save(path, numpy.arange(6.0))
    module, name = {
        "npy": (numpy, "load"),
        "stored": (numpy.lib.format, "read_array_header_1_0"),
        "compressed": (numpy.lib.format, "read_array"),
    }[kind]
    read, inside, seen, both = getattr(module, name), [], [], threading.Barrier(3)

    def noted(*args, **options):
        inside.append(None)
        seen.append(len(inside))
        try:
            both.wait(0.2)  # broken unless others come in
        except threading.BrokenBarrierError:
            pass
        inside.pop()
        return read(*args, **options)

    monkeypatch.setattr(module, name, noted)

    def on_rank():
        rows = Dataset.from_npy(path) if kind == "npy" else Dataset.from_npz(path)
        return [float(each if kind == "npy" else each["arr_0"]) for each in rows]

    assert run_ranks(3, on_rank) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3
    assert len(seen) >= 3 and set(seen) == {1}
