"""The same file as `hdf5_file`, written by all ranks together, where h5py is built for parallel HDF5.

Every rank writes some rows of each large array.  The chief writes small arrays, and all that is no array.  A rank waits
inside MPI here, since parallel HDF5 offers no other way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from mpidist.input.hdf5 import h5py
from mpidist.training import hdf5_file
from mpidist.training.entry_names import coded
from mpidist.training.hdf5_file import Ranges

#: Arrays of fewer bytes are written by the chief alone.
SPLIT_BYTES = 1 << 20

#: The CRC-32 polynomial, and x to the power of 8, both with the lowest power in the highest bit.
_POLYNOMIAL, _BYTE = 0xEDB88320, 1 << 23


def is_available() -> bool:
    """Return whether h5py is built for parallel HDF5.  Local."""
    return bool(h5py().get_config().mpi)


def rows_of(array: numpy.ndarray, rank: int, size: int) -> slice:
    """Return the rows of an array that a rank writes: of a small one all are the chief's.  Local."""
    if array.nbytes < SPLIT_BYTES:
        return slice(0, len(array) if rank == 0 else 0)
    return slice(len(array) * rank // size, len(array) * (rank + 1) // size)


def part_checksums(arrays: Mapping[str, numpy.ndarray], rank: int, size: int) -> list[tuple[int, int]]:
    """Return CRC-32 and length in bytes of this rank's part of every array.  Local."""
    parts = [_part(array, rank, size) for array in arrays.values()]
    return [(hdf5_file.checksum(part), part.nbytes) for part in parts]


def whole_checksums(names: Sequence[str], parts: Sequence[Sequence[tuple[int, int]]]) -> dict[str, int]:
    """Return the CRC-32 of every array from those of its parts, rank by rank.  Local."""
    checksums = dict.fromkeys(names, zlib.crc32(b""))
    for of_rank in parts:
        for name, (checksum, nbytes) in zip(names, of_rank, strict=True):
            checksums[name] = joined_checksum(checksums[name], checksum, nbytes)
    return checksums


def joined_checksum(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two pieces one behind the other, from that of each and the length of the second.  Local."""
    power, square = 1 << 31, _BYTE
    while second_bytes:
        if second_bytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        second_bytes >>= 1
    return _product(power, first) ^ second


def write_parts(
    temporary: Path,
    arrays: Mapping[str, numpy.ndarray],
    numbers: Mapping[str, Any],
    checksums: Mapping[str, int],
    rank: int,
    size: int,
    comm: Any,
) -> Ranges:
    """Write an HDF5 file, still without its trailer; return where the arrays are.

    Collective: every rank of `comm`, an MPI communicator of so many ranks, calls it.
    """
    library = h5py()
    with library.File(temporary, "w", driver="mpio", comm=comm, libver=hdf5_file.LIBRARY_VERSIONS) as content:
        ranges = hdf5_file.fill(content, arrays, numbers, checksums, stored=False)
        for name, array in arrays.items():
            if array.size:
                _write_part(content[coded(name)], hdf5_file.storable(array), rank, size)
    return ranges


def seal(temporary: Path, path: Path, ranges: Ranges, permit_fn: Callable[[], None]) -> None:
    """Add the trailer to a file that all ranks have closed, and give it its name.  Local, for the chief."""
    with open(temporary, "r+b") as file:
        hdf5_file.add_trailer(file, ranges)
    hdf5_file.finish(temporary, path, permit_fn)


def _part(array: numpy.ndarray, rank: int, size: int) -> numpy.ndarray:
    rows = numpy.atleast_1d(array)
    return rows[rows_of(rows, rank, size)]


def _write_part(entry: Any, array: numpy.ndarray, rank: int, size: int) -> None:
    """Write this rank's rows; also a rank that has none takes part, which h5py's own assignment would not."""
    library = h5py()
    part = numpy.ascontiguousarray(_part(array, rank, size))
    target, memory = entry.id.get_space(), library.h5s.create_simple(part.shape)
    if part.size == 0:
        target.select_none()
        memory.select_none()
    elif array.ndim:
        first = rows_of(array, rank, size).start
        target.select_hyperslab((first, *[0] * (array.ndim - 1)), part.shape)
    together = library.h5p.create(library.h5p.DATASET_XFER)
    together.set_dxpl_mpio(library.h5fd.MPIO_COLLECTIVE)
    entry.id.write(memory, target, part, dxpl=together)


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials over the integers modulo 2, modulo the polynomial of CRC-32."""
    product = 0
    while first:
        if first >> 31:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
