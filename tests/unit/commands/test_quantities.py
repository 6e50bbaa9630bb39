"""Sizes, times and rates, there and back."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.commands import quantities


@pytest.mark.parametrize(
    "text, number",
    [("0", 0), ("4096", 4096), ("100MB", 10**8), ("1.5 KB", 1500), ("64KiB", 65536), ("64K", 65536), ("1e3B", 1000)],
)
def test_sizes(text: str, number: int) -> None:
    assert quantities.nbytes(text) == number


@pytest.mark.parametrize(
    "text, number",
    [("2us", 2e-6), ("600ns", 6e-7), ("0.5", 0.5), ("3 ms", 3e-3), ("1s", 1.0), ("5m", 300), ("1.5h", 5400)],
)
def test_times(text: str, number: float) -> None:
    assert quantities.seconds(text) == pytest.approx(number)


@pytest.mark.parametrize("text, number", [("25GB/s", 4e-11), ("200Gbit/s", 4e-11), ("4e-11", 4e-11), ("0", 0.0)])
def test_rates(text: str, number: float) -> None:
    assert quantities.seconds_per_byte(text) == pytest.approx(number)


@pytest.mark.parametrize(
    "convert, text",
    [
        (quantities.nbytes, "12XB"),
        (quantities.nbytes, "-1"),
        (quantities.nbytes, ""),
        (quantities.nbytes, "1e999"),
        (quantities.nbytes, "1e308TB"),
        (quantities.seconds, "2 minutes"),
        (quantities.seconds, "nan"),
        (quantities.seconds_per_byte, "25GB"),
        (quantities.seconds_per_byte, "0GB/s"),
        (quantities.seconds_per_byte, "1/s"),
    ],
)
def test_what_cannot_be_read_is_shown_with_what_is_expected(convert, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        convert(text)
    assert repr(text) in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 KB"),
        (1536, "1.54 KB"),
        (999_600, "1 MB"),
        (1e8, "100 MB"),
        (5e15, "5000 TB"),
    ],
)
def test_sizes_are_shown_with_three_digits(number: float, text: str) -> None:
    assert quantities.show_bytes(number) == text


@pytest.mark.parametrize(
    "number, text", [(0.0, "0 ns"), (6e-7, "600 ns"), (1.5e-5, "15 us"), (0.25, "250 ms"), (90, "90 s")]
)
def test_times_are_shown_with_three_digits(number: float, text: str) -> None:
    assert quantities.show_seconds(number) == text


@given(st.floats(1, 1e15))
def test_what_is_shown_is_what_was_meant(number: float) -> None:
    assert quantities.nbytes(quantities.show_bytes(number)) == pytest.approx(number, rel=6e-3, abs=0.5)


def test_columns() -> None:
    shown = quantities.table([["name", "n", "note"], ["ring", "100", ""], ["a", "2", "best"]], left=(0, 2))
    assert shown.splitlines() == ["name    n  note", "ring  100", "a       2  best"]
