"""The handwritten digits that ship inside the scikit-learn wheel: 1797 images of 8 x 8 pixels, in 10 classes.

The CSV file is read directly.  Importing scikit-learn itself would cost every rank half a second.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy

CLASSES = 10
SIDE = 8
TEST_ROWS = 360


class Digits(NamedTuple):
    """Images of shape (rows, 8, 8), float32 from 0 to 1, and labels of shape (rows, 10), one-hot float32."""

    images: numpy.ndarray
    labels: numpy.ndarray


def csv_path() -> Path:
    """Return where scikit-learn keeps the digits; exits with the command that installs them."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the digits are a file of scikit-learn, which is not installed: pip install scikit-learn")
    return Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def load(split: int = 0) -> tuple[Digits, Digits]:
    """Return the training and the test rows; each number of `split` is another fixed choice of 360 test rows."""
    with gzip.open(csv_path(), "rb") as file:
        table = numpy.loadtxt(file, delimiter=",", dtype="float32")
    table = table[numpy.random.default_rng(split).permutation(len(table))]
    images = table[:, :-1].reshape(-1, SIDE, SIDE) / 16
    labels = numpy.eye(CLASSES, dtype="float32")[table[:, -1].astype(int)]
    return Digits(images[TEST_ROWS:], labels[TEST_ROWS:]), Digits(images[:TEST_ROWS], labels[:TEST_ROWS])


def shifted(images: Any, moves: Any) -> Any:
    """Return the images, each moved by `moves` - 1 pixels; `moves` is 0, 1 or 2 by row and direction."""
    padded = numpy.pad(images, ((0, 0), (1, 1), (1, 1)))
    each, span = numpy.arange(len(images))[:, None, None], numpy.arange(SIDE)
    return padded[each, (moves[:, :1] + span)[:, :, None], (moves[:, 1:] + span)[:, None, :]]


if __name__ == "__main__":
    raise SystemExit("digits.py has the data of the examples; train a model on them: python examples/train.py")
