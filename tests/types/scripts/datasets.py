"""Data sets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

import mpidist
from mpidist.data import ArraySpec, AutoShardPolicy, Dataset, Options


def numbers() -> Iterator[float]:
    yield from (1.0, 2.0)


def main(folder: Path) -> None:
    numpy.save(folder / "x.npy", numpy.ones((6, 2)))
    (folder / "lines.txt").write_text("a\nb\n")
    (folder / "table.csv").write_text("a,b\n1,2\n3,4\n")
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    sets: list[Dataset] = [
        Dataset.from_arrays({"x": numpy.ones((6, 2)), "y": numpy.ones(6)}).with_options(options),
        Dataset.from_generator(numbers, output_signature=ArraySpec((), "float64")),
        Dataset.from_npy(folder / "x.npy"),
        Dataset.from_npy((folder / "x.npy", str(folder / "x.npy"))),
        Dataset.from_text([folder / "lines.txt", str(folder / "*.txt")]),
        Dataset.from_csv(folder / "table.csv", columns=["a"], dtype={"a": "int64"}),
        Dataset.zip((Dataset.range(6), Dataset.range(6))).map(lambda a, b: a + b).filter(lambda a: a > 2),
        Dataset.range(6).shuffle(6, seed=1).repeat(2).take(4).skip(1).enumerate().cache().prefetch(2),
    ]
    for each in sets:
        batched = each.batch(2, drop_remainder=True)
        spec: Any = batched.element_spec
        first: Any = next(iter(batched))
        assert spec is not None and first is not None
    total: int = Dataset.range(4).reduce(0, lambda sum, each: sum + int(each))
    strategy = mpidist.MirroredStrategy()
    dealt: mpidist.DistributedDataset = strategy.experimental_distribute_dataset(Dataset.range(8).batch(4))
    iterator: mpidist.DistributedIterator = iter(dealt)
    assert total == 6 and len(iterator.get_next()) == 4 and Dataset.range(6).cardinality() == 6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
