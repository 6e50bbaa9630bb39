"""How codes become sums: gathered as a whole, or share by share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy

from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.message_link import MessageLink
from mpidist.collectives.ways.executor import Executor, even_bounds
from mpidist.compression.base import Compression
from mpidist.compression.residues import CodeResidues
from mpidist.runtime.control import Watch
from mpidist.schedules.table import algorithm
from mpidist.transports.base import Transport


class GatheredCodes:
    """The codes of all values of all ranks, gathered; each rank adds up all of them, in rank order.

    The `dtype` of the values is float32 or float64.
    """

    residues: CodeResidues | None = None

    def __init__(self, transport: Transport, elements: int, dtype: Any, stage: Compression) -> None:
        self._stage, self._rank = stage, transport.rank
        lengths = [_code_bytes(stage, elements, dtype)] * transport.size
        self._pieces, self._gather = _gathering(transport, lengths)

    def encode(self, values: numpy.ndarray) -> None:
        """Code this rank's values.  Local."""
        _encode(self._stage, values, self._pieces[self._rank])

    def decode_own(self, values: numpy.ndarray) -> None:
        """Write what this rank's code stands for.  Local."""
        _decode(self._stage, self._pieces[self._rank], values)

    def sum(self, watch: Watch, total: numpy.ndarray, scale: float | None) -> None:
        """Write the scaled sums.  Collective."""
        self._gather(watch)
        total[:] = 0
        for code in self._pieces:
            _add(self._stage, code, total)
        if scale is not None:
            total *= scale


class SharedCodes:
    """Codes of shares: each rank adds up its share of all ranks' values, and codes the sums for the way back."""

    def __init__(self, transport: Transport, elements: int, dtype: Any, stage: Compression) -> None:
        self._stage, self._transport, self._rank = stage, transport, transport.rank
        self._bounds = even_bounds(elements, transport.size)
        shares = [last - first for first, last in pairwise(self._bounds)]
        lengths = [_code_bytes(stage, share, dtype) for share in shares]
        self._outgoing = _cut(numpy.zeros(sum(lengths), numpy.uint8), lengths)
        own = lengths[self._rank]
        self._incoming = _cut(numpy.zeros(own * transport.size, numpy.uint8), [own] * transport.size)
        self._incoming[self._rank] = self._outgoing[self._rank]
        self._share = numpy.zeros(shares[self._rank], dtype)
        self._pieces, self._gather = _gathering(transport, lengths)
        self.residues = CodeResidues(shares[self._rank], dtype) if stage.error_feedback else None

    def encode(self, values: numpy.ndarray) -> None:
        """Code this rank's values, each share by itself.  Local."""
        for code, part in zip(self._outgoing, self._parts(values), strict=True):
            _encode(self._stage, part, code)

    def decode_own(self, values: numpy.ndarray) -> None:
        """Write what this rank's codes stand for.  Local."""
        for code, part in zip(self._outgoing, self._parts(values), strict=True):
            _decode(self._stage, code, part)

    def sum(self, watch: Watch, total: numpy.ndarray, scale: float | None) -> None:
        """Write the scaled sums.  Collective."""
        others = [rank for rank in range(self._transport.size) if rank != self._rank]
        gives, places = ({rank: codes[rank] for rank in others} for codes in (self._outgoing, self._incoming))
        MessageLink(self._transport).exchange(gives, places, watch)
        self._add_up(scale)
        self._gather(watch)
        for code, part in zip(self._pieces, self._parts(total), strict=True):
            _decode(self._stage, code, part)

    def _parts(self, values: numpy.ndarray) -> list[numpy.ndarray]:
        return [values[first:last] for first, last in pairwise(self._bounds)]

    def _add_up(self, scale: float | None) -> None:
        """Add up this rank's share in rank order, and code the sums."""
        share, own = self._share, self._pieces[self._rank]
        share[:] = 0
        for code in self._incoming:
            _add(self._stage, code, share)
        if scale is not None:
            share *= scale
        if self.residues is not None:
            self.residues.add_to(share)
        _encode(self._stage, share, own)
        if self.residues is not None:
            decoded = numpy.empty_like(share)
            _decode(self._stage, own, decoded)
            self.residues.note(share, decoded)


def _gathering(transport: Transport, lengths: list[int]) -> tuple[list[Any], Callable[[Watch], None]]:
    """Return memory for a code of each rank, by rank, and what gathers them."""
    codes = numpy.zeros(sum(lengths), numpy.uint8)
    ring = algorithm("all_gather", "ring")
    return _cut(codes, lengths), Executor(ring, transport, codes, bounds=plain.bounds_of(lengths)).run


def _cut(codes: Any, lengths: list[int]) -> list[Any]:
    return [codes[first:last] for first, last in pairwise(plain.bounds_of(lengths))]


def _code_bytes(stage: Compression, elements: int, dtype: Any) -> int:
    """Return the length of a code, up to a multiple of 8, so that the next one may hold 8-byte values."""
    return -(-stage.code_bytes(elements, dtype) // 8) * 8 if elements else 0


def _encode(stage: Compression, values: Any, code: Any) -> None:
    if values.size:
        stage.encode(values, code[: stage.code_bytes(values.size, values.dtype)])


def _decode(stage: Compression, code: Any, values: Any) -> None:
    if values.size:
        stage.decode(code[: stage.code_bytes(values.size, values.dtype)], values)


def _add(stage: Compression, code: Any, total: Any) -> None:
    if total.size:
        stage.add(code[: stage.code_bytes(total.size, total.dtype)], total)
