"""Rows of files: HDF5, NumPy, text and CSV, one file or several, against what was written."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpidist.errors import InputError
from mpidist.input import ArraySpec, Dataset, DistributedDataset
from mpidist.input.files import read_rows
from mpidist.input.hdf5 import OpenFiles

IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def rows_of(batches):
    return numpy.concatenate(list(batches)).tolist()


@pytest.fixture
def hdf5_files(tmp_path):
    """Three files with rows 0 to 9, 10 to 10 and 11 to 41; x in compressed chunks, y beside it."""
    bounds = [0, 10, 11, 42]
    for number, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = numpy.arange(first, end)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            x = numpy.stack([rows, rows * 2], axis=1).astype("f4")
            file.create_dataset("x", data=x, chunks=(min(4, len(rows)), 2), compression="gzip")
            file.create_dataset("labels/y", data=rows)
    return tmp_path / "*.h5"


def test_rows_of_several_hdf5_files_follow_each_other(hdf5_files):
    dataset = Dataset.from_hdf5(hdf5_files, {"x": "x", "y": "labels/y"})
    assert len(dataset) == 42
    assert dataset.element_spec == {"x": ArraySpec((2,), numpy.dtype("f4")), "y": ArraySpec((), numpy.dtype("i8"))}
    batches = list(dataset.batch(8))
    assert rows_of(batch["y"] for batch in batches) == list(range(42))
    assert rows_of(batch["x"] for batch in batches) == [[row, 2 * row] for row in range(42)]


@IN_FOLDER
@given(st.integers(1, 50), st.integers(1, 5), st.integers(0, 9))
def test_shuffled_rows_of_hdf5_files_are_those_of_arrays(hdf5_files, batch, replicas, seed):
    files = Dataset.from_hdf5(hdf5_files, ("x", "labels/y")).shuffle(seed=seed).batch(batch)
    arrays = Dataset.from_arrays(numpy.arange(42)).shuffle(seed=seed).batch(batch)
    for replica in range(replicas):
        pairs = zip(*(DistributedDataset(each, replica, replicas) for each in (files, arrays)), strict=True)
        for (x, y), expected in pairs:
            assert y.tolist() == expected.tolist()
            assert x.tolist() == [[row, 2 * row] for row in expected]


def test_only_the_rows_of_a_batch_are_read(tmp_path):
    class Counting:
        shape, dtype, read = (1000, 3), numpy.dtype("f8"), 0

        def __getitem__(self, rows):
            Counting.read += rows.stop - rows.start
            return numpy.arange(3000.0).reshape(1000, 3)[rows]

    assert read_rows(Counting(), range(500, 600))[0].tolist() == [1500, 1501, 1502]
    assert Counting.read == 100
    # rows further than 64 KiB from each other are read one by one
    Counting.shape, Counting.read = (10**6, 30000), 0
    far = numpy.array([900, 3, 50])

    class Wide(Counting):
        def __getitem__(self, rows):
            Counting.read += rows.stop - rows.start
            return numpy.full((rows.stop - rows.start, 30000), rows.start, float)

    assert read_rows(Wide(), far)[:, 0].tolist() == [900, 3, 50]
    assert Counting.read == 3


@given(st.lists(st.integers(0, 199), min_size=1, max_size=40), st.integers(1, 9000))
def test_rows_come_in_the_order_asked_for(wanted, width):
    array = numpy.broadcast_to(numpy.arange(200)[:, None], (200, width))
    assert read_rows(array, numpy.array(wanted))[:, -1].tolist() == wanted


def test_few_files_are_open_at_a_time(hdf5_files, monkeypatch):
    monkeypatch.setattr("mpidist.input.hdf5._MOST_OPEN", 2)
    files = OpenFiles()
    for _ in range(2):
        for number in range(3):
            assert files.arrays(str(hdf5_files.parent / f"{number}.h5"), "x").shape[0]
            assert len(files._open) <= 2
    assert rows_of(Dataset.from_hdf5(hdf5_files, "labels/y").shuffle(seed=0).batch(42).map(numpy.sort)) == list(
        range(42)
    )


def test_two_threads_open_a_file_once(hdf5_files, monkeypatch):
    """As two iterators with `prefetch` do."""
    both, files = threading.Barrier(2), OpenFiles()

    def array(file, name):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other thread gets here only if it opens the file, too
        return file[name]

    monkeypatch.setattr("mpidist.input.hdf5._array", array)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: files.arrays(str(hdf5_files.parent / "0.h5"), "x"), range(2))
    assert first is second


def test_what_is_wrong_with_hdf5_files_is_said(hdf5_files, tmp_path):
    with pytest.raises(KeyError, match="0.h5 has no array 'z'; at its top are 'labels', 'x'"):
        Dataset.from_hdf5(hdf5_files, "z")
    with pytest.raises(FileNotFoundError, match=r"no file .*no.h5"):
        Dataset.from_hdf5(tmp_path / "no.h5")
    with pytest.raises(FileNotFoundError, match=r"that the pattern matches"):
        Dataset.from_hdf5(tmp_path / "no*.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"], file["y"] = numpy.zeros((3, 2)), numpy.zeros(4)
    with pytest.raises(ValueError, match=r"other.h5: .* common first dimension"):
        Dataset.from_hdf5(tmp_path / "other.h5")
    with pytest.raises(ValueError, match=r"must have rows alike: .*0.h5 has .*float32.*other.h5 has .*float64"):
        Dataset.from_hdf5([tmp_path / "0.h5", tmp_path / "other.h5"], "x")
    with pytest.raises(ValueError, match="at least one file"):
        Dataset.from_hdf5([])


def test_a_file_that_is_damaged_later_names_the_rows(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=numpy.random.default_rng(0).random((64, 64)), chunks=(8, 64), compression="gzip")
    parts = DistributedDataset(Dataset.from_hdf5(path, "x").batch(8), 1, 2)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    with pytest.raises(
        InputError, match=r"rank 1 of 2: no batch for step \d of epoch 0: rows \d+ to \d+ of .*x.h5"
    ) as raised:
        list(parts)
    assert isinstance(raised.value.__cause__, OSError)


# -- NumPy ------------------------------------------------------------------------------------------------------------


def test_npy_files_side_by_side_and_one_after_the_other(tmp_path):
    x, y = numpy.arange(20.0).reshape(10, 2), numpy.arange(10)
    for name, array in (("x0", x[:4]), ("x1", x[4:]), ("y0", y[:4]), ("y1", y[4:])):
        numpy.save(tmp_path / f"{name}.npy", array)
    dataset = Dataset.from_npy((tmp_path / "x*.npy", [tmp_path / "y0.npy", tmp_path / "y1.npy"]))
    batch = next(iter(dataset.shuffle(seed=1).batch(10)))
    assert sorted(batch[1].tolist()) == y.tolist()
    assert (batch[0] == x[batch[1]]).all()
    assert type(batch[0]) is numpy.ndarray  # a copy in memory, not a view of the file
    with pytest.raises(ValueError, match="same number of files"):
        Dataset.from_npy((tmp_path / "x*.npy", tmp_path / "y0.npy"))


@pytest.mark.parametrize("save", [numpy.savez, numpy.savez_compressed])
def test_npz_files(save, tmp_path):
    x = numpy.asfortranarray(numpy.arange(20.0).reshape(10, 2))
    save(tmp_path / "a.npz", x=x, y=numpy.arange(10), empty=numpy.zeros((10, 0)))
    batch = next(iter(Dataset.from_npz(tmp_path / "a.npz").batch(3)))
    assert (batch["x"].tolist(), batch["y"].tolist(), batch["empty"].shape) == (x[:3].tolist(), [0, 1, 2], (3, 0))
    with pytest.raises(KeyError, match="no array 'z'; it has 'x', 'y', 'empty'"):
        Dataset.from_npz(tmp_path / "a.npz", ("x", "z"))


def test_uncompressed_npz_files_are_mapped(tmp_path):
    from mpidist.input.numpy_files import npz_table

    numpy.savez(tmp_path / "a.npz", x=numpy.arange(5))
    assert isinstance(npz_table(str(tmp_path / "a.npz"), "x")._arrays, numpy.memmap)


def test_python_objects_in_files_are_not_read(tmp_path):
    numpy.save(tmp_path / "o.npy", numpy.array([None, {}]), allow_pickle=True)
    numpy.savez(tmp_path / "o.npz", o=numpy.array([None, {}]))
    for make, name in ((Dataset.from_npy, "o.npy"), (Dataset.from_npz, "o.npz")):
        with pytest.raises(ValueError):
            make(tmp_path / name)


# -- text -------------------------------------------------------------------------------------------------------------


@IN_FOLDER
@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), max_size=8), max_size=20), st.booleans()
)
def test_lines_of_text(tmp_path, lines, ends):
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="\n")
    expected = text.removesuffix("\n").split("\n") if text else []
    assert [str(line) for line in Dataset.from_text(tmp_path / "a.txt")] == expected


def test_lines_in_any_order_and_other_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei\r\ndrei öß\r\n".encode())
    assert sorted(rows_of(Dataset.from_text(tmp_path / "a.txt").shuffle(seed=1).batch(2))) == [
        "drei öß",
        "eins",
        "zwei",
    ]


def test_csv_files_with_a_header(tmp_path):
    (tmp_path / "0.csv").write_text('name,age,weight\n"Smith, J",40,70.5\nB,7,20\n')
    (tmp_path / "1.csv").write_text("name,age,weight\nC,9,30\n")
    dataset = Dataset.from_csv(tmp_path / "*.csv", ["age", "name", "weight"], {"age": "int16", "name": str})
    (batch,) = dataset.batch(5)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "age": [40, 7, 9],
        "name": ["Smith, J", "B", "C"],
        "weight": [70.5, 20, 30],
    }
    assert (batch["age"].dtype, batch["weight"].dtype) == ("int16", "float32")


def test_a_dtype_for_no_column_is_refused(tmp_path):
    """Else the column that was meant would be float32, which holds no 16777217."""
    (tmp_path / "a.csv").write_text("label\n16777217\n")
    with pytest.raises(KeyError, match="no column 'lable' for its dtype; it has 'label'"):
        Dataset.from_csv(tmp_path / "a.csv", dtype={"lable": "int64"})


def test_a_csv_file_of_a_spreadsheet_begins_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n1,2\r\n")
    assert [{k: float(v) for k, v in row.items()} for row in Dataset.from_csv(tmp_path / "a.csv")] == [{"a": 1, "b": 2}]
    assert Dataset.from_csv(tmp_path / "a.csv", ["a"]).cardinality() == 1
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert [str(line) for line in Dataset.from_text(tmp_path / "b.txt")] == ["one", "two"]


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,a,b\n1,2,3\n")
    with pytest.raises(ValueError, match="the column 'a' more than once"):
        Dataset.from_csv(tmp_path / "a.csv")
    assert [float(row["b"]) for row in Dataset.from_csv(tmp_path / "a.csv", ["b"])] == [3]


def test_csv_files_without_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("1;2\n3;4")
    (batch,) = Dataset.from_csv(tmp_path / "a.csv", header=False, delimiter=";", dtype="int64").batch(2)
    assert [column.tolist() for column in batch] == [[1, 3], [2, 4]]
    (batch,) = Dataset.from_csv(tmp_path / "a.csv", [1], header=False, delimiter=";").batch(2)
    assert batch[0].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", "row 1 has 1 fields, expected 2"),
        ("a,b\n1,2\n3,x\n", "column 'b' of row 1 is 'x', expected float32"),
        ('a,b\n1,"2\n3"\n', "line break|unexpected end of data"),
        ("a,b\n1,2\n\n", "row 1 has 0 fields, expected 2"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_said(text, message, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=rf"rows 0 to 1 of .*a.csv could not be read: .*({message})"):
        list(Dataset.from_csv(tmp_path / "a.csv").batch(9))
    with pytest.raises(KeyError, match="no column 'c'; it has 'a', 'b'"):
        Dataset.from_csv(tmp_path / "a.csv", ["c"])


def test_truth_values_of_a_csv_file_are_what_they_say(tmp_path):
    (tmp_path / "a.csv").write_text("flag\n0\nFalse\n1\ntrue\nFALSE\n")
    (batch,) = Dataset.from_csv(tmp_path / "a.csv", dtype=bool).batch(5)
    assert batch["flag"].dtype == bool
    assert batch["flag"].tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(("dtype", "text"), [("bool", "no"), ("bool", ""), ("int8", "300"), ("uint8", "-1")])
def test_a_value_that_a_column_cannot_hold_is_named(tmp_path, dtype, text):
    (tmp_path / "a.csv").write_text(f"a,b\n1,1\n{text},0\n")
    with pytest.raises(InputError, match=f"column 'a' of row 1 is '{text}', expected {dtype}"):
        list(Dataset.from_csv(tmp_path / "a.csv", dtype=dtype).batch(2))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [("float32", "1e39"), ("float16", "-70000"), ("float64", "1e400"), ("float32", "1_000"), ("int64", "1_000")],
)
def test_a_number_is_not_read_as_another_one(tmp_path, dtype, text):
    (tmp_path / "a.csv").write_text(f"a\n1\n{text}\n")
    with pytest.raises(InputError, match=f"column 'a' of row 1 is '{text}', expected {dtype}"):
        list(Dataset.from_csv(tmp_path / "a.csv", dtype=dtype).batch(2))


def test_infinity_and_underscores_that_are_meant_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\ninf,x_y\n-Infinity,z\n1e-50,_\n")
    (batch,) = Dataset.from_csv(tmp_path / "a.csv", dtype={"b": str}).batch(3)
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([numpy.inf, -numpy.inf, 0.0], ["x_y", "z", "_"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "cp037"])
def test_an_encoding_whose_lines_cannot_be_found_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("ab\n\u0041\ncd\n".encode(encoding))
    for make in (Dataset.from_text, Dataset.from_csv):
        with pytest.raises(ValueError, match=f"0x0a, which ends none in {encoding}; convert it to UTF-8"):
            make(tmp_path / "a.txt", encoding=encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "shift_jis"])
def test_lines_of_other_encodings(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("ab\ncd\n".encode(encoding))
    assert [str(line) for line in Dataset.from_text(tmp_path / "a.txt", encoding)] == ["ab", "cd"]
